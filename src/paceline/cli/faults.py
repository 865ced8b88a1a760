"""How an error a person can fix looks: what happened on one line, what to do on the next."""

from __future__ import annotations

import sys

from paceline.core.errors import PacelineError

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
