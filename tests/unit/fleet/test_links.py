from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from paceline.core.ids import NodeId
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.links import (
    LinkTimes,
    LinkWatch,
    Measure,
    addresses_to_measure,
    figures,
    may_be_dialled,
    may_share_a_plan,
    peers_to_measure,
)

BEE, CAT = NodeId("bee"), NodeId("cat")
CABLE, WIFI = "10.0.0.2:7000", "192.168.1.2:7000"


class Wire:
    """Ways with set figures, measured as the watch asks. None: dead."""

    def __init__(self, *peers: NodeId, times: LinkTimes | None = None) -> None:
        self.now = 0.0
        self.watch = LinkWatch(random.Random(1), times)
        self.ways: dict[str, tuple[float, float] | None] = {CABLE: (0.0005, 110e6), WIFI: (0.005, 12e6)}
        self.asked: list[Measure] = []
        self.changes = 0
        self.watch.set_peers(dict.fromkeys(peers or (BEE,), (CABLE, WIFI)), self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.watch.next_due_s()) is not None and due <= end:
            self.now = max(self.now, due)
            for measure in self.watch.tick(self.now):
                self.asked.append(measure)
                way = self.ways[measure.address]
                if way is None:
                    self.changes += self.watch.failed(measure.id, self.now)
                else:
                    self.changes += self.watch.measured(measure.id, self.now, way[0], way[1] if measure.payload_bytes else None)
        self.now = end

    @property
    def link(self) -> Link | None:
        return next(iter(self.watch.links), None)

    def count(self, *, full: bool) -> int:
        return sum(bool(measure.payload_bytes) is full for measure in self.asked)


def test_every_way_is_measured_and_the_widest_is_used() -> None:
    wire = Wire()
    assert wire.watch.tick(-1.0) == []
    wire.run(2.0)
    assert {measure.address for measure in wire.asked} == {CABLE, WIFI}
    assert wire.link == Link(BEE, CABLE, 0.0005, 110e6)


def test_only_the_way_in_use_is_pinged_and_all_are_measured_now_and_then() -> None:
    wire = Wire()
    wire.run(2.0)
    wire.asked.clear()
    wire.run(500.0)
    assert {measure.address for measure in wire.asked} == {CABLE}
    assert wire.count(full=True) == 0
    assert 40 <= wire.count(full=False) <= 56
    wire.run(200.0)
    assert wire.count(full=True) == 2


def test_one_measurement_at_a_time() -> None:
    watch = LinkWatch(random.Random(1))
    watch.set_peers({BEE: (CABLE, WIFI), CAT: (CABLE,)}, 0.0)
    (first,) = watch.tick(2.0)
    assert watch.tick(2.5) == []
    watch.measured(first.id, 2.6, 0.001, 1e8)
    (second,) = watch.tick(2.6)
    assert (first.node_id, first.address) != (second.node_id, second.address)


def test_an_asker_that_never_answers_holds_nothing_up_for_ever() -> None:
    watch = LinkWatch(random.Random(1))
    watch.set_peers({BEE: (CABLE, WIFI)}, 0.0)
    (lost,) = watch.tick(2.0)
    (other,) = watch.tick(13.0)
    assert other.id != lost.id
    assert not watch.measured(lost.id, 13.0, 0.001, 1e8)
    assert watch.links == ()


def test_a_round_trip_that_doubles_is_measured_anew_and_another_way_taken() -> None:
    wire = Wire()
    wire.run(2.0)
    wire.asked.clear()
    wire.ways[CABLE] = (0.002, 1e6)
    wire.run(11.0)
    assert wire.count(full=True) == 0
    assert wire.link == Link(BEE, CABLE, 0.0005, 110e6)
    wire.run(11.0)
    assert {measure.address for measure in wire.asked if measure.payload_bytes} == {CABLE, WIFI}
    assert wire.link == Link(BEE, WIFI, 0.005, 12e6)


def test_one_slow_ping_is_a_hiccup() -> None:
    wire = Wire()
    wire.run(2.0)
    for _ in range(10):
        wire.watch.observed(BEE, CABLE, wire.now, rtt_s=0.5)
        wire.watch.observed(BEE, CABLE, wire.now, rtt_s=0.0005)
    wire.run(1.0)
    assert wire.count(full=True) == 2
    assert wire.link == Link(BEE, CABLE, 0.0005, 110e6)


