"""Terminal output: a console that survives the end of its reader, and the name to call this program by.

Ctrl-C can't always wait: Python runs signal handlers between two of the main thread's instructions, and a kernel that is being compiled can be one
instruction for ten seconds. So while something loads, a thread of its own waits for the signal's byte and ends the process.

Streamed text is wrapped between words at the terminal's edge.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from paceline.core.errors import PacelineError
from paceline.core.processes import python_command
from paceline.core.text import shown

UNFOLDED = 1000


class Terminal(Console):
    """A console. When its reader is gone (`paceline up | head`), the work goes on unseen."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, stderr=stderr)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = UNFOLDED  # what goes to a program or a file is not broken over lines

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Send what is still written to a stream whose reader went away to nowhere: flushing it must not fail at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def own_command() -> str:
    """Return the command to type for `paceline` here: a path inside an environment that is not activated."""
    if shutil.which("paceline") is not None:
        return "paceline"
    script = Path(sys.argv[0])
    if script.name != "paceline":
        return shlex.join(python_command("-m", "paceline"))
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def print_lines(console: Console, *lines: str, style: str | None = None, end: str = "\n") -> None:
    """Print lines unchanged: without markup, since a name of a model or a file may look like it, and without wrapping."""
    console.print(*lines, sep="\n", end=end, markup=False, soft_wrap=True, style=style)


def print_json(value: object, *, on_one_line: bool = False) -> None:
    """Print JSON to standard output, for programs."""
    print(json.dumps(value, indent=None if on_one_line else 2), flush=True)


def counted(number: int, thing: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def table_of(*headings: str, left: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """Return an empty table that aligns numbers to the right.

    Args:
        left: headings of columns of words.
        whole: headings of columns with lines that are not broken.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold", no_wrap=heading in whole)
    return table


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2


def report(error: PacelineError) -> None:
    """Print to stderr, plainly: no markup that a model's or a file's name could be taken for."""
    red, dim, plain = ("\033[1;31m", "\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "", "")
    print(f"{red}error:{plain} {shown(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"{dim}hint:{plain}  {shown(error.hint)}", file=sys.stderr)


AS_FOUND = b"\r\033[2K\033[?25h"
"""A line without the bar or spinner that was drawn on it, and the cursor they hid."""
LAST_WORDS_S = 0.5
"""Raising it: a reader that is slow gets more of what was said, and one that stopped holds up the end for longer."""


def end_now(code: int) -> NoReturn:
    """End the process at once, and leave the terminal as it was found. Does not wait for a reader that is gone or reads no more."""
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


_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Holds back the last word until it is known to be whole, and the space before it until it is known to be needed."""

    def __init__(self, columns: int) -> None:
        self._columns = max(columns, 2)
        self._at = 0
        self._space = self._word = ""
        self._goes_on = False
        """The word that was shown last may not be over: it was too wide to be held back."""

    def feed(self, text: str) -> str:
        """Return the text that can be shown after a further piece."""
        shown: list[str] = []
        for part in _PARTS.findall(text):
            if not part.isspace():
                self._word += part
                if cell_len(self._word) >= self._columns:
                    shown.append(self._placed())
                    self._goes_on = True
                continue
            shown.append(self._placed())
            self._goes_on = False
            if part == "\n":
                self._space, self._at = "", 0
                shown.append("\n")
            else:
                self._space += part
        return "".join(shown)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._placed()

    def _placed(self) -> str:
        if not self._word:
            return ""
        before, word = self._space, self._word
        self._space = self._word = ""
        width = cell_len(word)
        if self._at and not self._goes_on and self._at + cell_len(before) + width > self._columns:
            before = "\n"
            self._at = width
        else:
            self._at += cell_len(before) + width
        # A word wider than the terminal is broken by it.
        self._at = self._at % self._columns or (self._columns if self._at else 0)
        return before + word
