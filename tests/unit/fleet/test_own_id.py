"""A node meets cards of its own id that it did not sign: it rises above them, and says when the id runs elsewhere."""

from __future__ import annotations

import pytest
from tests.fakes.gossip_network import SimulatedNetwork, SimulatedNode
from tests.unit.fleet.cards import card

from paceline.fleet.card import NodeCard
from paceline.fleet.intake import CONFLICT_RISES, CONFLICT_S, OwnId
from paceline.fleet.messages import Clashed, Effect, Reseal
from paceline.fleet.presets import Preset, desk, lan

ROUND_S = 30.0
OWN = card("a", 10)


def other(version: int) -> NodeCard:
    return card("a", version, instance=1)


def risen(own_id: OwnId, *times: float) -> list[Effect]:
    """The effects of rises at these times, each above a card that is ahead."""
    effects: list[Effect] = []
    for at in times:
        own_id.see(other(11))
        effects += own_id.rise(OWN, at)
    return effects


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


@pytest.mark.parametrize(("version", "rises"), [(9, False), (10, True), (11, True)])
def test_a_node_rises_above_cards_that_are_not_below_its_own(version: int, *, rises: bool) -> None:
    own_id = OwnId(ROUND_S)
    own_id.see(other(version))
    assert [effect.above for effect in own_id.rise(OWN, 0.0) if isinstance(effect, Reseal)] == ([version] if rises else [])


def test_the_greatest_version_counts_in_whatever_order_cards_come() -> None:
    own_id = OwnId(ROUND_S)
    for version in (12, 50, 11):
        own_id.see(other(version))
    (reseal,) = own_id.rise(OWN, 0.0)
    assert isinstance(reseal, Reseal)
    assert reseal.above == 50


def test_a_node_rises_at_most_once_a_round() -> None:
    assert kinds(risen(OwnId(ROUND_S), 0.0, 1.0, ROUND_S - 0.1, ROUND_S)) == [Reseal, Reseal]


def test_the_third_rise_in_ten_minutes_says_once_that_the_id_runs_elsewhere() -> None:
    own_id = OwnId(ROUND_S)
    effects = risen(own_id, *(100.0 * number for number in range(8)))
    assert kinds(effects) == [*[Reseal] * CONFLICT_RISES, Clashed, *[Reseal] * 5]
    (told,) = [effect for effect in effects if isinstance(effect, Clashed)]
    assert (told.node_id, told.addresses, told.other_addresses) == ("a", ("a-0:7000",), ("a-1:7000",))


@pytest.mark.parametrize(
    "times",
    [
        (0.0, 100.0),  # a restart with a clock that was set back, and another
        (0.0, CONFLICT_S / 2, CONFLICT_S + 1),
        (0.0, CONFLICT_S, 2 * CONFLICT_S, 3 * CONFLICT_S),
    ],
)
def test_rises_that_are_few_or_far_apart_are_no_conflict(times: tuple[float, ...]) -> None:
    own_id = OwnId(ROUND_S)
    assert kinds(risen(own_id, *times)) == [Reseal] * len(times)
    assert own_id.conflicts(OWN, times[-1]) == ()


def test_a_conflict_ends_in_time_and_a_later_one_is_said_again() -> None:
    own_id = OwnId(ROUND_S)
    risen(own_id, 0.0, 40.0, 80.0)
    (shown,) = own_id.conflicts(OWN, 100.0)
    assert shown.seen_s_ago == 20.0
    assert own_id.conflicts(OWN, CONFLICT_S - 1) != ()
    assert own_id.conflicts(OWN, CONFLICT_S) == ()
    assert kinds(risen(own_id, 2000.0, 2040.0, 2080.0)).count(Clashed) == 1


# ------------------------------------------------------------------------------------------------------------- in a fleet


def conflicting(network: SimulatedNetwork) -> set[str]:
    """Labels of the nodes that show a conflict now."""
    return {node.label for node in network.nodes.values() if node.gossip.view(network.clock(node)).clashes}


@pytest.mark.parametrize(("preset", "others", "started_late_s"), [(desk(), 1, 0.0), (lan(), 1, 500.0), (lan(), 5, 0.0), (lan(), 12, 300.0)])
def test_both_machines_with_a_copied_home_say_so_and_no_other(preset: Preset, others: int, started_late_s: float) -> None:
    told: list[str] = []

    def happened(now: float, node: SimulatedNode, effect: Effect) -> None:
        if isinstance(effect, Clashed):
            told.append(node.label)

    network = SimulatedNetwork(preset, seed=3, on_effect=happened)
    for number in range(others):
        network.start(f"n{number}", seeds=["n0"] if number else [])
    network.start("b", seeds=["n0"])
    network.run(started_late_s)
    network.start("copy", node_id="b", seeds=["n0"], persisted=network.nodes["b"].persisted)
    network.run(600.0)
    assert conflicting(network) == {"b", "copy"}
    assert sorted(told) == ["b", "copy"]
    network.kill("copy")
    network.run(CONFLICT_S + preset.ttl_s)
    assert conflicting(network) == set()
    assert all("b" in node.gossip.view(network.clock(node)).ids for node in network.nodes.values())


@pytest.mark.parametrize("skew_s", [-5.0, -5000.0, -1e9, 1e6])
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_node_that_restarts_with_another_clock_comes_back_without_a_conflict(skew_s: float, *, forgetful: bool) -> None:
    network = SimulatedNetwork(lan(), seed=2)
    for label in "abc":
        network.start(label, seeds="" if label == "a" else "a")
    network.run(100.0)
    for _ in range(2):
        old = network.kill("b")
        network.start("b", seeds="a", skew_s=skew_s, persisted=0 if forgetful else old.persisted)
        network.run(3 * lan().exchange_s)
        instances = {live.card.instance for node in network.nodes.values() for live in node.gossip.view(network.clock(node)).nodes}
        assert network.nodes["b"].instance in instances
        assert old.instance not in instances
        assert conflicting(network) == set()
