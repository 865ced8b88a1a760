"""Ctrl-C when it can't wait.

Python runs signal handlers between two of the main thread's instructions, and a kernel that is being compiled can be one instruction
for ten seconds. So while something loads, a thread of its own waits for the signal's byte and ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import NoReturn

AS_FOUND = b"\r\033[2K\033[?25h"
"""A line without the bar or spinner that was drawn on it, and the cursor they hid."""
LAST_WORDS_S = 0.5
"""Raising it: a reader that is slow gets more of what was said, and one that stopped holds up the end for longer."""


def end_now(code: int) -> NoReturn:
    """End the process where it stands, with the terminal as it was found; a reader that is gone, or reads no more, is no reason to stay."""
    try:
        speaking = threading.Thread(target=_last_words, name="paceline-last-words", daemon=True)
        speaking.start()
        speaking.join(LAST_WORDS_S)
    finally:  # whatever comes while it waits: a second Ctrl-C, say
        os._exit(code)


def _last_words() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Past sys.stdout: a bar that is still alive stands in for it, and would draw itself once more.
    if (terminal := next(filter(os.isatty, (1, 2)), None)) is not None:
        with suppress(OSError):
            os.write(terminal, AS_FOUND)


@contextmanager
def interrupts_end_now(code: int) -> Generator[None]:
    """End the process at SIGINT or SIGTERM while the block runs, whatever the main thread is doing. For the main thread only."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wait() -> None:
        if os.read(read, 1) != b"\0":  # the byte is the signal's number
            end_now(code)

    waiter = threading.Thread(target=wait, name="paceline-interrupts", daemon=True)
    waiter.start()
    # At every step one of the two ends the process: the handlers found here, or, while these do nothing in Python, the signal's byte.
    wakeup = signal.set_wakeup_fd(write)
    before = {number: signal.signal(number, lambda _signal, _frame: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(write, b"\0")
        waiter.join()
        os.close(read)
        os.close(write)
