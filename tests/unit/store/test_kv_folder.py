"""KV blocks on disk: what is read is what was written, or it is a miss."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from errno import ENOSPC
from hashlib import blake2b
from itertools import count, pairwise
from pathlib import Path

import pytest
from tests.fakes.clock import FakeClock

from paceline.store import kv_folder
from paceline.store.kv_folder import KvFolder, _depths

BLOCK = 4096
FILE = BLOCK + 48


def key_of(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


def block_of(key: bytes) -> memoryview:
    """What stands for a block's bytes: they follow from its key."""
    return memoryview(random.Random(key).randbytes(BLOCK))


def opened(folder: Path, clock: FakeClock, name: str = "m", budget: int = 1 << 30, ttl_s: float = 1000.0) -> KvFolder:
    return KvFolder(folder, name, BLOCK, budget, ttl_s, clock)


def read(kept: KvFolder, key: bytes) -> bytes | None:
    block = memoryview(bytearray(BLOCK))
    return bytes(block) if kept.read(key, block) else None


def test_a_block_is_found_by_its_key_and_at_the_next_start(tmp_path: Path) -> None:
    clock = FakeClock()
    kept = opened(tmp_path, clock)
    keys = [key_of(number) for number in range(5)]
    for key in keys[:3]:
        assert kept.write(key, block_of(key))
    for again in (kept, opened(tmp_path, clock)):
        assert again.run_of(keys) == 3
        assert again.run_of(keys[3:]) == 0
        assert [read(again, key) for key in keys] == [*(block_of(key).tobytes() for key in keys[:3]), None, None]
    assert opened(tmp_path, clock, "other").run_of(keys) == 0
    assert kept.counts.written == 3
    assert (kept.counts.read, kept.counts.missed) == (3, 2)
    assert kept.total_bytes == 3 * FILE


def test_it_is_only_for_its_owner(tmp_path: Path) -> None:
    kept = opened(tmp_path / "kv", FakeClock())
    kept.write(key_of(1), block_of(key_of(1)))
    for path in (tmp_path / "kv").rglob("*"):
        assert not path.stat().st_mode & 0o077, path


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, place=place: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] for place in (0, 7, 8, 24, 35, 39, 47, 48, FILE - 1)),
        lambda data: b"",
        lambda data: data[:40],
        lambda data: data[:48],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\0" * len(data),
    ],
)  # fmt: skip
def test_a_damaged_file_is_a_miss_and_removed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    kept, key = opened(tmp_path, FakeClock()), key_of(1)
    kept.write(key, block_of(key))
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_bytes(damage(path.read_bytes()))
    assert read(kept, key) is None
    assert kept.counts.damaged == 1
    assert not path.exists()
    assert kept.run_of([key]) == 0
    assert kept.write(key, block_of(key)), "it is kept anew"
    assert read(kept, key) == block_of(key)


def test_a_block_under_another_name_is_a_miss(tmp_path: Path) -> None:
    kept, one, other = opened(tmp_path, FakeClock()), key_of(1), key_of(2)
    kept.write(one, block_of(one))
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    wrong = path.parents[1] / other.hex()[:2] / other.hex()
    wrong.parent.mkdir(exist_ok=True)
    path.rename(wrong)
    assert read(kept, other) is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    wrong.symlink_to(elsewhere)
    assert read(kept, other) is None
    assert elsewhere.exists()


def test_what_was_not_used_for_longest_goes_first_whoever_keeps_it(tmp_path: Path) -> None:
    clock = FakeClock()
    budget = 10 * FILE
    one, other = opened(tmp_path, clock, "one", budget), opened(tmp_path, clock, "other", budget)
    keys = [key_of(number) for number in range(11)]
    for place, key in enumerate(keys[:10]):
        (one, other)[place % 2].write(key, block_of(key))
        clock.advance(1)
    assert read(one, keys[0]) is not None, "it is used again"
    clock.advance(1)
    one.sweep()  # what the other wrote is known now
    one.write(keys[10], block_of(keys[10]))
    left = {key for kept in (one, other) for key in keys if read(kept, key) is not None}
    assert left == {keys[0], *keys[3:]}, "9 files are 95 % of the budget, or less"
    assert one.counts.evicted == 2
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= budget


def test_what_is_too_old_is_gone(tmp_path: Path) -> None:
    clock = FakeClock()
    kept = opened(tmp_path, clock, ttl_s=100)
    for number in (1, 2):
        kept.write(key_of(number), block_of(key_of(number)))
    clock.advance(60)
    assert read(kept, key_of(1)) is not None
    clock.advance(60)
    kept = opened(tmp_path, clock, ttl_s=100)
    assert (read(kept, key_of(1)), read(kept, key_of(2))) == (block_of(key_of(1)), None)


