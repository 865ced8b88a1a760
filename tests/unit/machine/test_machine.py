"""What the machine says of its memory and cores, read from folders laid out as Linux lays out its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline.backends.memory import available_bytes, human, own_bytes, total_bytes
from paceline.machine.devices import usable_cores

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux shows these as files")
KIB = 1024


def lay(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def have(monkeypatch: pytest.MonkeyPatch, available: int, total: int = 1 << 40) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=total))


@linux
def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 600 * KIB)
    proc = tmp_path / "proc"
    cgroup = lay(tmp_path / "cg", memory_dot_max="500000\n", memory_dot_current="300000\n", memory_dot_stat="anon 1\ninactive_file 50000\n")
    assert available_bytes(proc, cgroup) == 250_000
    lay(cgroup, memory_dot_max="max\n")
    assert available_bytes(proc, cgroup) == 600 * KIB


@linux
@pytest.mark.parametrize(
    ("line", "base", "limit", "used"),
    [
        ("0::/user/paceline", "cg", "memory.max", "memory.current"),
        ("4:cpu,memory:/user/paceline", "cg/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_of_a_process_is_bounded_by_every_group_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, base: str, limit: str, used: str
) -> None:
    have(monkeypatch, 900 * KIB)
    proc = lay(tmp_path / "proc", self__cgroup=f"9:pids:/elsewhere\n{line}\n")
    groups = [tmp_path / base / path for path in (".", "user", "user/paceline")]
    for group, bytes_ in zip(groups, (800, 600, 700), strict=True):
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{bytes_ * KIB}\n")
        (group / used).write_text(f"{100 * KIB}\n")
    assert available_bytes(proc, tmp_path / "cg") == 500 * KIB
    (groups[2] / limit).write_text(f"{300 * KIB}\n")
    assert available_bytes(proc, tmp_path / "cg") == 200 * KIB
    assert total_bytes(proc, tmp_path / "cg") == 300 * KIB
    (proc / "self/cgroup").write_text(line.replace("user/paceline", "only/the/host/knows") + "\n")
    assert available_bytes(proc, tmp_path / "cg") == 700 * KIB


@linux
def test_a_real_limit_is_seen_from_below_it() -> None:
    roots = [path for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()]
    outer = next(iter(roots), Path("/nowhere")) / f"paceline-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        name = "memory.limit_in_bytes" if (outer / "memory.limit_in_bytes").exists() else "memory.max"
        (outer / name).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        code = (
            f"open({str(inner / 'cgroup.procs')!r}, 'w').write('0'); from paceline.backends.memory import available_bytes, total_bytes; "
            "print(total_bytes(), available_bytes())"
        )
        total, available = map(int, subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.split())
    finally:
        inner.rmdir()
        outer.rmdir()
    assert total == 300 << 20
    assert 150 << 20 < available < 300 << 20


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() <= total_bytes()


def test_memory_of_a_process_that_is_gone_is_not_known() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert own_bytes(gone.pid) is None
    assert sys.platform != "linux" or (own_bytes(os.getpid()) or 0) > 1 << 20


@linux
def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    topology = {f"devices__system__cpu__cpu{cpu}__topology__thread_siblings_list": "all on one\n" for cpu in mine}
    assert usable_cores(lay(tmp_path / "one", **topology)) == 1
    assert usable_cores(tmp_path / "unknown") == len(mine)


@linux
def test_a_quota_bounds_the_threads(tmp_path: Path) -> None:
    assert usable_cores(lay(tmp_path, fs__cgroup__cpu_dot_max="100000 100000\n")) == 1
    assert usable_cores(lay(tmp_path, fs__cgroup__cpu_dot_max="50000 100000\n")) == 1


def test_bytes_as_people_read_them() -> None:
    assert human(180 << 20) == "180 MiB"
    assert human(3 << 29) == "1.5 GiB"
