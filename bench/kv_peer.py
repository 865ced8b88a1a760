"""KV fetched from a peer over loopback, through the stream and by NIXL, against a bare TLS socket and NIXL alone that move as many bytes, in turns.

    python bench/kv_peer.py                                       # an 8k prefix of the bundled model
    python bench/kv_peer.py --layers 32 --heads 8 --head-dim 128 --tokens 2048     # the shape of an 8B

Two processes of one fleet, each with its node: mutual TLS on both ways, blocks lent by a pool, checked and copied into another. No model runs.
A fetch counts from when the blocks are asked for, so with its call, connection and handshake; the bare socket is connected before, and NIXL alone,
which checks nothing and copies nothing. NIXL by TCP is measured and not used: docs/internals/adr/0019.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np

from kv import Pages
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.engine.kv_source import KvLoans
from paceline.engine.prefix_cache import BlockPool
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.fleet.presets import FleetSettings
from paceline.net.member.node import FleetNode
from paceline.net.nixl import is_installed
from paceline.net.trust.authority import Authority
from paceline.net.trust.certificates import make_key, make_request
from paceline.net.trust.credentials import client_context, server_context
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.ways.kv.service import KvSharing
from paceline.ways.kv.source import PeerKv
from size_rows import machine

DIGEST = "d" * 64
CHUNK = 1 << 20


class BenchRunner(Pages):
    n_blocks = 1 << 20
    holds_identity = True


class Portrait:
    """A model that is slow with prompts, so that fetching pays."""

    def look(self) -> bool:
        return False

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        offer = ModelOffer("bench", Role.VERIFIER, "bf16", 1.0, 100.0, DIGEST, warm=True, numerics_id="bench")
        return NodeCard(NodeId("filled in"), 0, addresses, b"", 0, 0, "bench", memory_total_bytes=1 << 34, models=(offer,), links=links)


def node_of(root: Path, name: str, *peers: str) -> FleetNode:
    folder = FleetFolder(root / name / "fleet")
    return FleetNode(FleetSettings(0, "127.0.0.1", peers=peers, mdns=False), folder, Portrait(), SystemClock())


def sharing_of(node: FleetNode, options: argparse.Namespace, wake: Callable[[], None]) -> tuple[KvSharing, PeerKv, BlockPool]:
    n = options.tokens // 16
    loans, pool = KvLoans(), BlockPool(n)
    loans.wake = lambda: loans.settle(pool)
    kv = PeerKv(BenchRunner(n, options.layers, options.heads, options.head_dim), DIGEST, None, loans, wake)  # type: ignore[arg-type]
    kv.nixl = is_installed()
    return KvSharing(node, SystemClock()), kv, pool


def keys_of(options: argparse.Namespace) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1 << 32, (1 << 32) + options.tokens // 16)]


def give(root: Path, options: argparse.Namespace, pipe: Connection) -> None:
    """Do what is asked over a pipe, and say what processor time this process had."""

    async def go() -> None:
        node = node_of(root, "giver")
        sharing, kv, pool = sharing_of(node, options, lambda: None)
        await node.start(sharing.service)
        sharing.attach(kv)
        for key in keys_of(options):
            pool.cache.insert(key, pool.take())
        kv.loans.used(keys_of(options))
        await loaded(sharing)
        server = socket.create_server(("127.0.0.1", 0))
        raws = {way: Raw(way, kv.block_bytes, options.tokens // 16) for way in RAW} if kv.nixl else {}
        pipe.send((node.addresses[0], server.getsockname()[1], {way: raw.described for way, raw in raws.items()}))
        raw, _ = await asyncio.to_thread(server.accept)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bare = await asyncio.to_thread(server_context(node.identity).wrap_socket, raw, True)
        total = options.tokens // 16 * kv.block_bytes
        chunk = os.urandom(CHUNK)
        while asked := await asyncio.to_thread(pipe.recv):
            if asked == "bare":
                await asyncio.to_thread(lambda: [bare.sendall(chunk[: min(CHUNK, total - at)]) for at in range(0, total, CHUNK)])
            elif asked in raws:
                await asyncio.to_thread(raws[asked].help_until, pipe)
            elif asked == "time":
                pipe.send(time.process_time())
        await sharing.stop()
        await node.stop()

    asyncio.run(go())


async def loaded(sharing: KvSharing) -> None:
    """Until NIXL is there, where it is installed."""
    while is_installed() and sharing.nixl.agent is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


RAW = {"nixl shm": ("posix,cma,self", "none"), "nixl tcp": ("tcp,self", "peer")}
"""UCX's transports, and what it does where a peer fails."""
SLOTS = 4


