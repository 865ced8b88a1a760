"""Spares are asked over real sessions to have a route's layers loaded, and a route that loses a machine goes on over them with no load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.unit.node.fleet.nodes import in_loop, until
from tests.unit.node.pipelines.test_spot_check import Eyes as Sees
from tests.unit.node.shards.hosts import DIGEST, MODEL, SPEC, Hosting, Net, User, hosting, wanted

from paceline.backends.table import Kernels
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, WeightsFormat
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role, ShardState
from paceline.node.pipelines.choosing import Part, Wanted, choose
from paceline.node.pipelines.spare_keeper import SpareKeeper
from paceline.node.shapes import model_shape

A, B = NodeId("a"), NodeId("b")
WANTED = Wanted(MODEL, DIGEST, WeightsFormat.BF16, SPEC.n_layers, 2, "counting")
USED = [Part(A, LayerRange(2, 6))]
GIB = 1 << 30


@dataclass(slots=True)
class Eyes(Sees):
    """With cards that say what hosts have."""

    left_out: set[NodeId] = field(default_factory=set[NodeId])

    def cards(self) -> Sequence[NodeCard]:
        return [self._card(node_id) for node_id in (self.node_id, *self.hosts) if node_id not in self.left_out]

    def _card(self, node_id: NodeId) -> NodeCard:
        shape = model_shape(SPEC, WeightsFormat.BF16, lambda _: "BF16", Kernels.TORCH)
        offer = ModelOffer(MODEL, Role.VERIFIER, "bf16", 9.0, 90.0, DIGEST, numerics_id="counting", shape=shape)
        shards = self.hosts[node_id].warm.shards if node_id in self.hosts else ()
        states = [(ShardState(shard.layers, 4, len(shard.claims)), shard.loaded is not None) for shard in shards]
        models = (offer, *(_shard(offer, state, warm=warm) for state, warm in states))
        links = tuple(Link(other, "x:1", 0.001, 1e9) for other in self.hosts if other != node_id)
        return NodeCard(
            node_id, 1, (f"{node_id}:1",), node_id.encode(), 120, 0, backend="cpu", memory_total_bytes=GIB, memory_free_bytes=GIB,
            memory_bytes_per_s=10**10, models=models, links=links, serves_shards=node_id in self.hosts, shard_memory_bytes=GIB,
        )  # fmt: skip


def _shard(offer: ModelOffer, state: ShardState, *, warm: bool) -> ModelOffer:
    return ModelOffer(
        offer.model_id, Role.SHARD, offer.weights, digest=offer.digest, warm=warm, numerics_id="counting", shape=offer.shape, shard=state
    )


@in_loop
async def test_a_machine_outside_the_route_loads_its_layers_and_takes_over_without_a_load() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        eyes = Eyes(user, {A: a, B: b})
        keeper = SpareKeeper(eyes, wanted(2, 6, n_blocks=8), WANTED, asyncio.get_running_loop())
        stage = await user.open(a, wanted(2, 6))
        assert await keeper.look(USED) == {B: False}
        await until(lambda: any(shard.loaded is not None for shard in b.warm.shards))
        assert await keeper.look(USED) == {B: True}
        assert (len(b.loads.asked), b.host.sessions, len(a.loads.asked)) == (1, 0, 1)
        await stage.close()
        eyes.left_out.add(A)
        parts = choose(eyes.cards(), {}, eyes.node_id, WANTED, frozenset(), USED)
        assert parts == [Part(B, LayerRange(2, 6))]
        await (await user.open(b, wanted(2, 6))).close()
        assert len(b.loads.asked) == 1


@in_loop
async def test_a_spare_that_refuses_is_asked_again_and_spares_are_kept_until_there_is_no_route() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b", refuse=("user",)) as b, User(net) as user:
        eyes = Eyes(user, {A: a, B: b})
        keeper = SpareKeeper(eyes, wanted(2, 6), WANTED, asyncio.get_running_loop())
        assert await keeper.look(USED) == {}
        await b.host.close()
        assert await keeper.look(USED) == {}
        both: dict[NodeId, Hosting] = {A: a}
        alone = SpareKeeper(Eyes(user, both), wanted(2, 6), WANTED, asyncio.get_running_loop())
        assert await alone.look(USED) == {}
