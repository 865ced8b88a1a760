"""The command line: parses arguments and renders. Whatever takes time to import is imported by the command that needs it."""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["EXIT_INTERRUPTED", "main"]

EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point. Imports the rest itself, so that a Ctrl-C in the first half second is no traceback either."""
    # Encoders run several texts side by side. NumPy's own threads would wait for one another by spinning, on cores that kernels want.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(20_000)  # objects: imports make hundreds of thousands that stay, and collecting among them is a tenth of a start
    try:
        from paceline.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