class Raw:
    """NIXL's own reads of blocks, with neither keys, checksums nor copies into a pool.

    Args:
        peer: what the giver's `described` says; None: this is the giver.
    """

    def __init__(self, way: str, block_bytes: int, n_blocks: int, peer: tuple[bytes, int] | None = None) -> None:
        os.environ["UCX_TLS"], mode = RAW[way]
        from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self.agent = nixl_agent(f"{way} {os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict))
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": mode})
        self.memory = np.ones((n_blocks if peer is None else SLOTS) * block_bytes, np.uint8)
        address = self.memory.ctypes.data
        self.agent.register_memory([(address, self.memory.nbytes, 0, "")], "DRAM")
        self.described = self.agent.get_agent_metadata(), address
        if peer is not None:
            name = self.agent.add_remote_agent(peer[0])
            self._lists = [
                self.agent.prep_xfer_dlist(whose, [(start + place * block_bytes, block_bytes, 0) for place in range(n)], "DRAM")
                for whose, start, n in (("NIXL_INIT_AGENT", address, SLOTS), (name, peer[1], n_blocks))
            ]

    def help_until(self, pipe: Connection) -> None:
        """What TCP needs at this end while the other reads."""
        while not pipe.poll():
            self.agent.get_new_notifs()
            time.sleep(50e-6)

    def read(self, n_blocks: int) -> None:
        local, remote = self._lists
        live = deque[object]()
        for n in range(n_blocks):
            if len(live) == SLOTS:
                self._end(live.popleft())
            live.append(self.agent.make_prepped_xfer("READ", local, [n % SLOTS], remote, [n]))
            self.agent.transfer(live[-1])
        for each in live:
            self._end(each)

    def _end(self, transfer: object) -> None:
        while self.agent.check_xfer_state(transfer) == "PROC":
            time.sleep(0)
        self.agent.release_xfer_handle(transfer)


def ask(
    root: Path, options: argparse.Namespace, told: tuple[str, int, dict[str, tuple[bytes, int]]], pipe: Connection
) -> dict[str, object]:
    address, port, described = told

    async def go() -> dict[str, object]:
        node = node_of(root, "asker", address)
        came = threading.Event()
        sharing, kv, pool = sharing_of(node, options, came.set)
        await node.start(sharing.service)
        sharing.attach(kv)
        keys, blocks = keys_of(options), [pool.take() for _ in range(options.tokens // 16)]
        while kv.run_of(keys) < len(keys):  # noqa: ASYNC110 - told by gossip and by measured links
            await asyncio.sleep(0.05)
        await loaded(sharing)
        agent = sharing.nixl.agent
        raws = {way: Raw(way, kv.block_bytes, len(keys), peer) for way, peer in described.items()}
        raw = socket.create_connection(("127.0.0.1", port))
        bare = await asyncio.to_thread(
            lambda: client_context(node.identity).wrap_socket(raw, server_hostname=node.gossip.opener.proven(NodeId("giver")).tls_name)
        )
        total, buffer = len(keys) * kv.block_bytes, memoryview(bytearray(CHUNK))

        def take() -> None:
            left = total
            while left:
                left -= bare.recv_into(buffer, min(left, CHUNK))

        def fetch() -> None:
            """As an engine's thread does, which sleeps until it is woken."""
            fetched = kv.fetch(keys, blocks)
            while not fetched.is_over:
                came.wait()
                came.clear()
            assert fetched.filled == len(keys), fetched.filled

        def their_time() -> float:
            pipe.send("time")
            return pipe.recv()

        async def one(kind: str) -> tuple[float, float, float]:
            """Megabytes a second, and milliseconds of processor time of both ends for 100 MB."""
            while kv.run_of(keys) < len(keys):  # noqa: ASYNC110 - priced anew after the last one
                await asyncio.sleep(0.01)
            sharing.nixl.agent = agent if kind == "fetched, nixl" else None
            before = their_time(), time.process_time()
            began = time.perf_counter()
            if kind.startswith("fetched"):
                await asyncio.to_thread(fetch)
            else:
                pipe.send(kind)
                await asyncio.to_thread(take if kind == "bare" else partial(raws[kind].read, len(keys)))
            took = time.perf_counter() - began
            here = time.process_time() - before[1]
            there = their_time() - before[0]
            return total / took / 1e6, 1e11 * there / total, 1e11 * here / total

        kinds = ["bare", "fetched, stream", *(("fetched, nixl", *raws) if agent is not None else ())]
        rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for number in range(options.rounds + 1):
            for kind in kinds:
                rows[kind].append(await one(kind))
            if not number:
                rows = {kind: [] for kind in rows}
        pipe.send("")
        bare.close()
        taken = {transport: n for (what, transport), n in sharing.meter.moved.items() if what == "taken"}
        await sharing.stop()
        await node.stop()
        rates = {kind: [rate for rate, _, _ in row] for kind, row in rows.items()}

        def share(of: str, *against: str) -> float:
            best = [max(one) for one in zip(*(rates[kind] for kind in against), strict=True)]
            return round(median(a / b for a, b in zip(rates[of], best, strict=True)), 3)

        return {
            "block_bytes": kv.block_bytes,
            "megabytes": total / 1e6,
            "mb_s": {kind: [round(rate) for rate in row] for kind, row in rates.items()},
            "median_mb_s": {kind: round(median(row)) for kind, row in rates.items()},
            "processor_ms_for_100_mb_there_here": {
                kind: [round(median(of)) for of in list(zip(*row, strict=True))[1:]] for kind, row in rows.items()
            },
            "taken_megabytes": {transport: round(n / 1e6) for transport, n in taken.items()},
            "stream_against_bare": share("fetched, stream", "bare"),
            **(
                {"nixl_against_bare": share("fetched, nixl", "bare"), "nixl_against_nixl": share("fetched, nixl", "nixl shm")}
                if raws
                else {}
            ),
            "at_least": 0.6,
            "reach_for": 0.85,
        }

    return asyncio.run(go())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root, now = Path(scratch), time.time()
        authority = Authority.create(now)
        for name in ("giver", "asker"):
            key = make_key()
            certificate = authority.issue(make_request(key, NodeId(name)), NodeId(name), now)
            folder = FleetFolder(root / name / "fleet")
            folder.write_secret(folder.identity_file, Identity.assemble(key, certificate, authority.root, now).to_pem())
        here, there = get_context("spawn").Pipe()
        giver = get_context("spawn").Process(target=give, args=(root, options, there))
        giver.start()
        try:
            told = ask(root, options, here.recv(), here)
            giver.join(10)
        finally:
            giver.kill()
        print(json.dumps({"machine": machine(2), **told}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
