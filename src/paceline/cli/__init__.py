"""The command line: parses arguments and renders. Whatever takes time to import is imported by the command that needs it."""

from __future__ import annotations

import sys

from paceline.cli.terminal import EXIT_INTERRUPTED

__all__ = ["main"]


def main() -> None:
    """Entry point. Imports the rest itself, so that a Ctrl-C in the first half second is no traceback either."""
    try:
        from paceline.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
