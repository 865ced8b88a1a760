"""What a person sees and types: a console that outlives its reader, and this program's name as it is called here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import IO

from rich.console import Console

from paceline.core.errors import PacelineError


class Terminal(Console):
    """A console. When its reader is gone (`paceline up | head`), the work goes on unseen."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, stderr=stderr)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Send what is still written to a stream whose reader went away to nowhere: flushing it must not fail at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def own_command() -> str:
    """What to type for `paceline`, here: inside an environment that is not activated, a path."""
    if shutil.which("paceline") is not None:
        return "paceline"
    script = Path(sys.argv[0])
    if script.name != "paceline":
        return f"{sys.executable} -m paceline"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def counted(number: int, thing: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130


def report(error: PacelineError) -> None:
    """Print to stderr, plainly: no markup that a model's or a file's name could be taken for."""
    red, dim, plain = ("\033[1;31m", "\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "", "")
    print(f"{red}error:{plain} {error.message}", file=sys.stderr)
    if error.hint:
        print(f"{dim}hint:{plain}  {error.hint}", file=sys.stderr)
