"""A limit on memory that bites: what a process takes beyond it ends the process, files it maps do not, and it sees how much it has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.memory_limit import MemoryLimit, NoMemoryLimitsError

MIB = 1 << 20
SEEN = "from paceline.backends.memory import available_bytes, total_bytes; print(total_bytes(), available_bytes())"


@pytest.fixture
def limit() -> Iterator[MemoryLimit]:
    try:
        made = MemoryLimit("test", 128 * MIB)
    except NoMemoryLimitsError as error:
        pytest.skip(str(error))
    with made:
        yield made


def run(limit: MemoryLimit, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*limit.prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_what_is_taken_beyond_it_ends_the_process_and_its_children(limit: MemoryLimit) -> None:
    assert run(limit, f"x = bytearray({64 * MIB})").returncode == 0
    assert limit.kills == 0
    nested = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'x = bytearray({200 * MIB})']).returncode)"
    assert run(limit, nested).returncode != 0
    assert limit.kills == 1


def test_a_file_may_be_larger(limit: MemoryLimit, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        for _ in range(200):
            file.write(bytes(MIB))
    mapped = f"import mmap; f = open({str(tmp_path / 'large')!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); print(sum(m[::4096]))"
    done = run(limit, mapped)
    assert (done.returncode, done.stdout) == (0, "0\n")


def test_a_process_in_it_sees_what_it_has(limit: MemoryLimit, tmp_path: Path) -> None:
    (tmp_path / "cached").write_bytes(bytes(80 * MIB))
    total, free = map(int, run(limit, f"open({str(tmp_path / 'cached')!r}, 'rb').read(); {SEEN}").stdout.split())
    assert total == 128 * MIB
    assert 64 * MIB < free < 128 * MIB


def test_it_ends_with_what_runs_in_it() -> None:
    try:
        limit = MemoryLimit("ended", 64 * MIB)
    except NoMemoryLimitsError as error:
        pytest.skip(str(error))
    with limit:
        process = subprocess.Popen([*limit.prefix, "sleep", "600"])
    assert process.wait(60) != 0
    assert not limit.folder.exists()
