"""State of the engines that this machine shares, for its owner. Nothing of it reaches other machines."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.fleet.card import ModelOffer


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model of a shared engine."""

    offer: ModelOffer
    """The node's card has it while requests may be sent to it."""
    context: int
    """Maximum tokens of prompt and answer together."""
    live: int
    """Sequences of this node that run there."""
    trouble: str = ""
    """Why no requests are sent to it now; empty: they are."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """A shared engine."""

    url: str
    engine: str = ""
    """Name and version; empty: it has never answered."""
    models: tuple[SharedModel, ...] = ()
    running: int | None = None
    """Requests that run there, from whatever client; None: the engine does not say."""
    waiting: int | None = None
    trouble: str = ""
    """Why it does not answer now; empty: it does."""
    leaves_network: bool = False
    plain_http: bool = False
