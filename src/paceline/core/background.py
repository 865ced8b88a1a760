"""Tasks that go on beside everything else: what ends one is logged, since nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run work on this event loop until it ends, or its owner, who keeps the task, cancels it.

    Args:
        work: what to do.
        name: of the task, for the log.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_failure)
    return task


def _tell_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        if not task.cancelling():
            logger.error("%s was ended by something it waited for", task.get_name())
    elif (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