def test_what_stands_before_a_block_that_was_used_is_not_too_old(tmp_path: Path) -> None:
    clock, keys = FakeClock(), [key_of(number) for number in range(4)]
    kept = opened(tmp_path, clock, ttl_s=100)
    for parent, key in zip([None, *keys], keys, strict=False):
        assert kept.write(key, block_of(key), parent)
        clock.advance(60)
    kept.sweep()
    assert kept.run_of(keys) == 4
    clock.advance(60)
    kept.sweep()
    assert not len(kept)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("chains", [[(1, 1)], [(1, 2), (2, 1)], [(1, 2, 3), (3, 1)]])
def test_blocks_that_are_said_to_stand_behind_one_another_make_way_too(tmp_path: Path, chains: list[tuple[int, ...]]) -> None:
    kept = opened(tmp_path, FakeClock(), budget=4 * FILE)
    for number in (1, 2, 3):
        assert kept.write(key_of(number), block_of(key_of(number)))
    for chain in chains:
        assert kept.run_of([key_of(number) for number in chain]) == len(chain)
    for number in range(4, 9):
        assert kept.write(key_of(number), block_of(key_of(number)))
    assert kept.run_of([key_of(1)]) == 0


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.advance(10_000)
    opened(tmp_path, clock).write(key_of(1), block_of(key_of(1)))
    back = FakeClock()
    kept = opened(tmp_path, back, budget=2 * FILE)
    assert read(kept, key_of(1)) is not None
    back.advance(1)
    for number in (2, 3):
        kept.write(key_of(number), block_of(key_of(number)))
    assert read(kept, key_of(1)) is None


WRITER = """
import sys
from pathlib import Path
from tests.unit.store.test_kv_folder import block_of, key_of, opened, read
from tests.fakes.clock import FakeClock

folder, first, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
kept = opened(folder, FakeClock(), budget=budget)
print("begun", flush=True)
for number in range(first, first + 100_000):
    key = key_of(number % 50)
    assert read(kept, key) in {None, block_of(key).tobytes()}
    assert kept.write(key, block_of(key))
"""


def writer(folder: Path, first: int, budget: int) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(first), str(budget)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_processes_that_are_killed_leave_whole_blocks_or_none(tmp_path: Path) -> None:
    """Two at a time, in one folder with too little room, so that each removes what the other reads."""
    clock = FakeClock()
    for seed in range(3):
        both = [writer(tmp_path, first, 20 * FILE) for first in (0, 25)]
        kept = opened(tmp_path, clock, budget=20 * FILE)
        for number in random.Random(seed).choices(range(50), k=400):
            assert read(kept, key_of(number)) in {None, block_of(key_of(number)).tobytes()}
        for process in both:
            assert process.poll() is None, "it met wrong bytes"
            process.send_signal(signal.SIGKILL)
            process.communicate()
        after = opened(tmp_path, clock)
        for number in range(50):
            assert read(after, key_of(number)) in {None, block_of(key_of(number)).tobytes()}
        assert after.counts.read
        assert after.counts.damaged == 0
    (tmp_path / "m" / "00").mkdir(exist_ok=True)
    (tmp_path / "m" / "00" / ".half.1.1").write_bytes(b"half")
    os.utime(tmp_path / "m" / "00" / ".half.1.1", (clock.wall() - 1000, clock.wall() - 1000))
    opened(tmp_path, clock)
    assert not (tmp_path / "m" / "00" / ".half.1.1").exists()


def test_a_full_disk_costs_what_could_have_been_kept(tmp_path: Path) -> None:
    clock, key = FakeClock(), key_of(1)
    kept = opened(tmp_path, clock)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert not kept.write(key, block_of(key))
        assert not [path for path in tmp_path.rglob("*") if path.is_file()], "half of a file"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept.counts.failed == 1
    assert not kept.write(key, block_of(key)), "it rests"
    clock.advance(31)
    assert kept.write(key, block_of(key))
    assert read(kept, key) == block_of(key)


def test_on_a_full_disk_the_block_that_was_not_used_for_longest_makes_way(small_disk: Path) -> None:
    clock, keys = FakeClock(), [key_of(number) for number in range(40)]
    kept, other = opened(small_disk / "kv", clock), opened(small_disk / "kv", clock, "other")
    assert other.write(keys[-1], block_of(keys[-1]))
    for key in keys[:-1]:
        clock.advance(1)
        assert kept.write(key, block_of(key)), "its budget is far"
        assert read(kept, keys[0]) == block_of(keys[0])
    assert kept.counts.failed == 0
    assert [read(kept, key) for key in keys[-4:-1]] == [block_of(key) for key in keys[-4:-1]]
    assert read(other, keys[-1]) is None, "it was the oldest of all names"
    again = opened(small_disk / "kv", clock)
    assert sum(read(again, key) == block_of(key) for key in keys) == again.total_bytes // FILE == 39 - kept.counts.evicted + 1
    assert not [path for path in small_disk.rglob(".*") if path.is_file()]


