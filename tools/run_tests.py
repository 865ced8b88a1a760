"""Run the tests, file by file, in a few processes side by side; end with what the files took.

    python tools/run_tests.py [pytest's options and paths]

With options there is one process: what they say. One process more than there are cores, as many a test waits for others; and no more than eight, as
many compute in several threads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LONGEST = ["identity", "soak", "fleet", "conformance", "golden", "adversarial"]
"""Folders to begin with, so that no core is idle while the last of their files ends. First those that no other process can starve: types are checked beside."""


def main(options: list[str]) -> None:
    if not options:
        folders = sorted(path.name for path in Path("tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
        in_order = sorted(folders, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))
        workers = min((os.cpu_count() or 1) + 1, 8)
        options = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", *(f"tests/{name}" for name in in_order)]
    # Hundreds of processes import the same sources.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "tools.file_times", *options])  # noqa: S606 - as Ctrl-C then goes to pytest alone


if __name__ == "__main__":
    main(sys.argv[1:])
