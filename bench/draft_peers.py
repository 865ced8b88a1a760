"""Machines that draft, for bench/speculate.py: a member of a fleet in a process of its own, and sources of drafts that reach it.

Everything between them is real: certificates, mTLS, gRPC, gossip. Its proposers are a draft model, where one is asked for, and what nobody should trust.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench.fleet import LoopThread, found_fleet
from paceline.core.clock import SystemClock
from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.engine.drafts import BlockProposal, Proposer
from paceline.fleet.card import Link, NodeCard
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.net.channels import Purpose
from paceline.net.member.node import FleetNode
from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home
from paceline.ways.draft.connection import OnBlock, RemoteConnection
from paceline.ways.draft.finding import Connection, Drafter, Key, OnEnd
from paceline.ways.draft.pool import ProposerPool, proposer_service
from paceline.ways.draft.remote import DraftMeter, RemoteDrafts
from paceline.ways.draft.service import load_proposer

PRESET = "desk,exchange_s=0.2,restamp_s=1,ttl_s=20"
SEEN_S = 120.0
GARBAGE = ("random", "too long", "hangs", "dies")
"""The last one takes its process with it."""
DIES_AT = 20
"""Blocks."""


class Portrait:
    """Of a machine with nothing to say of itself."""

    def look(self) -> bool:
        return False

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        return NodeCard(NodeId("filled in"), 0, addresses, b"", 0, 0, "bench", memory_total_bytes=1 << 34, links=links)


class Garbage:
    """A proposer that does what its name says."""

    def __init__(self, kind: str, vocabulary: int) -> None:
        self._kind, self._vocabulary, self._blocks, self._chance = kind, vocabulary, 0, random.Random(0)

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        del committed, num_steps
        self._blocks += 1
        if self._kind == "hangs":
            time.sleep(3600)
        if self._kind == "dies" and self._blocks == DIES_AT:
            os._exit(1)
        length = block_size + 1 if self._kind == "too long" else block_size
        return BlockProposal(tuple(self._chance.randrange(self._vocabulary) for _ in range(length)))


def make_node(home: Path, peers: Sequence[str] = ()) -> FleetNode:
    settings = FleetSettings(0, "127.0.0.1", peers=tuple(peers), mdns=False, preset=parse_preset(PRESET))
    return FleetNode(settings, FleetFolder(home / "fleet"), Portrait(), SystemClock())


def peer_process(home: Path, address: str, vocabulary: int, model: str, core: int) -> None:
    """The other machine, until it is killed."""
    proposers: dict[str, Proposer] = {kind: Garbage(kind, vocabulary) for kind in GARBAGE}
    if model:
        os.sched_setaffinity(0, {core})
        proposers["model"] = load_proposer(model, 1, None, SystemClock()).proposer

    async def live() -> None:
        node = make_node(home, [address])
        pool = ProposerPool(proposers)
        await node.start(lambda guard: proposer_service(pool, guard.peer))
        await asyncio.Event().wait()

    asyncio.run(live())


class DraftPeers:
    """This machine's end of it.

    Args:
        vocabulary: of the model that is drafted for.
        model: that the other machine drafts with, as "model"; empty: garbage alone.
        core: that it has then.
    """

    def __init__(self, vocabulary: int, model: str = "", core: int = 0) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="paceline-drafts-"))
        homes = found_fleet(self._root, Home.from_environment(), ("here", "there"))
        self._vocabulary = vocabulary
        self._loop = LoopThread("draft peers")
        self._node = self._loop.run(self._start(homes["here"]))
        self._spawn = multiprocessing.get_context("spawn")
        self._sources: list[RemoteDrafts] = []
        self._processes: list[Any] = []
        self._begin(partial(peer_process, homes["there"], self._node.addresses[0], vocabulary, model, core))
        self._loop.run(self._seen())

    def source(self, model_id: str, tokens_per_s: float = 1e5) -> RemoteDrafts:
        """Drafts by a proposer of the other machine."""
        address = self._there.addresses[0]
        made = RemoteDrafts(model_id, DraftMeter(), SystemClock())
        self._sources.append(made)

        def find(left_out: Collection[Key]) -> Sequence[Drafter]:
            card = self._there
            found = Drafter(card.node_id, card.instance, model_id, tokens_per_s, 10 * tokens_per_s, 0.0005)
            if found.key in left_out:
                raise PlacementError(f"{model_id} is left out")
            return [found]

        def open_connection(drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> Connection:
            member = self._node.gossip.opener.member(drafter.node_id)
            if member is None:
                raise PlacementError("the other machine is gone")
            return RemoteConnection(self._node.pool.get(Purpose.DRAFTS, address, member), drafter.node_id, on_block, on_end)

        async def attach() -> None:
            made.attach(find, open_connection, self._vocabulary)

        self._loop.run(attach())
        return made

    def close(self) -> None:
        for source in self._sources:
            self._loop.run(source.detach())
        self._loop.run(self._node.stop())
        for process in self._processes:
            process.kill()
        self._loop.close()
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def _there(self) -> NodeCard:
        live = self._node.view().get(NodeId("there"))
        if live is None:
            raise PlacementError("the other machine is gone")
        return live.card

    async def _start(self, home: Path) -> FleetNode:
        node = make_node(home)
        await node.start()
        return node

    async def _seen(self) -> None:
        async with asyncio.timeout(SEEN_S):
            while self._node.view().get(NodeId("there")) is None:  # noqa: ASYNC110 - what nodes see has no event
                await asyncio.sleep(0.05)

    def _begin(self, work: partial[None]) -> None:
        process = self._spawn.Process(target=work, daemon=True)
        process.start()
        self._processes.append(process)
