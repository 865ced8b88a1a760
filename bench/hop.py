"""What one hop between two stages costs: from the end of one's compute to the start of the other's. Prints a table, and JSON with --json.

    python bench/hop.py [--batches 2000] [--rounds 5] [--cores 0,1] [--json hop.json]

Two processes, each pinned to a core of its own, mutual TLS over loopback, a StageBatch and its activations. One way is half a round trip less
what the far side spent at work of its own: none measures the path alone; 1 ms of Python lets the other's core go to sleep; reading 40 MB is
nearest to a stage, whose weights leave nothing else in the caches. The same batches go over a plain grpc.aio bidirectional stream, a block of
one after a block of the other, so that both see the same machine. `looking`: a reader looks for some ms before it sleeps. `ready`: as stages
do, a sender also prepares its message before the work. At the end: what compressing activations would take and save.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import paceline  # noqa: F401 - before grpc  # isort: skip
import grpc
import grpc.aio
import numpy as np
from tests.fakes.fleets import TestFleet

from paceline.core.clock import SystemClock
from paceline.core.ids import BatchId, BlockId, NodeId, SequenceId
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.ends import TensorReceiver
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.credentials import channel_credentials, server_credentials
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals
from paceline.ways.pipeline.executor.stage import StageBatch
from paceline.ways.pipeline.host.ends import LOOK_S, StreamSink, StreamSource, read_batch, to_bf16, write_batch

WIDTH = 576
METHOD = "/bench.Hop/Stream"
PATIENCE_S = 20.0
SIZES = ((1, 1.0), (16, 1.0), (512, 0.1))
"""Rows, and which part of the batches are run of that size."""
WORK = {"none": (0, 0), "1 ms": (1000, 0), "40 MB": (0, 40)}
"""What each side does before it sends: microseconds of Python, megabytes read."""
WARM = 20
OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]

clock = time.perf_counter


def never(_node: NodeId, _issued_at: int) -> bool:
    return False


def batch_of(rows: int) -> StageBatch:
    """One prompt's chunk, or a row of each of `rows` sequences."""
    n = rows if rows <= 16 else 1
    blocks = [BlockId(17 * i) for i in range(n if n > 1 else rows // 16)]
    return StageBatch(
        BatchId(1),
        [SequenceId(1000 + i) for i in range(n)],
        [rows // n] * n,
        [128] * n,
        [int(rows <= 16)] * n,
        [len(blocks) // n] * n,
        blocks,
    )


def activations(rows: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Like those of a model: about normal, some channels much larger than the rest."""
    rng = np.random.default_rng(rows)
    scale = np.exp(rng.normal(0, 0.7, WIDTH)) * np.where(rng.random(WIDTH) < 0.01, 30, 1)
    return to_bf16((rng.normal(0, 1, (rows, WIDTH)) * scale).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Orders:
    """What the far side is to do with a batch. They ride in a column that it has no use for."""

    busy_us: int
    megabytes: int
    look_us: int
    ready: int

    def on(self, batch: StageBatch) -> StageBatch:
        return replace(batch, released=[SequenceId(each) for each in (self.busy_us, self.megabytes, self.look_us, self.ready)])

    @staticmethod
    def of(batch: StageBatch) -> Orders:
        return Orders(*batch.released)


MEMORY = np.ones(max(megabytes for _, megabytes in WORK.values()) << 17)


def work(orders: Orders) -> float:
    """Seconds that it took."""
    began = clock()
    until = began + orders.busy_us / 1e6
    while clock() < until:
        pass
    if orders.megabytes:
        MEMORY[: orders.megabytes << 17].max()
    return clock() - began


# ---------------------------------------------------------------------------------------------------- the far process


def far(core: int, identity_pem: bytes, pipe: Connection, took: Any) -> None:
    """Gives back what it gets, after the work that is ordered with it; `took` says how many seconds that was."""
    os.sched_setaffinity(0, {core})
    asyncio.run(_far(Identity.from_pem(identity_pem), pipe, took))


async def _far(identity: Identity, pipe: Connection, took: Any) -> None:
    listener = TensorListener(identity, never, SystemClock(), Refusals())
    port = listener.start("127.0.0.1")
    expected = listener.expect()
    server = grpc.aio.server(options=OPTIONS)

    async def echo(requests: AsyncIterator[bytes], _context: Any) -> AsyncGenerator[bytes]:
        async for message in requests:
            n = int.from_bytes(message[:4], "big")
            x_TD = np.frombuffer(message, np.uint16, offset=4 + n).reshape(-1, WIDTH)
            batch = read_batch(message[4 : 4 + n])
            took.value = work(Orders.of(batch))
            yield pack(batch, x_TD)

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Hop", {"Stream": handler}),))
    grpc_port = server.add_secure_port("127.0.0.1:0", server_credentials(identity))
    await server.start()
    pipe.send((port, expected.ticket, grpc_port))
    near_port, ticket, certificate = pipe.recv()
    near = identity.root.member(certificate, time.time())
    sink = StreamSink(dial([f"127.0.0.1:{near_port}"], near, ticket, identity, never, clock() + PATIENCE_S))
    receiver = expected.wait(clock() + PATIENCE_S)
    source = StreamSource(receiver)

    def echo_tensors() -> None:
        orders = Orders(0, 0, 0, 0)
        while True:
            batch, x_TD = source.receive(clock() + 600)
            if not batch.sequences:
                return
            orders = Orders.of(batch)
            receiver.look(orders.look_us / 1e6)
            if orders.ready:
                sink.prepare(batch, WIDTH)
            took.value = work(orders)
            sink.send(batch, x_TD, clock() + PATIENCE_S)

    thread = threading.Thread(target=echo_tensors)
    thread.start()
    await asyncio.to_thread(pipe.recv)
    thread.join()
    sink.close()
    listener.close()
    await server.stop(0)


# --------------------------------------------------------------------------------------------------- the near process


def pack(batch: StageBatch, x_TD: Any) -> bytes:
    header = write_batch(batch)
    return len(header).to_bytes(4, "big") + header + x_TD.tobytes()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    over: str
    rows: int
    bytes: int
    work: str
    p50_ms: float
    p95_ms: float
    megabytes_s: float


class Near:
    """This process's end of both ways."""

    def __init__(self, sink: StreamSink, receiver: TensorReceiver, call: Any) -> None:
        self._sink, self._source, self._receiver, self._call = sink, StreamSource(receiver), receiver, call

    async def over_sockets(self, batch: StageBatch, x_TD: Any) -> float:
        orders = Orders.of(batch)
        self._receiver.look(orders.look_us / 1e6)
        if orders.ready:
            self._sink.prepare(batch, WIDTH)
        work(orders)
        began = clock()
        self._sink.send(batch, x_TD, clock() + PATIENCE_S)
        self._source.receive(clock() + PATIENCE_S)
        return clock() - began

    async def over_grpc(self, batch: StageBatch, x_TD: Any) -> float:
        work(Orders.of(batch))
        began = clock()
        await self._call.write(pack(batch, x_TD))
        message = await self._call.read()
        n = int.from_bytes(message[:4], "big")
        read_batch(message[4 : 4 + n])
        return clock() - began


async def block(hop: Callable[[StageBatch, Any], Awaitable[float]], batch: StageBatch, x_TD: Any, took: Any, times: int) -> list[float]:
    """One-way times in ms."""
    return [(await hop(batch, x_TD) - took.value) / 2 * 1e3 for _ in range(times + WARM)][WARM:]


def row(over: str, rows: int, n_bytes: int, before: str, taken: list[float]) -> Row:
    ordered = sorted(taken)
    p50 = statistics.median(ordered)
    return Row(over, rows, n_bytes, before, round(p50, 4), round(ordered[int(len(ordered) * 0.95)], 4), round(n_bytes / p50 / 1e3, 1))


async def compare(near: Near, took: Any, batches: int, rounds: int) -> list[Row]:
    result: list[Row] = []
    for rows, part in SIZES:
        x_TD = activations(rows)
        for name, (busy_us, megabytes) in WORK.items():
            plain, look_us = batch_of(rows), int(LOOK_S * 1e6)
            sleeping = Orders(busy_us, megabytes, 0, 0).on(plain)
            looking = Orders(busy_us, megabytes, look_us, 0).on(plain)
            ready = Orders(busy_us, megabytes, look_us, 1).on(plain)
            ways = {
                "TLS, ready": (near.over_sockets, ready),
                "TLS, looking": (near.over_sockets, looking),
                "TLS, sleeping": (near.over_sockets, sleeping),
                "grpc.aio": (near.over_grpc, sleeping),
            }
            taken: dict[str, list[float]] = {over: [] for over in ways}
            for _ in range(rounds):
                for over, (hop, batch) in ways.items():
                    taken[over] += await block(hop, batch, x_TD, took, max(20, int(batches * part / rounds)))
            result += [row(over, rows, x_TD.nbytes, name, times) for over, times in taken.items()]
    return result


@dataclass(frozen=True, slots=True)
class Compression:
    """What it would take and save."""

    with_: str
    rows: int
    ratio: float
    ms: float


def compression() -> list[Compression]:
    ways: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zlib 1": (lambda data: zlib.compress(data, 1), zlib.decompress)
    }
    try:
        import zstandard
    except ImportError:
        pass
    else:
        ways["zstd 1"] = (zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress)
    result: list[Compression] = []
    for name, (squeeze, restore) in ways.items():
        for rows, _ in SIZES:
            data = activations(rows).tobytes()
            taken: list[float] = []
            for _ in range(9):
                began = clock()
                small = squeeze(data)
                restore(small)
                taken.append((clock() - began) * 1e3)
            result.append(Compression(name, rows, round(len(data) / len(small), 3), round(statistics.median(taken), 4)))
    return result


async def measure(batches: int, rounds: int, cores: tuple[int, int]) -> list[Row]:
    fleet = TestFleet()
    own, other = fleet.member("near"), fleet.member("far")
    here, there = multiprocessing.Pipe()
    took = multiprocessing.get_context("spawn").Value("d", lock=False)
    process = multiprocessing.get_context("spawn").Process(target=far, args=(cores[1], other.to_pem(), there, took))
    process.start()
    listener = TensorListener(own, never, SystemClock(), Refusals())
    port = listener.start("127.0.0.1")
    expected = listener.expect()
    far_port, ticket, grpc_port = here.recv()
    here.send((port, expected.ticket, own.member.certificate))
    sink = StreamSink(dial([f"127.0.0.1:{far_port}"], other.member, ticket, own, never, clock() + PATIENCE_S))
    receiver = expected.wait(clock() + PATIENCE_S)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", other.member.tls_name)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{grpc_port}", channel_credentials(own), options) as channel:
        call = channel.stream_stream(METHOD)()
        rows = await compare(Near(sink, receiver, call), took, batches, rounds)
        call.cancel()
    sink.send(StageBatch(BatchId(0), [], [], [], [], [], []), np.empty((0, WIDTH), np.uint16), clock() + PATIENCE_S)
    here.send(None)
    process.join(PATIENCE_S)
    sink.close()
    listener.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    near_core, far_core = (int(core) for core in chosen.cores.split(","))
    os.sched_setaffinity(0, {near_core})
    rows = asyncio.run(measure(chosen.batches, chosen.rounds, (near_core, far_core)))
    print(f"{'over':<13} {'rows':>5} {'bytes':>8} {'work':>8} {'p50 ms':>8} {'p95 ms':>8} {'MB/s':>8}")
    for one in rows:
        print(f"{one.over:<13} {one.rows:>5} {one.bytes:>8} {one.work:>8} {one.p50_ms:>8.4f} {one.p95_ms:>8.4f} {one.megabytes_s:>8.1f}")
    squeezed = compression()
    for one in squeezed:
        print(f"{one.with_}: {one.rows} rows shrink {one.ratio}-fold, there and back in {one.ms:.3f} ms")
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"hops": [asdict(one) for one in rows], "compression": [asdict(one) for one in squeezed]}, indent=1)
        )


if __name__ == "__main__":
    main()
