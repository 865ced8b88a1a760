"""The sources of drafts of one engine, from when it is built, and the fleet they draw on, from when this node is in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from paceline.core.clock import Clock
from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.engine.drafts import AUTO, DRAFTS
from paceline.fleet.view import FleetView
from paceline.node.drafts.drafter import Drafter, Key, OpenLine
from paceline.node.drafts.finding import Verifier, drafters
from paceline.node.drafts.lines import DeskLine
from paceline.node.drafts.meter import DraftMeter
from paceline.node.drafts.remote import RemoteDrafts
from paceline.transport.draft_blocks import OnBlock
from paceline.transport.proposer_desk import ProposerDesk

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""After the start, for whoever drafts to be seen, before it is said that nobody does."""

FLEET = "fleet"
"""A request's `draft` for whatever model of the fleet drafts best."""


class NodeDrafts:
    """Made with the engine, attached later.

    Args:
        draft: as the person asked: "auto", "off", "ngram", or a draft model's id.
        clock: all time.
        in_fleet: whether others may draft.
    """

    def __init__(self, draft: str, clock: Clock, *, in_fleet: bool) -> None:
        self.meter = DraftMeter()
        named = {draft: draft} if draft not in DRAFTS else {FLEET: ""} if draft == AUTO and in_fleet else {}
        self._models = named
        self.sources = {name: RemoteDrafts(name, self.meter, clock) for name in named}
        """By what a request's `draft` says."""
        self._grace: asyncio.TimerHandle | None = None

    def attach(self, verifier: Verifier, vocabulary_size: int, view: Callable[[], FleetView], open_line: OpenLine) -> None:
        """Draw on the fleet. On the event loop."""
        for name, source in self.sources.items():
            find = partial(_find, view, verifier, self._models[name])
            source.attach(find, open_line, vocabulary_size)
        self._grace = asyncio.get_running_loop().call_later(GRACE_S, self.complain)

    def complain(self) -> None:
        """Say which models that were asked for nobody drafts with."""
        for name, source in self.sources.items():
            if self._models[name] and source.drafter is None and source.trouble is not None:
                logger.warning("answers come without drafts of %s, until somebody drafts with it: %s", name, source.trouble)

    def attach_alone(self, desk: ProposerDesk, rates: Mapping[str, tuple[float, float]], vocabulary_size: int) -> None:
        """Draw on this process alone. On the event loop.

        Args:
            desk: its proposers.
            rates: tokens and prompt tokens a second, by model.
            vocabulary_size: of the model drafted for.
        """
        own = NodeId("here")

        def find(model_id: str, left_out: Collection[Key]) -> Sequence[Drafter]:
            names = [name for name in rates if model_id in {"", name}]
            if not names or (own, b"") in left_out:
                raise PlacementError(f"Nobody drafts with {model_id or 'a model'} here", f"Start with --propose {model_id or 'MODEL'}.")
            return [Drafter(own, b"", name, *rates[name], rtt_s=0.0) for name in names]

        def open_line(drafter: Drafter, on_block: OnBlock, on_end: Callable[..., None]) -> DeskLine:
            return DeskLine(desk, drafter.node_id, on_block, on_end)

        for name, source in self.sources.items():
            source.attach(partial(find, self._models[name]), open_line, vocabulary_size)

    def look(self) -> None:
        """The view has changed."""
        for source in self.sources.values():
            source.look()

    async def detach(self) -> None:
        """End. Idempotent."""
        if self._grace is not None:
            self._grace.cancel()
        await asyncio.gather(*(source.detach() for source in self.sources.values()))


def _find(view: Callable[[], FleetView], verifier: Verifier, model_id: str, left_out: Collection[Key]) -> Sequence[Drafter]:
    seen = view()
    return drafters(seen.cards, seen.trust, verifier, model_id, left_out)
