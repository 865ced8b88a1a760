"""Shards that are loaded cover a model: a greedy rule, whatever the order; where only their weights are others, that is said."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan, ModelRef
from paceline.fleet.card import ModelOffer, NodeCard, Role, ShardState
from paceline.ways.pipeline.cover import CoverRequest, WarmShard, other_weights, pick, warm_shards

DIGEST = "d" * 64


def shard(node: str, first: int, last: int, *, queue: int = 0, streams: int = 0, rate: float = 10.0, memory: int = 1 << 30) -> WarmShard:
    """Layers `first` to `last`, both counted."""
    state = ShardState(LayerRange(first, last + 1), max_streams=4, streams=streams, queue_depth=queue)
    return WarmShard(NodeId(node), b"i", ModelRef(DIGEST, "int4", "m"), "n", state, rate, memory)


def wanted(n_layers: int = 16) -> CoverRequest:
    return CoverRequest(ModelRef(DIGEST, "int4", "m"), LayerRange(0, n_layers))


def route(cover: Sequence[LayerSpan] | None) -> list[str]:
    assert cover is not None
    return [f"{part.node_id} {part.layers}" for part in cover]


def test_the_seeds_example() -> None:
    shards = [shard("a", 0, 7), shard("b", 4, 11), shard("c", 8, 15)]
    for order in itertools.permutations(shards):
        assert route(pick(order, wanted())) == ["a 0-7", "c 8-15"]


def test_the_lowest_queue_goes_first() -> None:
    shards = [shard("a", 0, 7), shard("b", 4, 11, queue=1), shard("c", 8, 15, queue=2)]
    assert route(pick(shards, wanted())) == ["a 0-7", "b 8-11", "c 12-15"]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (shard("a", 0, 15), shard("z", 0, 14, rate=99.0)),
        (shard("a", 0, 15, rate=11.0), shard("z", 0, 15, memory=1 << 40)),
        (shard("a", 0, 15, memory=1 << 31), shard("z", 0, 15)),
        (shard("z", 0, 15), shard("a", 0, 15)),
        (shard("a", 0, 15, queue=1, streams=3), shard("z", 0, 15, streams=4)),
    ],
    ids=["reach", "throughput", "memory", "id", "a stream free"],
)
def test_ties(better: WarmShard, worse: WarmShard) -> None:
    rest = shard("rest", 15, 15)
    assert route(pick([worse, better, rest], wanted()))[0].startswith(better.node_id)


def test_layers_in_the_middle_are_covered_alone() -> None:
    request = replace(wanted(), layers=LayerRange(3, 12))
    assert route(pick([shard("a", 0, 7), shard("b", 4, 15)], request)) == ["a 3-7", "b 8-11"]
    assert route(pick([], replace(wanted(), layers=LayerRange(5, 5)))) == []


def test_who_asks_may_be_left_out() -> None:
    shards = [shard("me", 0, 15, rate=99.0), shard("you", 0, 15)]
    request = replace(wanted(), own=NodeId("me"))
    assert route(pick(shards, request)) == ["me 0-15"]
    assert route(pick(shards, replace(request, allow_self=False))) == ["you 0-15"]


def test_who_failed_is_left_out() -> None:
    shards = [shard("a", 0, 15, rate=3.0), shard("b", 0, 15, rate=2.0)]
    without = [replace(wanted(), exclude=frozenset(map(NodeId, nodes))) for nodes in ("", "a", "ab")]
    assert [route(pick(shards, each)) for each in without[:2]] == [["a 0-15"], ["b 0-15"]]
    assert pick(shards, without[2]) is None


def test_few_long_shards_are_taken_where_many_idle_ones_are_too_many() -> None:
    shards = [*(shard(f"s{n}", n, n) for n in range(16)), shard("long", 0, 15, queue=9)]
    assert len(route(pick(shards, wanted()))) == 16
    assert route(pick(shards, replace(wanted(), max_shards=15))) == ["long 0-15"]
    assert pick(shards[:16], replace(wanted(), max_shards=15)) is None


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [shard("a", 2, 3), shard("b", 8, 9)],
        [shard("a", 0, 7), shard("b", 8, 15, streams=4)],
        [shard("a", 0, 7), replace(shard("b", 8, 15), numerics_id="x")],
        [shard("a", 0, 7), shard("b", 8, 15, streams=4), replace(shard("c", 8, 15), model=ModelRef("e" * 64, "int4", "m"))],
    ],
    ids=["nowhere", "gaps", "no stream free", "other kernels", "no stream free, and other weights"],
)
def test_what_is_not_covered_is_no_matter_of_weights(shards: list[WarmShard]) -> None:
    request = replace(wanted(), numerics_id="n")
    assert pick(shards, request) is None
    assert other_weights(shards, request) is None


@pytest.mark.parametrize("change", [{"digest": "e" * 64}, {"weights": "int8"}, {"digest": ""}])
def test_other_weights_are_a_mismatch_only_where_nothing_else_covers(change: dict[str, str]) -> None:
    good, other = shard("a", 0, 7), shard("b", 8, 15, rate=99.0)
    other = replace(other, model=replace(other.model, **change))
    assert pick([good, other], wanted()) is None
    says = str(other_weights([good, other], wanted()))
    assert says.startswith("Layers 8-15 of m are loaded with other weights than dddddddddddd, int4: m:8-15 on b")
    assert route(pick([good, other, shard("c", 8, 15)], wanted())) == ["a 0-7", "c 8-15"]
    assert other_weights([good, other, shard("c", 8, 15)], wanted()) is None


def test_another_model_is_nobodys_mismatch() -> None:
    others = [replace(shard("a", 0, 15), model=ModelRef("e" * 64, "int4", "x"))]
    assert pick(others, wanted()) is None
    assert other_weights(others, wanted()) is None
    # The same weights under another name are the same weights.
    assert route(pick([replace(shard("a", 0, 15), model=ModelRef(DIGEST, "int4", "x"))], wanted())) == ["a 0-15"]


def test_only_what_is_loaded_counts() -> None:
    state = ShardState(LayerRange(0, 16), 4)
    offer = ModelOffer("m", Role.SHARD, "int4", digest=DIGEST, warm=True, numerics_id="n", shard=state, tokens_per_second=10.0)
    others = (replace(offer, warm=False), replace(offer, shard=None), replace(offer, role=Role.VERIFIER))
    card = NodeCard(NodeId("a"), 1, (), b"i", 120, 0, memory_total_bytes=1 << 30, models=(offer, *others))
    gone = replace(card, node_id=NodeId("b"), leaving=True)
    assert warm_shards([gone, card]) == [shard("a", 0, 15)]


def _spans() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, 11), st.integers(0, 11)).map(lambda ends: (min(ends), max(ends)))


shard_lists = st.lists(
    st.builds(
        lambda node, ends, queue, streams, rate: shard(node, *ends, queue=queue, streams=streams, rate=rate),
        st.sampled_from("abcdef"),
        _spans(),
        st.integers(0, 2),
        st.sampled_from([0, 1, 4]),
        st.sampled_from([0.0, 10.0]),
    ),
    max_size=8,
)


@given(st.data(), shard_lists, st.integers(1, 12))
def test_the_order_of_shards_is_nobodys_business(data: st.DataObject, shards: list[WarmShard], n_layers: int) -> None:
    other = data.draw(st.permutations(shards))
    assert pick(shards, wanted(n_layers)) == pick(other, wanted(n_layers))


@given(shard_lists, st.integers(1, 12), st.integers(1, 4))
def test_a_cover_has_no_gap_and_one_is_found_where_there_is_one(shards: list[WarmShard], n_layers: int, most: int) -> None:
    free = [each for each in shards if each.state.streams < 4]
    covered = {layer for each in free for layer in range(each.state.layers.start, each.state.layers.stop)}
    cover = pick(shards, replace(wanted(n_layers), max_shards=most))
    fewest = _fewest(free, n_layers)
    assert isinstance(cover, list) == (covered >= set(range(n_layers)) and fewest <= most)
    if isinstance(cover, list):
        layers = [layer for part in cover for layer in range(part.layers.start, part.layers.stop)]
        assert layers == list(range(n_layers))
        assert all(_runs(part, part.layers.start, shards) for part in cover)
        assert all(_runs(part, part.layers.stop - 1, shards) for part in cover)


@given(shard_lists, st.integers(1, 12))
def test_equal_queues_need_no_more_shards_than_there_must_be(shards: list[WarmShard], n_layers: int) -> None:
    equal = [replace(each, state=replace(each.state, queue_depth=1)) for each in shards]
    cover = pick(equal, wanted(n_layers))
    if isinstance(cover, list):
        assert len(cover) == _fewest([each for each in equal if each.state.streams < 4], n_layers)


def _runs(part: LayerSpan, layer: int, shards: Sequence[WarmShard]) -> bool:
    return any(shard.node_id == part.node_id and layer in shard.state.layers for shard in shards)


def _fewest(shards: Sequence[WarmShard], n_layers: int) -> int:
    """By trying every set."""
    for count in range(1, len(shards) + 1):
        for some in itertools.combinations(shards, count):
            if {layer for each in some for layer in range(each.state.layers.start, each.state.layers.stop)} >= set(range(n_layers)):
                return count
    return 99
