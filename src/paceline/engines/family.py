"""The processes of an engine that this node started.

Law: a process is killed here only if the environment of this start is in it, or if it is in the session of this start's guard.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import psutil

from paceline.engines.contract import Door

MARK: Final = "PACELINE_ENGINE"
"""Environment variable that all processes of one start inherit. Its value is the start's folder."""
KILL_S: Final = 2.0
"""Seconds in which killed processes must be gone. Raising it: one that hangs in a driver holds up its node."""
_LOOK_S = 0.01


def kill_family(mark: str, guard: int) -> None:
    """Kill all processes of one start, orphans too. Blocks for up to `KILL_S`, mostly for some milliseconds. From any thread.

    Args:
        mark: the value of `MARK` in the start's environment.
        guard: process id of the guard, which leads its session. It need not run any more.
    """
    until_s = time.monotonic() + KILL_S
    while (left := [each for each in psutil.process_iter() if _belongs(each, mark, guard)]) and time.monotonic() < until_s:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_LOOK_S)


def _belongs(process: psutil.Process, mark: str, guard: int) -> bool:
    if process.pid == os.getpid():
        return False
    with suppress(psutil.Error, OSError):
        return (os.getsid(process.pid) == guard or process.environ().get(MARK) == mark) and process.status() != psutil.STATUS_ZOMBIE
    return False


class PortHolder:
    """Says whether an engine listens at its port. Another program that took the port would get the key and the prompts."""

    def __init__(self, guard: int, door: Door) -> None:
        parts = urlsplit(door.url)
        self._guard, self._at = guard, (parts.hostname, parts.port)
        self._found: psutil.Process | None = None

    def is_there(self) -> bool:
        """Return whether a process below the guard listens now. From any thread."""
        found = self._found
        if found is None or not self._listens(found):
            found = None
            with suppress(psutil.Error):
                below = psutil.Process(self._guard).children(recursive=True)
                found = next(filter(self._listens, below), None)
            self._found = found
        return found is not None

    def _listens(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            connections = process.net_connections("tcp") if process.is_running() else []
            return any(each.status == psutil.CONN_LISTEN and tuple(each.laddr) == self._at for each in connections)
        return False