def test_bandwidth_that_halves_in_other_traffic_is_measured_anew() -> None:
    wire = Wire()
    wire.run(2.0)
    wire.asked.clear()
    for _ in range(2):
        wire.watch.observed(BEE, CABLE, wire.now, bytes_per_s=40e6)
    wire.ways[CABLE] = (0.0005, 40e6)
    wire.run(0.0)
    assert wire.count(full=True) == 2
    assert wire.link == Link(BEE, CABLE, 0.0005, 40e6)


def test_traffic_below_what_a_way_carries_says_nothing_against_it() -> None:
    wire = Wire()
    wire.run(2.0)
    for _ in range(50):
        wire.watch.observed(BEE, CABLE, wire.now, bytes_per_s=60e6)
    assert wire.link == Link(BEE, CABLE, 0.0005, 110e6)


def test_a_dead_way_is_left_after_two_failures_and_taken_again_when_it_lives() -> None:
    wire = Wire()
    wire.run(2.0)
    wire.ways[CABLE] = None
    wire.run(30.0)
    assert wire.link == Link(BEE, WIFI, 0.005, 12e6)
    wire.asked.clear()
    wire.run(3000.0)
    tries = [measure for measure in wire.asked if measure.address == CABLE]
    assert 8 <= len(tries) <= 20
    wire.ways[CABLE] = (0.0005, 110e6)
    wire.run(400.0)
    assert wire.link == Link(BEE, CABLE, 0.0005, 110e6)


def test_where_every_way_is_dead_there_is_no_link() -> None:
    wire = Wire()
    wire.run(2.0)
    wire.ways = {CABLE: None, WIFI: None}
    wire.run(60.0)
    assert wire.watch.links == ()


@pytest.mark.parametrize(
    ("bandwidth", "rtt", "taken"), [(130e6, 0.0005, False), (140e6, 0.01, True), (110e6, 0.00045, False), (111e6, 0.0003, True)]
)
def test_another_way_must_be_clearly_better(bandwidth: float, rtt: float, taken: bool) -> None:
    wire = Wire()
    wire.ways[WIFI] = (0.005, 12e6)
    wire.run(2.0)
    wire.ways[WIFI] = (rtt, bandwidth)
    for _ in range(40):
        wire.run(700.0)
    assert wire.link is not None
    assert (wire.link.address == WIFI) is taken


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.floats(1e-4, 1e-2), st.floats(1e6, 1e9)), min_size=2, max_size=5))
def test_steady_ways_never_take_turns(ways: list[tuple[float, float]]) -> None:
    wire = Wire()
    wire.ways = {f"10.0.0.{number}:1": way for number, way in enumerate(ways)}
    wire.watch.set_peers({BEE: tuple(wire.ways)}, 0.0)
    wire.run(2000.0)
    before = wire.changes
    wire.run(2000.0)
    assert wire.changes == before
    assert wire.link is not None
    best = max(rate for _, rate in ways)
    assert wire.link.bytes_per_s >= 0.75 * best


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=30))
@settings(max_examples=examples(40), deadline=None)
def test_a_card_does_not_change_for_a_link_that_trembles(tremors: list[float]) -> None:
    wire = Wire()
    wire.ways[CABLE] = (0.00052, 112e6)
    wire.run(2.0)
    before = wire.changes
    for tremor in tremors:
        wire.ways[CABLE] = (0.00052 * (1 + (tremor - 1) / 10), 112e6 * (1 + (tremor - 1) / 10))
        wire.run(300.0)
    assert wire.changes == before


def test_peers_that_go_are_forgotten_and_ways_that_change_are_measured() -> None:
    wire = Wire(BEE, CAT)
    wire.run(3.0)
    assert [link.to for link in wire.watch.links] == [BEE, CAT]
    wire.watch.set_peers({CAT: (WIFI,)}, wire.now)
    assert [(link.to, link.address) for link in wire.watch.links] == [(CAT, WIFI)]
    wire.watch.set_peers({}, wire.now)
    assert wire.watch.links == ()
    assert wire.watch.next_due_s() is None
    assert wire.watch.tick(wire.now + 1e6) == []


def test_a_measurement_of_a_peer_that_went_meanwhile_is_nothing() -> None:
    watch = LinkWatch(random.Random(1))
    watch.set_peers({BEE: (CABLE,)}, 0.0)
    (measure,) = watch.tick(2.0)
    watch.set_peers({}, 2.0)
    assert not watch.measured(measure.id, 2.1, 0.001, 1e8)
    assert not watch.failed(measure.id, 2.1)


@pytest.mark.parametrize(("rtt", "rate"), [(float("nan"), 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, float("inf")), (float("inf"), None)])
def test_absurd_figures_are_no_measurement(rtt: float, rate: float | None) -> None:
    watch = LinkWatch(random.Random(1))
    watch.set_peers({BEE: (CABLE,)}, 0.0)
    (measure,) = watch.tick(2.0)
    assert not watch.measured(measure.id, 2.0, rtt, rate)
    assert watch.links == ()
    assert watch.tick(2.0) == []
    assert watch.tick(10.0) != []


