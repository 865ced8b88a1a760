"""Event loops in threads of their own, for what a test uses from outside of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")
BOUND_S = 60.0
"""Longest wait for its start, and for its end; reached only when a test fails."""


@contextmanager
def on_a_loop(made: Callable[[], AbstractAsyncContextManager[T]]) -> Generator[T]:
    """What lives on an event loop, which runs in a thread of its own until the block is left."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[T]()
    done = asyncio.Event()

    async def live() -> None:
        async with made() as one:
            found.append(one)
            ready.set()
            await done.wait()

    def run() -> None:
        try:
            loop.run_until_complete(live())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(BOUND_S)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(BOUND_S)
