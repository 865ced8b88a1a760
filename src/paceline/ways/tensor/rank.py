"""A rank of a tensor group in a process of its own: it loads its share, runs what the leader's memory says, and gives out and takes in its KV.

Started by the group (`python -m paceline.ways.tensor.rank FD MEMORY_FD`), over whose connection come its order, and then single letters: W (wake), E (give out
a block), I (take one in). While it loads it may ask over it for bytes of files that are not on this machine. It ends when the leader says so, or is gone.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.core.errors import PacelineError
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange
from paceline.machine.settings import NodeSettings
from paceline.ways.tensor.sizes import GroupSizes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.backends.cpu.runner import CpuRunner
    from paceline.store.tensor_files import StoredAt
    from paceline.ways.tensor.memory import GroupMemory

WAKE, EXPORT, IMPORT = b"W", b"E", b"I"
READY, PROGRESS, FAILED, BLOCK, LEND = b"R", b"P", b"F", b"B", b"L"
STOP_TOLD: Final = signal.SIGURG
"""To the leader, from a rank that got SIGTERM."""
LOOKS_S: Final = 1.0
"""Between two looks of a rank that sleeps, should a wake be lost."""
HEADER: Final = 1 + 3 * 8
"""Bytes of what asks for a block: the letter, the block, and the first and the last layer but one."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank is to be: sent to its process by the same program on the same machine."""

    rank: int
    settings: NodeSettings
    sizes: GroupSizes
    layers: LayerRange
    n_blocks: int
    threads: int
    is_away: bool = False
    """Its leader is another machine, to which it proves that it computes the same bytes."""
    edges: bool = True
    """With a part of the head; a stage of a pipeline has none."""
    lent: Path | None = None
    """Folder that has no more of the model's files than their heads: what else they hold, it asks whoever started it for. None: all is here."""


def block_request(letter: bytes, block: BlockId, layers: LayerRange) -> bytes:
    """What asks for a block, or comes before one."""
    return letter + b"".join(int(word).to_bytes(8, "little") for word in (block, layers.start, layers.stop))


def read_block_request(message: bytes) -> tuple[BlockId, LayerRange]:
    block, start, stop = (int.from_bytes(message[at : at + 8], "little") for at in (1, 9, 17))
    return BlockId(block), LayerRange(start, stop)


def _load(order: RankOrder, memory_fd: int, connection: Connection) -> tuple[GroupMemory, CpuRunner]:
    import numpy as np

    from paceline.backends import cpu, kernel_cache
    from paceline.backends.options import LoadOptions
    from paceline.engine.local import row_plan
    from paceline.store.catalog import OtherRope, open_weights
    from paceline.store.digests import DigestCache
    from paceline.store.home import Home

    settings, sizes, home = order.settings, order.sizes, Home.from_environment()
    assert settings.device is not None, "decided for all ranks"
    assert settings.weights is not None, "decided for all ranks"
    cpu.prepare(settings.device.lowering, home.kernels)
    from paceline.backends.cpu.exchange import Exchange
    from paceline.ways.tensor.memory import GroupMemory

    memory = GroupMemory(memory_fd, sizes)
    options = LoadOptions(
        order.layers,
        settings.weights,
        order.n_blocks,
        threads=order.threads,
        max_rows=sizes.max_rows,
        edges=order.edges,
        kernel_cache=home.kernels,
    )
    weights, talking = open_weights(Path(settings.model), DigestCache(home)), threading.Lock()

    def tell(done: int, total: int) -> None:
        with talking:
            connection.send_bytes(PROGRESS + done.to_bytes(8, "little") + total.to_bytes(8, "little"))

    def borrow(at: StoredAt) -> npt.NDArray[np.uint8]:
        assert order.lent is not None
        if not at.nbytes:
            return np.empty(0, np.uint8)
        count, length = at.runs
        asked = json.dumps([at.path.relative_to(order.lent).as_posix(), at.offset, length, at.stride, count])
        with talking:
            connection.send_bytes(LEND + asked.encode())
            return np.frombuffer(bytearray(connection.recv_bytes()), np.uint8)

    if order.lent is not None:
        weights.reads = borrow

    exchange = Exchange(sizes.spec, sizes.shares, order.rank, memory.exchange, sizes.max_rows, order.is_away)
    runner = cpu.load(OtherRope(weights, sizes.spec), options, tell, lowering=settings.device.lowering, exchange=exchange)
    with kernel_cache.alone():  # before others wait for this rank
        nothing = row_plan([1], [0], [0], np.zeros((1, 1), np.int32))
        runner.compile_layers(np.zeros((1, sizes.spec.hidden), np.uint16), nothing)
        memory.await_word(memory.number_address, memory.number - 1)
        kernel_cache.complete()
    return memory, runner


