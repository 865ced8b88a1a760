"""Blocks whose layers lie on several machines: what parts there are of them, what they cost, and when one stands."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from tests.unit.ways.kv.test_kv_price import offer

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.card import Link, NodeCard
from paceline.fleet.machines import Links
from paceline.machine.kv_spans import KvPart, PartsFetch
from paceline.net.wire import kv_pb2 as wire
from paceline.ways.kv.fetching import LEAST_TURN_S, StagesTurns
from paceline.ways.kv.patience import LEAST_S, Patience
from paceline.ways.kv.price import MOST_PARTS, OPENING_S, parted_price
from paceline.ways.kv.told import MOST_SPANS, read_told

WHOLE = KvPart("d" * 64, "n", bytes(16), LayerRange(0, 30), 1_000)


@dataclass
class Part:
    """Implements `MovedBlocks`."""

    filled: int = 0
    given: None = None
    is_over: bool = False
    cancelled: bool = False
    is_wrong: bool = False

    def cancel(self) -> None:
        self.cancelled = True


def span(name: str, start: int, stop: int) -> LayerSpan:
    return LayerSpan(NodeId(name), LayerRange(start, stop))


def fleet(**rates: float) -> Links:
    """Nodes by name, and bytes a second between `a` and each."""
    links = tuple(Link(NodeId(name), f"{name}:1", 0.001, rate) for name, rate in rates.items())
    cards = [NodeCard(NodeId(name), 1, (f"{name}:1",), b"i", 120, 0, links=links if name == "a" else ()) for name in ("a", *rates)]
    return Links({card.node_id: card for card in cards})


def test_a_part_is_cut_where_the_spans_of_its_giver_end() -> None:
    part = KvPart("d" * 64, "n", bytes(16), LayerRange(10, 20), 1_000)
    assert [piece.layers for piece in part.cut((5, 10, 12, 20, 30))] == [LayerRange(10, 12), LayerRange(12, 20)]
    assert part.cut(()) == [part]
    assert [piece.block_bytes for piece in part.cut((12,))] == [2_000, 8_000]


@pytest.mark.parametrize(
    "spans",
    [
        ((0, 20), (20, 10), (10, 30)),
        ((10, 20), (20, 30)),
        ((0, 10), (15, 30)),
        ((0, 20), (10, 30)),
        ((0, 0), (0, 30)),
        tuple((n, n + 1) for n in range(MOST_SPANS + 1)),
    ],
)
def test_spans_that_are_no_cut_of_a_model_are_as_nothing_told(spans: tuple[tuple[int, int], ...]) -> None:
    said = wire.WatchPrefixesResponse(version=7, block_tokens=16, layout=bytes(16), marks=bytes(16), prefills=True)
    for start, stop in spans:
        said.spans.add(first_layer=start, stop_layer=stop, node_id="h")
    told = read_told(said)
    assert (told.marks, told.prefills, told.spans) == (frozenset(), False, ())


def test_machines_have_their_parts_at_once_and_the_slowest_counts() -> None:
    here = (span("o", 0, 10), span("g", 10, 30))
    found = parted_price(WHOLE, 16, offer(400.0), NodeId("a"), here, fleet(o=1e6, g=1e5))
    assert found is not None
    assert (found.opening_s, found.computed_s) == (pytest.approx(OPENING_S + 0.004), 0.04)
    assert found.fetched_s == pytest.approx(20_000 / 1e5)
    # What a machine has of another route of its own crosses no link.
    assert parted_price(WHOLE, 16, offer(400.0), (span("a", 0, 30),), (span("a", 0, 10), span("g", 10, 30)), fleet(g=1e5)) == found


def test_more_parts_than_are_given_at_once_are_not_asked_for() -> None:
    links = fleet(o=1e6, g=1e6, h=1e6)

    def pieces(start: int, n: int) -> list[LayerSpan]:
        """So many of ten layers."""
        edges = [*range(start, start + n), start + 10]
        return [span("a", *of) for of in pairwise(edges)]

    costs = [
        parted_price(WHOLE, 16, offer(400.0), (*pieces(0, each), *pieces(10, each), *pieces(20, last)), here, links)
        for here in [(span("o", 0, 10), span("g", 10, 20), span("h", 20, 30))]
        for each, last in [(MOST_PARTS - 2, MOST_PARTS - 2), (1, MOST_PARTS + 1), (MOST_PARTS, 1)]
    ]
    assert [cost is None for cost in costs] == [False, True, True]


def test_what_is_not_known_is_not_fetched() -> None:
    here = (span("o", 0, 10), span("g", 10, 30))
    assert parted_price(WHOLE, 16, offer(400.0), NodeId("a"), here, fleet(o=1e6)) is None
    assert parted_price(WHOLE, 16, None, NodeId("a"), here, fleet(o=1e6, g=1e5)) is None
    assert parted_price(WHOLE, 16, offer(400.0), (span("a", 0, 10),), here, fleet(o=1e6, g=1e5)) is None


def test_a_block_stands_once_all_its_parts_do_and_what_follows_a_gap_is_not_waited_for() -> None:
    parts = [Part(3), Part(5), Part(7)]
    fetch = PartsFetch(parts)
    assert (fetch.filled, fetch.is_over) == (3, False)
    parts[1].is_over = True
    assert not fetch.is_over
    assert [part.cancelled for part in parts] == [False, True, True]  # the first may still bring two that count
    parts[0].filled, parts[0].is_over, parts[2].is_over = 4, True, True
    assert (fetch.filled, fetch.is_over) == (4, True)


def test_stages_are_asked_for_no_turn_that_nobody_waits_for() -> None:
    now, turns = 0.0, list[float]()

    def ask(first: int, n_blocks: int, within_s: float) -> Part:
        turns.append(within_s)
        return Part(n_blocks, is_over=True)

    made = [StagesTurns(ask, 2, 1, Patience(now, LEAST_S, 2), 30.0, lambda: now) for _ in range(3)]
    until = Patience(now, LEAST_S, 2).until
    assert [fetch.is_over for fetch in made] == [False] * 3
    made[0].is_begun = made[1].is_begun = True
    assert made[0].is_over
    assert (made[0].filled, made[0].is_late, turns[0]) == (2, False, until)
    now = until - LEAST_TURN_S / 2
    assert made[1].is_over
    assert made[2].is_over, "the peer has not taken the registration"
    assert (made[1].is_late, made[2].is_late, len(turns)) == (True, True, 2)
