"""Whose turn it is to use a runner: first come, first served, so that no session starves another.

A plain lock may go again and again to the thread that just gave it back, as it is the one that runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from paceline.core.errors import PipelineStalled


class Turns:
    """A lock that hands itself to the thread that waited longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextmanager
    def take(self, bound_s: float) -> Generator[None]:
        """Have the turn for as long as the block runs.

        Raises:
            PipelineStalled: it did not come within the bound.
        """
        self._wait(bound_s)
        try:
            yield
        finally:
            self._pass_on()

    @contextmanager
    def take_free(self) -> Generator[bool]:
        """Have the turn for as long as the block runs, if no thread has it now. Says whether."""
        with self._lock:
            mine = not self._taken
            self._taken = True
        try:
            yield mine
        finally:
            if mine:
                self._pass_on()

    def _wait(self, bound_s: float) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        if mine.acquire(timeout=bound_s):
            return
        with self._lock:
            if mine in self._queue:
                self._queue.remove(mine)
                raise PipelineStalled(f"These layers were busy for {bound_s:g} s")
        # It came just now.

    def _pass_on(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False
