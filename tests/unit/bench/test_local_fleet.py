"""Local nodes leave nothing behind, in whatever order they end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paceline.bench.fleet import start_janitor

LATE = "import sys, pathlib; sys.stdin.read(); pathlib.Path(sys.argv[1], 'home').mkdir(parents=True, exist_ok=True)"
"""A node that was still starting when the fleet ended."""


def test_the_folder_goes_after_the_last_node_even_if_that_made_it_anew(tmp_path: Path) -> None:
    root = tmp_path / "fleet"
    root.mkdir()
    janitor, alive = start_janitor(root)
    node = subprocess.Popen([sys.executable, "-c", LATE, str(root)], stdin=subprocess.PIPE, pass_fds=(alive,))
    os.close(alive)
    try:
        with suppress(subprocess.TimeoutExpired):
            janitor.wait(0.3)
        assert janitor.poll() is None, "a node still runs"
        node.communicate(b"")
        assert janitor.wait(30) == 0
        assert not root.exists()
    finally:
        node.kill()
        janitor.kill()
        node.wait()
        janitor.wait()