class _Rank:
    """A loaded rank: this thread runs commands, another one listens."""

    def __init__(self, order: RankOrder, runner: CpuRunner, memory: GroupMemory, connection: Connection) -> None:
        self._order, self._runner, self._memory, self._connection = order, runner, memory, connection
        self._woken = threading.Semaphore(0)
        self._orphaned = False
        threading.Thread(target=self._listen, name="paceline-rank-listener", daemon=True).start()

    def run(self) -> None:
        """Until the leader says that it is over, or is gone."""
        from paceline.ways.tensor.memory import Command

        memory, rank, seen = self._memory, self._order.rank, self._memory.done(self._order.rank)
        while not self._orphaned:
            if not memory.await_word(memory.number_address, seen):
                memory.say_sleeps(rank, True)
                if memory.number == seen:
                    self._woken.acquire(timeout=LOOKS_S)
                memory.say_sleeps(rank, False)
                continue
            seen, command = memory.number, memory.command
            self._runner.exchange_number = memory.exchange_number
            if command is Command.LAYERS:
                self._runner.run_layers(memory.x_TD, memory.plan, memory.layers)
            elif command is Command.HEAD:
                self._runner.logits(memory.x_TD, memory.rows_R)
            elif command is Command.END:
                return
            memory.say_done(rank, seen)

    def _listen(self) -> None:
        try:
            with suppress(EOFError, OSError):  # the leader is gone
                while True:
                    self._heed(self._connection.recv_bytes())
        finally:
            self._orphaned = True
            self._memory.give_up()
            self._woken.release()

    def _heed(self, message: bytes) -> None:
        if message[:1] == WAKE:
            self._woken.release()
            return
        block, layers = read_block_request(message)
        if message[:1] == EXPORT:
            data = bytearray(self._runner.block_bytes * len(layers) // max(1, len(self._runner.layers)))
            self._runner.export_block(block, memoryview(data), layers)
            self._connection.send_bytes(BLOCK + data)
        else:
            self._runner.import_block(block, memoryview(message)[HEADER:], layers)
            self._connection.send_bytes(BLOCK)


def main() -> None:
    for stop in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a terminal or a service: the leader ends this one
        signal.signal(stop, signal.SIG_IGN)
    connection, memory_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    order: RankOrder = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the process that started this one, over a pipe it made
    leader = os.getppid()
    if (
        not order.is_away
    ):  # the leader serves, and ends as if it were told itself; a process that does not heed this signal does not notice it
        signal.signal(signal.SIGTERM, lambda *_: os.kill(leader, STOP_TOLD) if os.getppid() == leader else None)
    try:
        memory, runner = _load(order, memory_fd, connection)
    except PacelineError as error:
        connection.send_bytes(FAILED + json.dumps([error.message, error.hint]).encode())
        return
    connection.send_bytes(READY + runner.numerics_id.encode())
    try:
        _Rank(order, runner, memory, connection).run()
    finally:
        runner.close()


if __name__ == "__main__":
    main()
