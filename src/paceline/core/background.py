"""Background tasks: a failure is logged, since nothing awaits the task, and work that must continue is restarted.

Law: failed work is restarted for as long as its owner wants it, after a pause that doubles. `Background.failing` names the work that fails repeatedly.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from paceline.core.backoff import Backoff
from paceline.core.clock import Clock

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before failed work is restarted: the first pause, doubled with each failure, and the longest. Raising them: a passing fault is felt for longer."""
STEADY_S = 120.0
"""Seconds after the end of the last pause from which the work counts as sound, and its failures are forgotten."""


def in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a coroutine once as a task on the running event loop, and log its failure. The caller keeps the task and may cancel it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_failure)
    return task


def tell_loop(loop: asyncio.AbstractEventLoop, work: Callable[..., object], *args: Any) -> None:
    """Schedule a call on an event loop from any thread. Do nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work, *args)


def run_interruptibly(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, but let Ctrl-C cancel it between two steps of the event loop.

    `asyncio.run` cancels in the signal's handler, in the middle of whatever runs: a future that is being completed at that moment is completed twice
    (InvalidStateError in the output).

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, and the coroutine did not catch its cancellation.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        return asyncio.run(work)
    interrupted = False

    async def main() -> Result:
        loop, running = asyncio.get_running_loop(), asyncio.create_task(work)

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process at once
            running.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await running
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


async def came_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event for at most `seconds`; None: without a limit.

    Returns:
        Whether the event was set.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until all of them have ended; their errors are dropped."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class TaskSet(set[asyncio.Task[None]]):
    """Running tasks that nothing awaits. A task leaves the set when it ends."""

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Start a coroutine as a task on the running event loop and keep it."""
        return self.hold(asyncio.create_task(work, name=name))

    def hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Keep a task that was started elsewhere."""
        self.add(task)
        task.add_done_callback(self.discard)
        return task


def in_background_of(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result], name: str) -> Future[Result]:
    """Start a coroutine on an event loop from any thread, and log its failure under `name`."""
    future = asyncio.run_coroutine_threadsafe(work, loop)

    def tell_failure(done: Future[Result]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s failed", name, exc_info=error)

    future.add_done_callback(tell_failure)
    return future


class Background:
    """Restarts a node's background work where it fails."""

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._troubles: dict[str, Backoff] = {}

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of work that failed more than once and has not been steady since."""
        now = self._clock.monotonic()
        return tuple(name for name, trouble in sorted(self._troubles.items()) if trouble.failures > 1 and not trouble.is_steady(now))

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Start work as a task on the running event loop, restarted after each failure. The task ends when the work returns, or when the caller cancels it."""
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
        """Count another failure of this work, and return the seconds to wait."""
        return self._troubles.setdefault(name, Backoff(PAUSE_S, LONGEST_PAUSE_S, STEADY_S)).fail(self._clock.monotonic())


def _tell_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        if not task.cancelling():
            logger.error("%s was ended by something it waited for", task.get_name())
    elif (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
