"""Answers of engines that make no sense.

Law: whatever an engine says, no error but Paceline's own leaves a call to it. An engine is another maker's program, and its answers are input.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Final, TypeVar

from paceline.core.errors import EngineGone, PacelineError

logger = logging.getLogger(__name__)

T = TypeVar("T")
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
