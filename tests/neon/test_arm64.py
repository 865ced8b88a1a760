"""The compiled kernels for 64-bit ARM under qemu: against the written arithmetic, and the numerics id that x86 has. `make neon` makes what it takes.

Under an emulator some minutes go by with compiling; bytes are all that it tells.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.backends.cpu.test_lowerings import IDENTITY

REPOSITORY = Path(__file__).parents[2]
ROOT = Path(sys.prefix) / "arm64"
QEMU = shutil.which("qemu-aarch64-static")
PYTHON = ROOT / "usr/bin/python3.11"
LONGEST = 3600
UNITS = "tests/unit/backends/cpu"
FILES = {
    "rows": [f"{UNITS}/test_rows.py"],
    "denormals": [f"{UNITS}/test_denormals.py"],
    "pack": [f"{UNITS}/test_pack.py"],
    "sampler": [f"{UNITS}/test_sampler.py"],
    "attention": [f"{UNITS}/test_attention.py"],
    "products": [f"{UNITS}/test_products.py"],
}

pytestmark = [
    pytest.mark.timeout(LONGEST + 60),
    pytest.mark.skipif(QEMU is None, reason="there is no qemu-aarch64-static"),
    pytest.mark.skipif(not (ROOT / "made").exists(), reason="there is no Debian for ARM in .venv/arm64: make neon"),
]


def run(kernels: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python for ARM on this repository's sources."""
    path = ":".join(str(each) for each in (REPOSITORY / "src", REPOSITORY, ROOT / "site"))
    environment = {
        **os.environ,
        "PYTHONHOME": str(ROOT / "usr"),
        "PYTHONPATH": path,
        "NUMBA_CPU_NAME": "generic",
        "PACELINE_HOME": str(kernels),
    }
    command = [str(QEMU), "-cpu", "max", "-L", str(ROOT), str(PYTHON), *arguments]
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=LONGEST, check=False)


@pytest.mark.parametrize("part", FILES)
def test_kernels_are_what_the_written_arithmetic_says(part: str, tmp_path: Path) -> None:
    process = run(tmp_path, "-m", "pytest", "-q", "-x", "--noconftest", "-p", "tests.neon.kernels", "-p", "no:cacheprovider", *FILES[part])
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout
    assert " skipped" not in process.stdout


@pytest.mark.parametrize("lowering", ["neon", "neon-i8mm"])
def test_all_forms_have_the_numerics_id_of_x86(lowering: str, tmp_path: Path) -> None:
    """Hidden activations and logits of a tiny random model, in every form, over cuts and threads."""
    process = run(tmp_path, "-m", "tests.neon.identity", lowering)
    assert process.stdout.strip() == f"{lowering} {IDENTITY}", process.stderr
