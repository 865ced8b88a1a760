"""The checked-in stubs are what the generator makes of proto/."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_stubs_follow_the_schema() -> None:
    done = subprocess.run([sys.executable, "tools/generate_stubs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
