"""The process between a node and an engine that it started: `python -m paceline.engines.guard GRACE_S FOLDER COMMAND...`.

Laws:
- The engine runs until standard input ends. The pipe's other end is the node's alone, so it ends however the node ends: stopped, crashed or killed.
- Then the engine and every process that it started end: SIGTERM, and SIGKILL after GRACE_S seconds. FOLDER, which holds the engine's socket, is removed.
- The same happens when the engine's own process ends, but FOLDER stays for the next start.
- Only this process's own descendants are signalled. The engine stays in this process's session, so that the node finds it if this process is killed.

Exit code: the engine's own, or 128 + number if a signal ended it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl(2)."""
_LOOK_S = 0.05
"""Seconds between two looks at processes that were told to end. Raising it: stopping takes longer."""
_KILL_S = 5.0
"""Seconds in which killed processes must be gone; one that hangs in a driver may stay for longer, and is left to the system."""


def main() -> int:
    """Run the engine. Returns the exit code."""
    grace_s, folder, *command = sys.argv[1:]
    tie = _tie_to_this_process()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node to handle
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=tie)  # noqa: S603, PLW1509 - one thread
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror or error}", file=sys.stderr, flush=True)  # noqa: T201 - the node reads it
        return 127
    watched = [sys.stdin.fileno(), reading]
    while engine.poll() is None and not told:
        ready, _, _ = select.select(watched, [], [])
        if reading in ready:
            os.read(reading, 4096)
        if watched[0] in ready and not os.read(watched[0], 4096):
            told.append(0)
    _end(engine, float(grace_s) if told else 0.0)
    if told:
        shutil.rmtree(folder, ignore_errors=True)
    code = engine.wait()
    return code if code >= 0 else 128 - code


def _tie_to_this_process() -> Callable[[], None] | None:
    """Adopt the engine's orphans, and return a function for the engine's process that ties its life to this one's. None: not Linux, which alone can."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    here = os.getpid()

    def tie() -> None:
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != here:
            os._exit(1)

    return tie


def _end(engine: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the engine and its descendants, whatever sessions they are in."""
    until_s = time.monotonic() + grace_s
    for process in _descendants():
        with suppress(psutil.Error):
            process.terminate()
    while time.monotonic() < until_s and (engine.poll() is None or _descendants()):
        time.sleep(_LOOK_S)
    until_s = time.monotonic() + _KILL_S
    while (left := _descendants()) and time.monotonic() < until_s:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_LOOK_S)


def _descendants() -> list[psutil.Process]:
    """Return the processes below this one that still run."""
    with suppress(psutil.Error):
        return [process for process in psutil.Process().children(recursive=True) if _runs(process)]
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
