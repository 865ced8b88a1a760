"""A process of this Python with pipes, for an event loop. It is apart from `processes`, which code without an event loop imports."""

from __future__ import annotations

from asyncio import subprocess
from collections.abc import Mapping

from paceline.core.processes import python_command


async def start_python(*args: str, environment: Mapping[str, str]) -> subprocess.Process:
    """Start this Python with `args`, in a session of its own, with pipes for its input and for all of its output.

    Args:
        environment: all of its variables.

    Raises:
        OSError: the system starts no process.
    """
    pipe, output = subprocess.PIPE, subprocess.STDOUT
    return await subprocess.create_subprocess_exec(
        *python_command(*args), stdin=pipe, stdout=pipe, stderr=output, env=dict(environment), start_new_session=True
    )