def test_blocks_make_way_once_for_what_fills_a_disk_beside_them(small_disk: Path) -> None:
    clock, keys = FakeClock(), [key_of(number) for number in range(8)]
    kept = opened(small_disk / "kv", clock)
    for key in keys[:4]:
        assert kept.write(key, block_of(key))
        clock.advance(1)
    with (small_disk / "beside").open("wb", 0) as beside, suppress(OSError):
        while beside.write(bytes(512)):
            pass

    def taken(handle: int, header: bytes, block: memoryview) -> None:
        """Whatever is free is another program's at once."""
        raise OSError(ENOSPC, "full")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_folder, "_write_all", taken)
        assert not kept.write(keys[4], block_of(keys[4]))
        assert (kept.counts.evicted, kept.counts.failed) == (1, 1)
        assert not kept.write(keys[5], block_of(keys[5])), "it rests"
    assert (kept.counts.evicted, kept.counts.failed, kept.run_of(keys[1:4])) == (1, 2, 3)
    clock.advance(31)
    assert kept.write(keys[5], block_of(keys[5]))
    (small_disk / "beside").unlink()


class Disk:
    """So many blocks fit on it, beside what other programs keep: a write beyond that is refused as a full disk refuses it."""

    def __init__(self, folder: Path, n_blocks: int, patched: pytest.MonkeyPatch) -> None:
        self._folder, self._n_blocks, self.others = folder, n_blocks, 0
        self._write = kv_folder._write_all  # pyright: ignore[reportPrivateUsage]
        patched.setattr(kv_folder, "_write_all", self._write_all)

    @property
    def free(self) -> int:
        """Blocks."""
        return self._n_blocks - self.others - sum(path.stat().st_size > 0 for path in self._folder.rglob("*") if path.is_file())

    def _write_all(self, handle: int, header: bytes, block: memoryview) -> None:
        if self.free <= 0:
            raise OSError(ENOSPC, "full")
        self._write(handle, header, block)


@pytest.mark.parametrize("by", ["budget", "disk"])
def test_a_chain_that_has_no_room_is_kept_from_its_first_block_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    clock, disk = FakeClock(), Disk(tmp_path, 40 if by == "disk" else 1000, monkeypatch)
    kept = opened(tmp_path, clock, budget=40 * FILE if by == "budget" else 1 << 30)
    for number in range(30):
        assert kept.write(key_of(number), block_of(key_of(number)))
        clock.advance(1)
    chains = [[key_of(number) for number in range(first, first + 60)] for first in (100, 200)]
    for place, keys in enumerate(zip(*chains, strict=True)):
        for chain, key in zip(chains, keys, strict=True):
            kept.write(key, block_of(key), chain[place - 1] if place else None)
            clock.advance(1)
    assert kept.run_of([key_of(29)]) == 0, "what was used longer ago makes way"
    runs = [kept.run_of(chain) for chain in chains]
    assert sum(runs) == len(kept) == len([path for path in tmp_path.rglob("*") if path.is_file()]) == 40, (
        "none stands behind one that is gone"
    )
    assert kept.counts.written + kept.counts.failed == 30 + 120
    assert kept.counts.written == len(kept) + kept.counts.evicted
    assert disk.free >= 0


@pytest.mark.parametrize("by", ["budget", "disk"])
def test_a_chain_that_was_found_is_not_lost_to_what_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    clock, keys = FakeClock(), [key_of(number) for number in range(60)]
    Disk(tmp_path, 40 if by == "disk" else 1000, monkeypatch)
    budget = 40 * FILE if by == "budget" else 1 << 30
    before = opened(tmp_path, clock, budget=budget)
    for parent, key in zip([None, *keys[:29]], keys[:30], strict=True):
        assert before.write(key, block_of(key), parent)
        clock.advance(1)
    after = opened(tmp_path, clock, budget=budget)
    assert after.run_of(keys) == 30
    for parent, key in pairwise(keys[29:]):
        after.write(key, block_of(key), parent)
        clock.advance(1)
    assert after.run_of(keys) == 40
    assert (after.counts.evicted, after.counts.failed) == (0, 20)