def test_no_more_peers_than_agreed() -> None:
    watch = LinkWatch(random.Random(1), LinkTimes(most_peers=3))
    watch.set_peers({NodeId(f"n{number}"): (CABLE,) for number in range(9)}, 0.0)
    seen: set[NodeId] = set()
    now = 2.0
    while measures := watch.tick(now):
        seen.add(measures[0].node_id)
        watch.measured(measures[0].id, now, 0.001, 1e8)
    assert seen == {"n0", "n1", "n2"}


def test_figures_of_a_measurement() -> None:
    rtt, rate = figures([0.004, 0.002, 0.003], 1 << 20, 0.012)
    assert rtt == 0.002
    assert rate == pytest.approx((1 << 20) / 0.01)
    assert figures([0.002], 1 << 20, 0.001)[1] > 0


# ------------------------------------------------------------------------------------------------------------ who and where

SHAPE = ModelShape(10, 64, 1 << 30, 1 << 20, 16, 4096)


def card(name: str, *addresses: str, models: tuple[ModelOffer, ...] = (), memory: int = 16 << 30, backend: str = "cpu") -> NodeCard:
    return replace(NodeCard(NodeId(name), 1, addresses, b"", 1, 0), models=models, memory_total_bytes=memory, backend=backend)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ((CABLE, WIFI, "127.0.0.1:7000", "[::1]:7000"), (CABLE, WIFI)),
        (("127.0.0.1:7000", "[::1]:7000"), ("127.0.0.1:7000", "[::1]:7000")),
        (("localhost:1", CABLE), (CABLE,)),
        (("0.0.0.0:1", "[::]:1", "[fe80::1]:1", "[fe80::1%eth0]:1", "[2001:db8::1]:7", "224.0.0.1:1"), ("[2001:db8::1]:7",)),
        (("host.local:7000", "10.0.0.2", ":5", "10.0.0.2:0", "10.0.0.2:99999", "10.0.0.2:x", ""), ("host.local:7000",)),
        ((CABLE, CABLE), (CABLE,)),
        (("10.9.9.9:8", "127.0.0.1:8"), ("10.9.9.9:8", "127.0.0.1:8")),
        (tuple(f"10.0.0.{number}:1" for number in range(20)), tuple(f"10.0.0.{number}:1" for number in range(8))),
        (("169.254.9.2:1", "10.0.0.2:1"), ("10.0.0.2:1",)),
        ((), ()),
    ],
)
def test_which_addresses(addresses: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert addresses_to_measure(card("own", "10.9.9.9:7", "127.0.0.1:7"), card("bee", *addresses)) == expected


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (("169.254.9.1:7",), ("169.254.9.2:1",)),
        (("10.9.9.9:7", "169.254.9.1:7"), ("10.0.0.2:1", "169.254.9.2:1")),
        (("10.9.9.9:7", "[fe80::9]:7"), ("10.0.0.2:1",)),
        (("169.254.9.2:7", "127.0.0.1:7"), ("169.254.9.2:1", "127.0.0.1:1")),
    ],
    ids=["cable alone", "cable and network", "network alone", "same machine"],
)
def test_link_local_addresses_are_measured_from_machines_that_have_one(own: tuple[str, ...], expected: tuple[str, ...]) -> None:
    others = [
        address for address in ("10.0.0.2:1", "169.254.9.2:1", "[fe80::2]:1", "127.0.0.1:1") if address in expected or "10.0" not in address
    ]
    assert addresses_to_measure(card("own", *own), card("bee", *others)) == expected


