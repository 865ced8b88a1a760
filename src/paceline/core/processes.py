"""The command of every process of this program.

Without `-P`, Python puts the current folder first among the places that modules come from. A `json.py` next to a downloaded model would then run.
"""

from __future__ import annotations

import sys


def python_command(*args: str) -> list[str]:
    """Return a command that runs this Python with `args`, and imports nothing from the current folder."""
    return [sys.executable, "-P", *args]