def test_a_disk_that_others_fill_is_not_given_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, disk, numbers = FakeClock(), Disk(tmp_path, 150, monkeypatch), count()
    kept = opened(tmp_path, clock, ttl_s=1e9)

    def write() -> bool:
        key = key_of(next(numbers))
        return kept.write(key, block_of(key))

    while disk.free > 50:
        assert write()
    for _ in range(100):  # half a minute each
        for _ in range(5):
            if write():
                disk.others += disk.free  # at once, all that makes way
        clock.advance(31)
    assert 60 < len(kept) < 90
    given = kept.counts.evicted
    disk.others -= 60
    for _ in range(160):
        assert write(), "what is used makes way for what is new, once the disk is this program's again"
    assert kept.counts.evicted > given + 80


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from tests.fakes.clock import FakeClock
from tests.unit.store.test_kv_folder import FILE, block_of, key_of, opened, read
disk, clock, keys = Path(sys.argv[1]), FakeClock(), [key_of(number) for number in range(4)]
subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
kept = opened(disk / "kv", clock)
assert all(kept.write(key, block_of(key)) for key in keys[:3])
(victim,) = [path for path in disk.rglob(keys[2].hex())]
victim.write_bytes(victim.read_bytes()[:-1] + b"?")
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
assert not kept.write(keys[3], block_of(keys[3]))
for now in (kept, opened(disk / "kv", clock)):
    assert [read(now, key) for key in keys[:3]] == [*(block_of(key).tobytes() for key in keys[:2]), None]
    assert (now.counts.read, now.counts.damaged, now.run_of(keys[2:])) == (2, 1, 0)
tight = opened(disk / "kv", clock, budget=FILE)
assert (tight.run_of(keys), tight.total_bytes, tight.counts.evicted) == (3, 3 * FILE, 0), "what can't be removed is there"
clock.advance(2000)
late = opened(disk / "kv", clock)
assert (late.run_of(keys), late.total_bytes, late.counts.evicted) == (0, 3 * FILE, 0), "and takes its room"
"""
IN_NAMESPACE = ("unshare", "--map-root-user", "--mount")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_NAMESPACE, "true"], check=False).returncode != 0,
    reason="no namespaces for mounts",
)
def test_a_disk_that_turned_read_only_still_gives_and_takes_nothing(tmp_path: Path) -> None:
    subprocess.run([*IN_NAMESPACE, sys.executable, "-c", READ_ONLY, str(tmp_path)], check=True, timeout=60, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("step", [1, -1, 7])
def test_depths_of_a_long_chain_are_found_in_whatever_order_its_blocks_are_named(step: int) -> None:
    chain: list[bytes | None] = [number.to_bytes(16, "big") for number in range(5000)]
    order = [chain[place * step % 5000] for place in range(5000)]
    assert _depths(order, dict(zip(chain[1:], chain, strict=False))) == {key: place for place, key in enumerate(chain)}


def test_blocks_named_in_a_circle_have_depths_too() -> None:
    a, b, c, d = (bytes([name]) * 16 for name in range(4))
    depths = _depths([a, b, c, d], {a: b, b: c, c: a, d: a})
    assert sorted(depths) == [a, b, c, d]
    assert depths[d] == depths[a] + 1
    assert _depths([a], {a: a}) == {a: 0}


def test_a_folder_with_a_bound_of_its_own_makes_way_for_itself_alone(tmp_path: Path) -> None:
    clock, keys = FakeClock(), [key_of(number) for number in range(20)]
    own = opened(tmp_path, clock, "own", 12 * FILE)
    for key in keys[:6]:
        own.write(key, block_of(key))
    clock.advance(1)

    def of_caller(name: str) -> KvFolder:
        return KvFolder(tmp_path, f"callers/{name}/m", BLOCK, 12 * FILE, 1000.0, clock, {"callers": 6 * FILE, f"callers/{name}": 4 * FILE})

    one, other = of_caller("one"), of_caller("other")
    for place, key in enumerate(keys):
        (one, other)[place % 2].write(key, block_of(key))
        clock.advance(1)
    one.sweep()  # what the other wrote since is known now
    bound = {"one": 4, "other": 4, "": 6}
    for name, most in bound.items():
        assert len([path for path in (tmp_path / "callers" / name).rglob("*") if path.is_file()]) <= most
    assert own.run_of(keys[:6]) == 6
    assert all(read(own, key) == block_of(key) for key in keys[:6])
    assert one.counts.failed + other.counts.failed == 0
    assert read(one, keys[18]) == block_of(keys[18])


def test_what_may_not_be_written_is_not(tmp_path: Path) -> None:
    asked = list[int]()
    kept = KvFolder(tmp_path, "m", BLOCK, 1 << 30, 1000.0, FakeClock(), may_write=lambda n_bytes: asked.append(n_bytes) or len(asked) < 3)
    assert [kept.write(key_of(number), block_of(key_of(number))) for number in range(4)] == [True, True, False, False]
    assert asked == [FILE] * 4
    assert kept.counts.failed == 2
