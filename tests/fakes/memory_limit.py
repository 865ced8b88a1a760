"""Processes under a limit on their memory that bites: a control group of Linux, version 1 or 2. What it needs is root, or a group of one's own.

Law: the group goes with its maker: processes left in it are killed. The limit is on what is taken, mapped files that could be
dropped excepted; RLIMIT_AS counts mappings instead, and would forbid a mapped file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_ROOT: Final = Path("/sys/fs/cgroup")
_ENTER: Final = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_END_S: Final = 10.0


class NoMemoryLimitsError(Exception):
    """This machine lets this process make no memory limits; says why. Tests skip, benchmarks leave the part out."""


class MemoryLimit:
    """A group of processes that together take at most so many bytes. For `with`."""

    def __init__(self, name: str, n_bytes: int) -> None:
        """Make the group.

        Args:
            n_bytes: of memory its processes may take together.

        Raises:
            NoMemoryLimitsError: it can't be made here.
        """
        self._two = (_ROOT / "cgroup.controllers").exists()
        root = _ROOT if self._two else _ROOT / "memory"
        self.n_bytes = n_bytes
        self.folder = root / f"paceline-{name}-{os.getpid()}"
        try:
            if self._two and "memory" not in (root / "cgroup.subtree_control").read_text().split():
                (root / "cgroup.subtree_control").write_text("+memory")
            self.folder.mkdir()
        except OSError as error:
            raise NoMemoryLimitsError(f"no control group can be made in {root}: {error}") from error
        try:
            (self.folder / ("memory.max" if self._two else "memory.limit_in_bytes")).write_text(str(n_bytes))
        except OSError as error:
            self.close()
            raise NoMemoryLimitsError(f"{self.folder} takes no memory limit: {error}") from error

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs in the group, and so does what it starts."""
        return ("/bin/sh", "-c", _ENTER, str(self.folder))

    @property
    def used_bytes(self) -> int:
        """Taken now, cached file pages included."""
        return int((self.folder / ("memory.current" if self._two else "memory.usage_in_bytes")).read_text())

    @property
    def anonymous_bytes(self) -> int:
        """Taken now and not backed by a file."""
        fields = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(fields["anon" if self._two else "total_rss"])

    @property
    def kills(self) -> int:
        """Processes the kernel has killed because the limit was reached."""
        name = "memory.events" if self._two else "memory.oom_control"
        fields = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(fields["oom_kill"])

    def close(self) -> None:
        """Kill what still runs in the group, and remove it."""
        until = time.monotonic() + _END_S
        while self.folder.exists():
            for pid in map(int, (self.folder / "cgroup.procs").read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError:  # busy until the last process is reaped
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
