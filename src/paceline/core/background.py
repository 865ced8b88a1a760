"""Tasks that go on beside everything else: what ends one is logged, since nothing waits for it, and work that must go on is started again.

Law: work that fails is started again for as long as its owner wants it, after a pause that doubles. What fails again and again is named.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from paceline.core.backoff import Backoff
from paceline.core.clock import Clock

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before work that failed is started again: doubled with each failure. Raising them: a fault that passes is felt for longer."""
STEADY_S = 120.0
"""Work that went on for so long since its last failure counts as sound."""


def in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run work on this event loop once, until it ends, or its owner, who keeps the task, cancels it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_failure)
    return task


def tell_loop(loop: asyncio.AbstractEventLoop, work: Callable[..., object], *args: Any) -> None:
    """Have a loop do something soon; from any thread. One that is closed is told nothing."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work, *args)


async def came_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, so long at most; None: for as long as it takes. Returns whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class TaskSet(set[asyncio.Task[None]]):
    """Tasks that nothing waits for, until each is over."""

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Run one more on this event loop."""
        return self.hold(asyncio.create_task(work, name=name))

    def hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """One that was started."""
        self.add(task)
        task.add_done_callback(self.discard)
        return task


def in_background_of(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result], name: str) -> Future[Result]:
    """The same on an event loop, from any thread."""
    future = asyncio.run_coroutine_threadsafe(work, loop)

    def tell_failure(done: Future[Result]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s failed", name, exc_info=error)

    future.add_done_callback(tell_failure)
    return future


class Background:
    """Work of one node that is started again where it fails."""

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._troubles: dict[str, Backoff] = {}

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of work that failed more than once, and has not gone on for long since."""
        now = self._clock.monotonic()
        return tuple(name for name, trouble in sorted(self._troubles.items()) if trouble.failures > 1 and not trouble.is_steady(now))

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Run work on this event loop until it ends without an error, or its owner, who keeps the task, cancels it."""
        return in_background(self._kept(work, name), name)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        task = asyncio.current_task()
        try:
            while True:
                try:
                    await work()
                except asyncio.CancelledError:
                    if task is None or task.cancelling():
                        raise
                    logger.error("%s was ended by something it waited for", name)  # noqa: TRY400  its traceback is of nothing
                except Exception:
                    logger.exception("%s failed", name)
                else:
                    return
                await self._sleep(self._pause_s(name))
        finally:
            self._troubles.pop(name, None)

    def _pause_s(self, name: str) -> float:
        """After another failure."""
        return self._troubles.setdefault(name, Backoff(PAUSE_S, LONGEST_PAUSE_S, STEADY_S)).fail(self._clock.monotonic())


def _tell_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        if not task.cancelling():
            logger.error("%s was ended by something it waited for", task.get_name())
    elif (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
