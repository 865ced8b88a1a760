"""Nodes of one fleet in this process: real gRPC servers over mTLS on loopback, without models."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from tests.fakes.fleets import TestFleet

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import Link, ModelOffer, NodeCard
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.net.member.node import FleetNode
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.folder import FleetFolder

Given = ParamSpec("Given")
Node = TypeVar("Node", bound=FleetNode)
BOUND_S = 100.0
"""Longest wait for anything a test waits for; reached only when it fails."""
QUICK = "desk,ttl_s=6,exchange_s=0.2,restamp_s=0.2,rpc_timeout_s=2"


def in_loop(test: Callable[Given, Coroutine[None, None, None]]) -> Callable[Given, None]:
    """A test that runs in an event loop of its own, within a bound."""

    @functools.wraps(test)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 3 * BOUND_S))

    return run


class Still:
    """A portrait that never changes unless a test says so."""

    def __init__(self, *offers: ModelOffer) -> None:
        self.offers = offers

    def look(self) -> bool:
        return False

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        return NodeCard(NodeId("filled in"), 0, addresses, b"", 0, 0, "test", memory_total_bytes=1 << 34, models=self.offers, links=links)


def make_node(
    fleet: TestFleet,
    root: Path,
    name: str,
    *peers: FleetNode,
    offers: tuple[ModelOffer, ...] = (),
    preset: str = QUICK,
    host: str = "127.0.0.1",
    trust: Trust = Trust.MEMBER,
    given: tuple[str, ...] = (),
    mdns: bool = False,
    kind: type[Node] = FleetNode,  # type: ignore[assignment]
    protocol: int = PROTOCOL_VERSION,
) -> Node:
    """A node that was not started; its folder is kept between calls."""
    folder = FleetFolder(root / name / "fleet")
    if not folder.is_member:
        folder.write_secret(folder.identity_file, fleet.member(name, trust=trust).to_pem())
    addresses = (*given, *(address for peer in peers for address in peer.addresses))
    settings = FleetSettings(0, host, peers=addresses, mdns=mdns, preset=parse_preset(preset))
    return kind(settings, folder, Still(*offers), SystemClock(), protocol)


@asynccontextmanager
async def running(*nodes: FleetNode) -> AsyncIterator[None]:
    """Start, and stop whatever happens."""
    try:
        for node in nodes:
            await node.start()
        yield
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - what nodes see has no event
            await asyncio.sleep(0.01)


async def until_seen(viewer: FleetNode, *names: str) -> None:
    """Wait until a node sees exactly these."""
    await until(lambda: set(viewer.view().ids) == set(names))
