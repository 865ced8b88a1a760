"""KV fetched from a peer over loopback, against a bare TLS socket that moves as many bytes, in turns.

    python bench/kv_peer.py                                       # an 8k prefix of the bundled model
    python bench/kv_peer.py --layers 32 --heads 8 --head-dim 128 --tokens 2048     # the shape of an 8B

Two processes of one fleet, each with its node: mutual TLS on both ways, blocks lent by a pool, checked and copied into another. No model runs.
A fetch counts from when the blocks are asked for, so with its call, connection and handshake; the bare socket is connected before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from kv import Pages
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.engine.block_pool import BlockPool
from paceline.engine.kv_source import KvLoans
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.net.member.node import FleetNode
from paceline.net.member.settings import FleetSettings
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


def sharing_of(node: FleetNode, options: argparse.Namespace) -> tuple[KvSharing, PeerKv, BlockPool]:
    n = options.tokens // 16
    loans, pool = KvLoans(), BlockPool(n)
    loans.wake = lambda: loans.settle(pool)
    kv = PeerKv(BenchRunner(n, options.layers, options.heads, options.head_dim), DIGEST, None, loans, lambda: None)  # type: ignore[arg-type]
    return KvSharing(node, SystemClock()), kv, pool


def keys_of(options: argparse.Namespace) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1 << 32, (1 << 32) + options.tokens // 16)]


def give(root: Path, options: argparse.Namespace, pipe: Connection) -> None:
    async def go() -> None:
        node = node_of(root, "giver")
        sharing, kv, pool = sharing_of(node, options)
        await node.start(sharing.service)
        sharing.attach(kv)
        for key in keys_of(options):
            pool.cache.insert(key, pool.take())
        kv.loans.used(keys_of(options))
        server = socket.create_server(("127.0.0.1", 0))
        pipe.send((node.addresses[0], server.getsockname()[1]))
        asking = asyncio.create_task(asyncio.to_thread(pipe.recv))
        raw, _ = await asyncio.to_thread(server.accept)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bare = await asyncio.to_thread(server_context(node.identity).wrap_socket, raw, True)
        total = options.tokens // 16 * kv.block_bytes
        chunk = os.urandom(CHUNK)
        while await asking:
            asking = asyncio.create_task(asyncio.to_thread(pipe.recv))
            await asyncio.to_thread(lambda: [bare.sendall(chunk[: min(CHUNK, total - at)]) for at in range(0, total, CHUNK)])
        await sharing.stop()
        await node.stop()

    asyncio.run(go())


def ask(root: Path, options: argparse.Namespace, address: str, port: int, pipe: Connection) -> dict[str, object]:
    async def go() -> dict[str, object]:
        node = node_of(root, "asker", address)
        sharing, kv, pool = sharing_of(node, options)
        await node.start(sharing.service)
        sharing.attach(kv)
        keys, blocks = keys_of(options), [pool.take() for _ in range(options.tokens // 16)]
        while kv.run_of(keys) < len(keys):  # noqa: ASYNC110 - told by gossip and by measured links
            await asyncio.sleep(0.05)
        raw = socket.create_connection(("127.0.0.1", port))
        bare = await asyncio.to_thread(
            lambda: client_context(node.identity).wrap_socket(raw, server_hostname=node.gossip.opener.proven(NodeId("giver")).tls_name)
        )
        total, buffer = len(keys) * kv.block_bytes, memoryview(bytearray(CHUNK))

        def take() -> float:
            began, left = time.perf_counter(), total
            while left:
                left -= bare.recv_into(buffer, min(left, CHUNK))
            return total / (time.perf_counter() - began) / 1e6

        async def fetch() -> float:
            assert kv.run_of(keys) == len(keys)
            began = time.perf_counter()
            fetched = kv.fetch(keys, blocks)
            while not fetched.is_over:  # noqa: ASYNC110 - as the engine looks
                await asyncio.sleep(0.001)
            assert fetched.filled == len(keys), fetched.filled
            return total / (time.perf_counter() - began) / 1e6

        rows: dict[str, list[float]] = {"bare": [], "fetched": []}
        for number in range(options.rounds + 1):
            rows["fetched"].append(await fetch())
            pipe.send(True)
            rows["bare"].append(await asyncio.to_thread(take))
            if not number:
                rows = {kind: [] for kind in rows}
        pipe.send(False)
        bare.close()
        await sharing.stop()
        await node.stop()
        return {
            "block_bytes": kv.block_bytes,
            "megabytes": total / 1e6,
            "bare_mb_s": [round(one) for one in rows["bare"]],
            "fetched_mb_s": [round(one) for one in rows["fetched"]],
            "share": round(median(a / b for a, b in zip(rows["fetched"], rows["bare"], strict=True)), 3),
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
            address, port = here.recv()
            told = ask(root, options, address, port, here)
            giver.join(10)
        finally:
            giver.kill()
        print(json.dumps({"machine": machine(2), **told}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
