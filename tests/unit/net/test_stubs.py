"""The checked-in stubs are what the generator makes of proto/."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_stubs_follow_the_schema() -> None:
    done = subprocess.run([sys.executable, "tools/generate_stubs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 2)])
def test_only_a_person_may_go_without_the_schema_s_check(tmp_path: Path, ci: str, code: int) -> None:
    make = shutil.which("make")
    assert make is not None
    (tmp_path / "make").symlink_to(make)
    environment = {"PATH": str(tmp_path), "CI": ci}  # where no npm is
    done = subprocess.run([make, "schema"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "schema: not checked, because there is no npm" in done.stdout) == (code, True), done.stderr
