"""The command of every process of this program.

Without `-P`, Python puts the current folder first among the places that modules come from. A `json.py` next to a downloaded model would then run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process


def python_command(*args: str) -> list[str]:
    """Return a command that runs this Python with `args`, and imports nothing from the current folder."""
    return [sys.executable, "-P", *args]


async def start_python(*args: str, environment: Mapping[str, str]) -> Process:
    """Start this Python with `args`, in a session of its own, with pipes for its input and for all of its output.

    Args:
        environment: all of its variables.

    Raises:
        OSError: the system starts no process.
    """
    from asyncio import create_subprocess_exec, subprocess  # most commands need no asyncio

    return await create_subprocess_exec(
        *python_command(*args),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
