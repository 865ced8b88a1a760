"""What looks after blocks in tests of faults finds one that is written while nobody uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.null_backend import NullRunner
from tests.fleet import kv_saboteur
from tests.fleet.kv_saboteur import Poisoned

from paceline.core.ids import BlockId


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Poisoned:
    made = Poisoned(2)
    monkeypatch.setattr(Poisoned, "runner", NullRunner(n_blocks=2))
    monkeypatch.setattr(kv_saboteur, "HOME", tmp_path)
    return made


def write(pool: Poisoned, block: BlockId) -> None:
    pool.runner.import_block(block, memoryview(bytearray(pool.runner.block_bytes)))


def used(pool: Poisoned, key: bytes = b"") -> BlockId:
    """One that was written, known by a name where there is one, and given back."""
    block = pool.take()
    write(pool, block)
    if key:
        pool.cache.insert(key, block)
    pool.give_back([block])
    return block


def test_a_free_block_that_is_written_is_found_and_one_that_is_left_alone_is_not(pool: Poisoned, tmp_path: Path) -> None:
    block = used(pool)
    assert pool.take() == block
    assert not (tmp_path / "violations").exists()
    pool.give_back([block])
    write(pool, block)
    assert pool.take() == block
    assert (tmp_path / "violations").exists()


@pytest.mark.parametrize("found", ["shared", "given up"])
def test_so_is_one_that_is_known_and_idle(pool: Poisoned, tmp_path: Path, found: str) -> None:
    block = used(pool, b"name")
    data = bytearray(pool.runner.block_bytes)
    pool.runner.export_block(block, memoryview(data))
    pool.runner.import_block(block, memoryview(bytes(byte ^ 1 for byte in data)))
    if found == "shared":
        pool.share(block)
    else:
        assert block in {pool.take(), pool.take()}
    assert (tmp_path / "violations").exists()
