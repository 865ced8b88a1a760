"""Waits for lines of the log, inside an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager


class LogLines(logging.Handler):
    """Every line of Paceline's log since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._loop.call_soon_threadsafe(self._more.set)

    async def line(self, *words: str) -> str:
        """The first line that holds all of some words."""
        async with asyncio.timeout(100):
            while True:
                for line in self.lines:
                    if all(word in line for word in words):
                        return line
                await self._more.wait()
                self._more.clear()


@contextmanager
def logged() -> Generator[LogLines]:
    handler = LogLines()
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
