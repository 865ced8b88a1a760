"""Answers of engines that make no sense.

Laws:
- Whatever an engine says, no error but Paceline's own leaves a call to it. An engine is another maker's program, and its answers are input.
- What is kept of an engine's words can be shown in a terminal and sent to other nodes: one line of bounded length, and numbers within bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from paceline.core.errors import EngineGone, PacelineError
from paceline.core.ids import is_sha256
from paceline.core.text import printable
from paceline.engines.contract import EngineIdentity, EngineModel

logger = logging.getLogger(__name__)

T = TypeVar("T")
MOST_MODELS: Final = 100
"""Models of one engine that are offered. Raising it: a node's card may grow beyond what other nodes take; some people have 40 models in Ollama."""
MOST_LETTERS: Final = 300
"""Length of a name. Longer ones, and those with control characters, are not offered."""
MOST_WORDS: Final = 100
"""Letters of an engine's name and version together. Raising it: they fill tables."""
MOST_TOKENS: Final = 1 << 31
"""Numbers of tokens from which on they mean nothing."""
MOST_SLOTS: Final = 1 << 16
MOST_BYTES: Final = 1 << 53
OTHER_VERSION: Final = "Its version may be too old or too new for Paceline."


async def made_sense(place: str, asking: Awaitable[T]) -> T:
    """Return what an engine said.

    Args:
        place: the engine's address, for messages.

    Raises:
        EngineGone: the answer has another shape than its adapter expects.
        PacelineError: as the method of `ForeignEngine` that is awaited.
    """
    try:
        return await asking
    except PacelineError:
        raise
    except Exception as error:
        raise nonsense(place, error) from error


def nonsense(place: str, error: Exception) -> EngineGone:
    """Return the error for an answer that made an adapter fail."""
    logger.debug("the engine at %s answers in a shape that its adapter does not expect", place, exc_info=error)
    return EngineGone(f"The engine at {place} answers in another shape than its API has ({type(error).__name__})", OTHER_VERSION)


def shown_identity(identity: EngineIdentity) -> EngineIdentity:
    """Return an identity in words that can be shown."""
    return EngineIdentity(
        printable(identity.name, MOST_WORDS), printable(identity.version, MOST_WORDS - min(MOST_WORDS, len(identity.name)))
    )


def shown_models(place: str, told: Sequence[EngineModel]) -> tuple[EngineModel, ...]:
    """Return the models that can be offered, with their figures within bounds.

    Args:
        place: the engine's address, for the log.
    """
    named = [model for model in told if 0 < len(model.name) <= MOST_LETTERS and model.name.isprintable()]
    if len(named) < len(told):
        logger.debug("%d models of the engine at %s have names that can't be shown", len(told) - len(named), place)
    return tuple(map(_within, named))


def _within(model: EngineModel) -> EngineModel:
    return replace(
        model,
        digest=model.digest if is_sha256(model.digest) else "",
        quantisation=printable(model.quantisation, MOST_WORDS),
        context=model.context if 0 < model.context < MOST_TOKENS else 0,
        slots=model.slots if 0 < model.slots < MOST_SLOTS else 0,
        size_bytes=model.size_bytes if 0 < model.size_bytes < MOST_BYTES else 0,
    )
