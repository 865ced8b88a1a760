"""`paceline` as a person starts it, but for its KV: it gives as its home's `deed` says, and fills every block that is freed with poison.

A deed is done once, to the first stream of blocks that it sends which comes so far. The file then goes by another name: `held`, or `done`.

    hold N          after N blocks nothing is sent, until `held` is removed
    dial 0          no stream is opened for a prompt that is computed for another, until `held` is removed
    last 0          nothing is said after the last block, until `held` is removed
    damaged N       the block after N others is not as its checksum says
    another N       ... has another's name
    lie N           ... has other bytes than the model computes, and their checksum
    nan N           ... has no numbers in it, and their checksum
    close N         ... does not come: the stream ends
    forget N        ... can't be read, nor any after it, as if the pool had given them up, until `done` is removed

`lease_s` in its home bounds the leases that it gives, and `most_leases` how many; `prompts_per_s` is how many tokens of prompts a second it seems to compute, where that is there;
`clock_s` says how far its clock is off. A peer that failed is asked again at once.

Law, looked after here: a block that is free holds poison until it is handed out; one that is known by name, and idle, holds what it held when its last
user went; and what a session of a pipeline leaves in its blocks stays there until another has them. What breaks it is written to `violations`.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.cli import main
from paceline.core.clock import SystemClock
from paceline.core.ids import BlockId
from paceline.engine import scheduler
from paceline.engine.kv_source import KvLoan
from paceline.engine.prefix_cache import BlockPool
from paceline.engine.step_costs import StepCosts
from paceline.ways.kv import giving, lease, prefilling, pushing, service
from paceline.ways.kv.fetching import send_block
from paceline.ways.kv.source import PeerKv
from paceline.ways.kv.staged import BlockSender
from paceline.ways.pipeline.executor.route import StageRequest
from paceline.ways.pipeline.host import warm
from paceline.ways.pipeline.host.session import Place
from paceline.ways.pipeline.host.shard import KvName, Shard, ShardClaim

HOME = Path(os.environ.get("PACELINE_HOME", ""))
NOT_A_NUMBER = b"\xc0\x7f"
"""In bf16: nor is what is computed with it."""
AGAIN_S = 0.1


class Poisoned(BlockPool):
    """Blocks of which it is known what they must hold."""

    runner: Any = None

    def __init__(self, n_blocks: int) -> None:
        super().__init__(n_blocks)
        self._sums: dict[BlockId, int] = {}
        """Of free and idle blocks."""

    def take(self) -> BlockId:
        block = super().take()
        self._look(block)
        return block

    def share(self, block: BlockId) -> None:
        self._look(block)
        super().share(block)

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        given = list(blocks)
        super().give_back(given)
        for block in {block for block in given if self.runner is not None and not self._users[block]}:
            if block not in self.cache:
                self.runner.import_block(block, memoryview(NOT_A_NUMBER * (self.runner.block_bytes // 2)))
            self._sums[block] = self._sum_of(block)

    def _look(self, block: BlockId) -> None:
        due = self._sums.pop(block, None)
        if due is not None and self._sum_of(block) != due:
            violation(f"block {block} was written while nobody used it")

    def _sum_of(self, block: BlockId) -> int:
        data = memoryview(bytearray(self.runner.block_bytes))
        self.runner.export_block(block, data)
        return zlib.crc32(data)


class WatchedShard(Shard):
    """Looks at what ended sessions left whenever one begins."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left: dict[int, int] = {}
        """Blocks that no session has, and what they held."""

    def end(self, claim: ShardClaim, until: float | None) -> None:
        super().end(claim, until)
        if claim.session is not None and self.loaded is not None:
            lease = claim.session.place.lease
            self.left.update({block: self._sum_of(block) for block in range(lease.base, lease.base + lease.n_blocks)})

    def place(self, request: StageRequest) -> Place:
        return self._begun(super().place(request))

    def resume(self, request: StageRequest, name: KvName) -> Place | None:
        place = super().resume(request, name)
        return None if place is None else self._begun(place)

    def _begun(self, place: Place) -> Place:
        for block, due in self.left.items():
            if self._sum_of(block) != due:
                violation(f"block {block} of {self.shard_id} was written after its session")
        for block in range(place.lease.base, place.lease.base + place.lease.n_blocks):
            self.left.pop(block, None)
        return place

    def _sum_of(self, block: int) -> int:
        assert self.loaded is not None, "it had a session"
        data = memoryview(bytearray(self.loaded.runner.block_bytes))
        self.loaded.runner.export_block(BlockId(block), data)
        return zlib.crc32(data)


