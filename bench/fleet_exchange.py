"""How long one gossip exchange takes between two nodes on loopback: mTLS, signatures, protobuf and all. Prints milliseconds.

    python bench/fleet_exchange.py [--exchanges 500]

`quiet`: nothing is new, as in most rounds. `news`: one card is new, signed by its node and checked by the other. `dial`: a connection is made
for it, as after a restart.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes.fleets import TestFleet

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.messages import ExchangeRequest, GossipCall
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.net.channels import Purpose
from paceline.net.exchange import Exchanger
from paceline.net.member.node import FleetNode
from paceline.net.trust.folder import FleetFolder

SHAPE = ModelShape(30, 576, 2_212_560, 30_081_384, 768, 8192)
OFFER = ModelOffer("smollm2-135m", Role.VERIFIER, "int4", 200.0, 3300.0, "d" * 64, True, "n" * 64, True, 98_362_432, SHAPE, "v" * 64)


class Portrait:
    """A card of the size that cards have."""

    free = 8_000_000_000

    def look(self) -> bool:
        return False

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        models = (OFFER, replace(OFFER, model_id="another", warm=False), ModelOffer("ngram", Role.PROPOSER, ""))
        return NodeCard(
            NodeId("filled in"), 0, addresses, b"", 0, 0, "linux-x86_64", "cpu-avx512bf16", "a processor, 8 cores",
            16_000_000_000, self.free, 40_000_000_000, models, links,
        )  # fmt: skip


async def median_ms(times: int, work: Callable[[], Awaitable[object]]) -> str:
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        taken.append((time.perf_counter() - began) * 1000)
    taken.sort()
    return f"median {statistics.median(taken):.2f} ms, 99 % under {taken[int(len(taken) * 0.99)]:.2f} ms"


async def measure(root: Path, exchanges: int) -> None:
    fleet, clock = TestFleet(), SystemClock()
    # Rounds of their own would only be in the way.
    preset = parse_preset("lan,ttl_s=80000,exchange_s=10000,restamp_s=10000")
    preset = replace(preset, bounds=replace(preset.bounds, burst=1_000_000))

    def node(name: str) -> FleetNode:
        folder = FleetFolder(root / name)
        folder.write_secret(folder.identity_file, fleet.member(name).to_pem())
        return FleetNode(FleetSettings(0, "127.0.0.1", (), mdns=False, preset=preset), folder, Portrait(), clock)

    a, b = node("a"), node("b")
    await a.start()
    await b.start()
    exchanger = Exchanger(a.node_id, a.pool, a.gossip.opener, a.book, preset.bounds, clock)
    driver = a.gossip._gossip  # noqa: SLF001 - the exchange alone is measured, without its rounds

    def fail(error: Exception) -> None:
        raise error

    async def exchange() -> None:
        """What `GossipDriver` does for a call, and nothing else."""
        request = ExchangeRequest(digests=driver._registry.digests())  # noqa: SLF001
        answer = await exchanger.call(GossipCall(0, b.addresses, None, request, 5.0), fail)
        driver.on_reply(0, answer.reply, answer.peer, clock.monotonic())

    async def with_news() -> None:
        Portrait.free += 1_000_000_000
        await b.gossip.refresh()
        await exchange()

    async def dialling() -> None:
        a.pool.discard(Purpose.EXCHANGE, b.addresses[0], b.identity.member)
        await exchange()

    await exchange()
    print(f"quiet  {await median_ms(exchanges, exchange)}")
    print(f"news   {await median_ms(exchanges // 5, with_news)} (a card made, kept, signed, sent and checked)")
    print(f"dial   {await median_ms(exchanges // 5, dialling)}")
    await asyncio.gather(a.stop(), b.stop())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exchanges", type=int, default=500)
    exchanges: int = parser.parse_args().exchanges
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(Path(root), exchanges))


if __name__ == "__main__":
    main()
