"""Compiled kernels are kept by version, and old versions don't pile up."""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends import kernel_cache


@pytest.fixture(autouse=True)
def numba_cache() -> Iterator[None]:
    before = os.environ.get("NUMBA_CACHE_DIR")
    yield
    os.environ.pop("NUMBA_CACHE_DIR", None)
    if before is not None:
        os.environ["NUMBA_CACHE_DIR"] = before
    kernel_cache.config.reload_config()


def test_known_once_complete(tmp_path: Path) -> None:
    assert not kernel_cache.use(tmp_path)
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    assert not kernel_cache.use(tmp_path)
    kernel_cache.complete()
    assert kernel_cache.use(tmp_path)
    assert folder.parent == tmp_path


def test_old_versions_are_removed_but_for_the_latest(tmp_path: Path) -> None:
    for age in range(6):
        (tmp_path / f"v{age}").mkdir()
        os.utime(tmp_path / f"v{age}", (1000 - age, 1000 - age))
    kernel_cache.use(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("v*")) == ["v0", "v1", "v2"]


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_damaged_kernels_are_compiled_again(tmp_path: Path, damage: bytes | None) -> None:
    kernel_cache.use(tmp_path)
    kernel = Path(os.environ["NUMBA_CACHE_DIR"]) / "cpu" / "conduct.enter.1.nbc"
    kernel.parent.mkdir()
    kernel.write_bytes(b"machine code")
    kernel_cache.complete()
    assert kernel_cache.known(tmp_path)
    kernel.unlink() if damage is None else kernel.write_bytes(damage)
    assert not kernel_cache.use(tmp_path)
    assert not kernel.exists()
    # The others stand, so that plans count no compiler's memory, and nothing is removed twice.
    assert kernel_cache.known(tmp_path)
    assert kernel_cache.use(tmp_path)


def test_of_damaged_kernels_only_their_functions_are_compiled_again(tmp_path: Path) -> None:
    kernel_cache.use(tmp_path)
    folder = Path(os.environ["NUMBA_CACHE_DIR"]) / "cpu"
    folder.mkdir()
    names = ["a.f-1.py311.nbi", "a.f-1.py311.1.nbc", "a.f-1.py311.2.nbc", "a.g-9.py311.nbi", "a.g-9.py311.1.nbc"]
    for name in names:
        (folder / name).write_bytes(name.encode())
    kernel_cache.complete()
    (folder / names[2]).write_bytes(b"cut")
    assert not kernel_cache.use(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == sorted(names[3:])
    kernel_cache.complete()
    assert kernel_cache.known(tmp_path)


def test_one_process_compiles_and_others_wait_for_what_it_leaves(tmp_path: Path) -> None:
    kernel_cache.use(tmp_path)
    code = (
        "import sys; from pathlib import Path; from paceline.backends import kernel_cache;"
        "print(kernel_cache.use(Path(sys.argv[1])), flush=True); lock = kernel_cache.alone(); lock.__enter__();"
        "print(kernel_cache.known(Path(sys.argv[1])))"
    )
    with kernel_cache.alone():
        other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "False\n", "it does not wait before it has to compile"
        with (Path(os.environ["NUMBA_CACHE_DIR"]) / "lock").open("ab") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kernel_cache.complete()
    assert other.communicate()[0] == "True\n"


def test_a_seal_that_is_no_seal_counts_for_nothing(tmp_path: Path) -> None:
    kernel_cache.use(tmp_path)
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    for text in (b"", b"[]", b"\xff"):
        (folder / "complete").write_bytes(text)
        assert not kernel_cache.known(tmp_path)


def test_where_nothing_can_be_kept_kernels_are_still_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_bytes(b"a file where a folder should be")
    assert not kernel_cache.use(tmp_path / "kernels")
    assert not kernel_cache.in_use()
    kernel_cache.complete()
    assert "can't be kept" in caplog.text


def test_whatever_is_compiled_into_kernels_is_part_of_their_version() -> None:
    hashed = {source.resolve() for source in kernel_cache.sources()}
    package = Path(kernel_cache.__file__).parents[1]
    for source in hashed:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
                constants = [name.name for name in node.names if name.name.isupper()]
                origin = package.joinpath(*(node.module or "").split(".")[1:])
                origin = origin / "__init__.py" if origin.is_dir() else origin.with_suffix(".py")
                assert not constants or origin.resolve() in hashed, f"{source.name} takes {constants} of {origin.name}"
