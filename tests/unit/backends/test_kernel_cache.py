"""Compiled kernels are kept by version, and old versions don't pile up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.cpu import kernel_cache


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
    folder.mkdir(parents=True)
    assert not kernel_cache.use(tmp_path)
    kernel_cache.complete()
    assert kernel_cache.use(tmp_path)
    assert folder.parent == tmp_path


def test_old_versions_are_removed_but_for_the_latest(tmp_path: Path) -> None:
    for age in range(6):
        (tmp_path / f"v{age}").mkdir()
        os.utime(tmp_path / f"v{age}", (1000 - age, 1000 - age))
    kernel_cache.use(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v0", "v1", "v2"]