@pytest.mark.parametrize(
    ("own", "addresses", "expected"),
    [
        (("10.9.9.9:7",), ("127.0.0.1:22", "[::1]:22", "127.8.0.1:22", "localhost:22"), ()),
        (("10.9.9.9:7",), ("10.9.9.9:22", "127.0.0.1:22", CABLE), (CABLE,)),
        (("10.9.9.9:7", "172.17.0.1:7"), ("172.17.0.1:7", WIFI), (WIFI,)),
        (("[2001:db8::1]:7",), ("[2001:db8:0::1]:22",), ()),
        (("127.0.0.1:7",), ("127.0.0.1:8",), ("127.0.0.1:8",)),
        (("127.0.0.1:7",), ("127.0.0.1:22", CABLE), (CABLE,)),
    ],
)
def test_a_card_names_no_port_of_a_machine_that_is_not_its_own(
    own: tuple[str, ...], addresses: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert addresses_to_measure(card("own", *own), card("bee", *addresses)) == expected


@pytest.mark.parametrize(
    "here",
    [
        "127.0.0.1:22",
        "127.8.0.1:22",
        "localhost:22",
        "LOCALHOST:22",
        "0.0.0.0:22",
        "[::]:22",
        "[::1]:22",
        "[::ffff:127.0.0.1]:22",
        "[::ffff:0:0]:22",
    ],
)
def test_loopback_is_dialled_only_from_loopback(here: str) -> None:
    assert may_be_dialled(["10.9.9.9:7", "[fd00::9]:7"], [here, CABLE]) == (CABLE,)
    assert may_be_dialled(["127.0.0.1:7"], [here, CABLE]) == (here, CABLE)
    assert addresses_to_measure(card("own", "10.9.9.9:7"), card("bee", here, CABLE)) == (CABLE,)


def model(role: Role = Role.VERIFIER, digest: str = "d", weights: str = "int4", vocabulary: str = "v") -> ModelOffer:
    return ModelOffer("m", role, weights, digest=digest, vocabulary=vocabulary, shape=SHAPE)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((model(),), (model(),), True),
        ((model(),), (model(Role.SHARD),), True),
        ((model(),), (model(digest="e"),), False),
        ((model(digest=""),), (model(digest=""),), False),
        ((model(),), (model(weights="bf16"),), False),
        ((model(),), (model(Role.EMBEDDER),), False),
        ((model(),), (ModelOffer("ngram", Role.PROPOSER, ""),), False),
        ((model(),), (model(Role.PROPOSER, digest="e"),), True),
        ((model(),), (model(Role.PROPOSER, digest="e", vocabulary="w"),), False),
        ((model(vocabulary=""),), (model(Role.PROPOSER, digest="e", vocabulary=""),), False),
        ((model(Role.PROPOSER),), (model(Role.PROPOSER),), False),
        ((model(),), (), False),
        ((), (), False),
    ],
)
def test_who_may_share_a_plan(one: tuple[ModelOffer, ...], other: tuple[ModelOffer, ...], share: bool) -> None:
    a, b = card("a", CABLE, models=one), card("b", WIFI, models=other)
    assert may_share_a_plan(a, b) is share
    assert may_share_a_plan(b, a) is share
    assert bool(peers_to_measure(a, [a, b])) is share


def test_a_model_too_big_for_its_machine_wants_help_from_any() -> None:
    big = card("a", CABLE, models=(model(),), memory=8 << 30)
    assert may_share_a_plan(big, card("b"))
    assert may_share_a_plan(card("b"), big)
    assert not may_share_a_plan(big, card("b", backend=""))


def test_whoever_serves_shards_may_be_a_stage_of_any_model() -> None:
    has, serves = card("a", CABLE, models=(model(),)), replace(card("b", WIFI), serves_shards=True)
    assert may_share_a_plan(has, serves)
    assert may_share_a_plan(serves, has)
    assert not may_share_a_plan(serves, replace(card("c", CABLE), serves_shards=True))


def test_nobody_measures_themselves_or_who_leaves() -> None:
    own, other = card("a", CABLE, models=(model(),)), card("b", WIFI, models=(model(),))
    assert peers_to_measure(own, [own, other]) == {"b": (WIFI,)}
    assert peers_to_measure(own, [own, replace(other, leaving=True)]) == {}
    assert peers_to_measure(own, [own, replace(other, addresses=())]) == {}


def test_what_the_network_takes_of_a_round_trip_is_shown_and_followed() -> None:
    watch = LinkWatch(random.Random(1))
    watch.set_peers({BEE: (CABLE,)}, 0.0)
    (full,) = watch.tick(2.0)
    watch.measured(full.id, 2.0, 0.001, 1e8, 0.0002)
    assert watch.links == (Link(BEE, CABLE, 0.001, 1e8, 0.0002),)
    (ping,) = watch.tick(20.0)
    assert ping.payload_bytes == 0
    watch.measured(ping.id, 20.0, 0.001, None, 0.0003)
    assert watch.links[0].network_s == pytest.approx(0.000225, rel=0.05)


def test_a_transfer_no_longer_than_a_call_is_not_infinitely_fast() -> None:
    """As on a machine that does much else."""
    rtt_s, bytes_per_s = figures([0.03, 0.02], 1_000_000, 0.02)
    assert (rtt_s, bytes_per_s) == (0.02, pytest.approx(1_000_000 / 0.002))
