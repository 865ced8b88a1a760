"""What is measured: this tree, an earlier commit of it, and llama.cpp; and homes of their own for each start.

Law: all are started as processes with the same interpreter; a tree is chosen by PYTHONPATH. What is made here is removed again, the worktree included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.store.home import Home

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "c943c08"
"""The commit that figures stand beside."""


@dataclass(frozen=True, slots=True)
class Build:
    """One tree of Paceline."""

    name: str
    source: Path

    def environment(self, home: Path | None = None) -> dict[str, str]:
        """For a process that runs it."""
        own = {} if home is None else {"PACELINE_HOME": str(home)}
        return {**os.environ, "PYTHONPATH": str(self.source), **own}


OURS = Build("this tree", ROOT / "src")


@contextmanager
def earlier(commit: str, scratch: Path) -> Iterator[Build]:
    """A commit's tree, checked out beside this one for as long as it is wanted.

    Raises:
        subprocess.CalledProcessError: git has no such commit.
    """
    tree = scratch / f"tree-{commit}"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", "--force", str(tree), commit], check=True)
    try:
        yield Build(commit, tree / "src")
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextmanager
def fresh_home(scratch: Path, name: str) -> Iterator[Path]:
    """A PACELINE_HOME in which nothing is kept but this machine's compiled kernels; removed in the end, with what was kept in it."""
    home = scratch / f"home-{name}"
    shutil.rmtree(home, ignore_errors=True)
    kernels = Home.from_environment().kernels
    kernels.mkdir(parents=True, exist_ok=True)
    (home / "cache").mkdir(parents=True)
    (home / "cache" / "kernels").symlink_to(kernels)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def read_into_cache(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
