"""The real gossip of many nodes on a network with loss, as bench/gossip.py runs it with a thousand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tests.fakes.gossip_network import SimulatedNetwork
from tests.unit.fleet.cards import card

from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard
from paceline.fleet.messages import Digest, ExchangeRequest, PassedCard, Reply
from paceline.fleet.presets import desk, lan, simulation
from paceline.net.exchange_codec import write_reply, write_request
from paceline.net.wire import fleet_pb2 as wire

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module("gossip")
    for name in set(sys.modules) - before & {"gossip", "gossip_wire"}:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("loss", "churn", "missing"), [(0.0, 0, 0), (0.05, 1, 5)])
def test_fifty_nodes_cost_each_at_most_sixty_kilobytes_a_round_and_a_dead_one_leaves_every_view(
    bench: ModuleType, loss: float, churn: int, missing: int
) -> None:
    outcome = bench.simulate(lan(), 50, degree=3, loss=loss, seed=1, steady_rounds=8, churn=churn, churn_rounds=6)
    assert outcome.rounds_to_converge <= 4
    assert max(outcome.steady_bytes_most_loaded, outcome.churn_bytes_per_node_round) <= 60_000
    # Of 2,450 pairs of nodes.
    assert max(outcome.steady_missing, outcome.churn_missing) <= missing
    assert outcome.dead_shown_ttls <= 2


def test_two_hundred_nodes_converge_and_stay_so_with_loss_and_churn(bench: ModuleType) -> None:
    outcome = bench.simulate(simulation(), 200, degree=3, loss=0.05, seed=1, steady_rounds=4, churn=2, churn_rounds=6, dead=False)
    assert outcome.rounds_to_converge <= 8
    assert outcome.steady_bytes_per_node_round <= 30_000
    assert (outcome.steady_missing, outcome.churn_missing, outcome.churn_dead_shown) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_five_machines_agree_within_three_rounds_after_a_partition_heals(seed: int) -> None:
    network = SimulatedNetwork(desk(), seed=seed, loss=0.05)
    for label in "abcde":
        network.start(label, seeds="a" if label != "a" else "")
    network.run(3 * desk().exchange_s)
    network.partition("ab", "cde")
    network.run(2 * desk().ttl_s)
    assert [node.gossip.view(network.clock(node)).ids for node in network.nodes.values()] == [tuple("ab")] * 2 + [tuple("cde")] * 3
    network.heal()
    network.run(3 * desk().exchange_s)
    assert {node.gossip.view(network.clock(node)).ids for node in network.nodes.values()} == {tuple("abcde")}


@pytest.mark.parametrize("seed", range(5))
def test_no_view_shows_a_dead_node_past_its_ttl(seed: int) -> None:
    network = SimulatedNetwork(lan(), seed=seed, loss=0.05, latency_s=(0.1, 0.3))
    for number in range(12):
        network.start(f"n{number}", seeds=["n0"] if number else [])
    network.run(120.0)
    network.kill("n5")
    # An age does not know how long a message was under way: two hops of 0.3 s at most, here.
    network.run(lan().ttl_s + 2.0)
    assert all("n5" not in node.gossip.view(network.clock(node)).ids for node in network.nodes.values())
    network.run(300.0)
    assert {len(node.gossip.view(network.clock(node)).ids) for node in network.nodes.values()} == {11}


def test_bytes_are_counted_as_protobuf_makes_them(bench: ModuleType) -> None:
    size = importlib.import_module("gossip_wire").size
    signed = wire.SignedCard(card=b"c" * 700, beat=200, signature=b"s" * 72)
    sealed = SealedCard(card("a", 1_763_000_000_000_000), signed.SerializeToString(), 200, b"x" * 480)
    digests = frozenset(Digest(key << 40, 1_763_000_000_000_000 + key, key % 256) for key in range(1, 301))
    cards = tuple(PassedCard(sealed, 100.0, with_certificate=number % 2 == 0) for number in range(20))
    renewals = (PassedCard(sealed, 100.0, with_card=False, with_certificate=False),) * 300
    messages: list[ExchangeRequest | Reply] = [
        ExchangeRequest(digests=digests),
        ExchangeRequest(cards=renewals, revocations_digest=b"d" * 16),
        ExchangeRequest(cards=cards),
        ExchangeRequest(digests, (*renewals, *cards), (), b"d" * 16),
        Reply((*renewals, *cards), tuple(digests), (), b"d" * 16, more=True),
        Reply(),
    ]
    half_a_call = importlib.import_module("gossip_wire").CALL_BYTES // 2
    for message in messages:
        real = (write_request(message) if isinstance(message, ExchangeRequest) else write_reply(message)).ByteSize()
        counted = size(message) - half_a_call
        assert real <= counted <= 1.06 * real + 50


def test_a_simulated_network_repeats_exactly() -> None:
    def run() -> list[tuple[NodeId, ...]]:
        network = SimulatedNetwork(replace(lan(), exchange_s=10.0), seed=7, loss=0.3)
        for number in range(8):
            network.start(f"n{number}", seeds=["n0"] if number else [])
        network.run(25.0)
        return [node.gossip.view(network.clock(node)).ids for node in network.nodes.values()]

    assert run() == run()
