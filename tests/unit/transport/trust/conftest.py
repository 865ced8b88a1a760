from __future__ import annotations

import asyncio
import logging

import pytest

from paceline.testing.fleets import TestFleet


@pytest.fixture
def fleet() -> TestFleet:
    return TestFleet()


class LogWait(logging.Handler):
    """Waits for a line of the log that holds all of some words."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._loop.call_soon_threadsafe(self._more.set)

    async def line(self, *words: str) -> str:
        async with asyncio.timeout(20):
            while True:
                for line in self.lines:
                    if all(word in line for word in words):
                        return line
                await self._more.wait()
                self._more.clear()


@pytest.fixture
def log():
    """Use inside the loop: `with log() as lines`."""
    from contextlib import contextmanager

    @contextmanager
    def listen():
        handler = LogWait()
        logger = logging.getLogger("paceline")
        logger.addHandler(handler)
        try:
            yield handler
        finally:
            logger.removeHandler(handler)

    return listen