def violation(what: str) -> None:
    with (HOME / "violations").open("a") as file:
        file.write(f"{what}\n")


def taken(names: set[str], sent: int, becomes: str) -> str:
    """The deed that is due after so many blocks, if it is one of these; it is another's no more."""
    try:
        name, after = (HOME / "deed").read_text().split()
        if name not in names or sent != int(after):
            return ""
        (HOME / "deed").rename(HOME / becomes)
    except (FileNotFoundError, ValueError):
        return ""
    return name


sent = Counter[BlockSender]()
reads = Counter[str]()


def held_at(deed: str, after: int = 0) -> None:
    if taken({deed}, after, "held"):
        while (HOME / "held").exists():
            time.sleep(0.01)


def send_badly(sender: BlockSender, key: bytes, data: memoryview) -> None:
    held_at("hold", sent[sender])
    match taken({"damaged", "another", "lie", "nan", "close"}, sent[sender], "done"):
        case "damaged":
            return send_block(BadSum(sender), key, data)  # type: ignore[arg-type]
        case "another":
            key = key[::-1]
        case "lie":
            data[0] ^= 1
        case "nan":
            data[:] = NOT_A_NUMBER * (len(data) // 2)
        case "close":
            return sender.close()
        case _:
            pass
    sent[sender] += 1
    return send_block(sender, key, data)


class BadSum:
    """Sends another bit than the checksum is of."""

    def __init__(self, sender: BlockSender) -> None:
        self._sender = sender

    def send(self, header: bytes, array: Any, deadline: float) -> None:
        array[0] ^= 1  # where it lies: it may be read from there
        self._sender.send(header, array, deadline)


def read_badly(self: PeerKv, loan: KvLoan, key: bytes, into: memoryview, *part: Any) -> bool:
    forgetting = is_in("deed", "forget")
    if forgetting and taken({"forget"}, reads["forget"], "done"):
        reads.clear()
    reads["forget"] += forgetting
    return not is_in("done", "forget") and read(self, loan, key, into, *part)


def send_late(self: prefilling.Prefilling) -> None:
    opened = self._open_sender

    def open_sender() -> BlockSender:
        held_at("dial")
        sender = opened()
        finish = sender.finish

        def finish_late() -> None:
            finish()
            held_at("last")

        sender.finish = finish_late  # type: ignore[method-assign]
        return sender

    self._open_sender = open_sender
    send(self)


def is_in(name: str, word: str) -> bool:
    try:
        return (HOME / name).read_text().startswith(word)
    except FileNotFoundError:
        return False


def made(self: PeerKv, runner: Any, *others: Any) -> None:
    make(self, runner, *others)
    Poisoned.runner = runner


def number_in(name: str, default: float) -> float:
    try:
        return float((HOME / name).read_text())
    except (FileNotFoundError, ValueError):
        return default


if __name__ == "__main__":  # and not where a process of its own is begun
    read, make, wall = PeerKv.read, PeerKv.__init__, SystemClock.wall
    PeerKv.read, PeerKv.__init__ = read_badly, made  # type: ignore[method-assign]
    SystemClock.wall = lambda self: wall(self) + number_in("clock_s", 0.0)  # type: ignore[method-assign]
    send, prefilling.Prefilling.send = prefilling.Prefilling.send, send_late  # type: ignore[method-assign]
    scheduler.BlockPool, warm.Shard = Poisoned, WatchedShard  # type: ignore[misc]
    prefilling.send_block = giving.send_block = send_badly
    # It stays as fast as its home says.
    StepCosts.seen_prefill = lambda self: number_in("prompts_per_s", 0.0)  # type: ignore[method-assign]
    lease.LEASE_S = number_in("lease_s", lease.LEASE_S)  # type: ignore[misc]
    lease.MOST_LEASES = int(number_in("most_leases", lease.MOST_LEASES))  # type: ignore[misc]
    for room in (pushing, service):
        room.REST_S = room.WRONG_REST_S = AGAIN_S  # type: ignore[misc]
    main()
