"""The command line: parses arguments and renders. Whatever takes time to import is imported by the command that needs it."""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["EXIT_INTERRUPTED", "main"]

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Imports the rest inside, so that a Ctrl-C in the first half second prints no traceback either."""
    # NumPy's own threads would spin while they wait for one another, on cores that kernels need: encoders run several texts concurrently.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(20_000)  # objects: imports make hundreds of thousands that stay, and collecting among them is a tenth of a start
    try:
        from paceline.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
