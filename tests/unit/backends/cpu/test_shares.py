"""Shares of ranks: every head, activation and output is somebody's, and partial sums become the sum of one machine, in its order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.cpu.shares import covered, deal, joins, segment_bounds, subtrees, undivided, whole
from paceline.core.model import LowRank, ModelSpec, MoeSpec, RopeSpec

SMOL = ModelSpec("llama", 30, 576, 9, 3, 64, 1536, 49_152, 8192, 1e-5, RopeSpec(1e4), tied_head=True)
LLAMA_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 1e-5, RopeSpec(5e5), tied_head=False)


def tree(terms: list[str]) -> str:
    """How docs/internals/arithmetic.md adds segments: neighbours of a level make the next level, an odd last one passes up."""
    while len(terms) > 1:
        pairs = [f"({left}+{right})" for left, right in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(terms) - 1 :] if len(terms) % 2 else pairs
    return terms[0]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[range]]:
    segments = draw(st.integers(1, 16))
    cuts = sorted(draw(st.lists(st.integers(0, segments), max_size=6)))
    return segments, [range(*pair) for pair in pairwise([0, *cuts, segments])]


@given(splits())
def test_partial_sums_are_added_as_one_machine_adds_segments(split: tuple[int, list[range]]) -> None:
    segments, owned = split
    found = joins(owned, segments)
    sums = {i: tree([str(segment) for segment in node]) for i, node in enumerate(found.nodes)}
    last = 0
    for left, right, place in found.steps:
        last = len(found.nodes) + place
        sums[last] = f"({sums[left]}+{sums[right]})"
    assert sums[last] == tree([str(segment) for segment in range(segments)])
    assert all(place < segments.bit_length() for *_, place in found.steps)


@given(splits())
def test_each_rank_hands_on_whole_subtrees_and_few(split: tuple[int, list[range]]) -> None:
    segments, owned = split
    for part in owned:
        found = subtrees(part, segments)
        assert [segment for node in found for segment in node] == list(part)
        assert len(found) <= 2 * segments.bit_length()


@pytest.mark.parametrize("spec", [SMOL, LLAMA_8B])
@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_everything_is_one_ranks(spec: ModelSpec, speeds: list[float]) -> None:
    shares = deal(spec, speeds)
    for field, end in (("kv_heads", spec.n_kv_heads), ("out", min(16, spec.n_kv_heads)), ("down", 16), ("vocab", -(-spec.vocab // 16))):
        parts: list[range] = [getattr(share, field) for share in shares]
        assert [parts[0].start, *(part.stop for part in parts)] == [*(part.start for part in parts), end], field
    assert sum(share.of(spec).ffn for share in shares) == spec.ffn
    assert sum(share.of(spec).n_heads for share in shares) == spec.n_heads


def test_no_split_ends_sooner() -> None:
    """Against all splits of sixteen segments over three ranks."""
    for speeds in ((1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (5.0, 2.0, 1.0)):
        shares = deal(LLAMA_8B, speeds)
        longest = max(len(share.down) / speed for share, speed in zip(shares, speeds, strict=True))
        best = min(max(a / speeds[0], b / speeds[1], (16 - a - b) / speeds[2]) for a in range(17) for b in range(17 - a))
        assert longest == pytest.approx(best)


def test_three_heads_over_two_and_five_ranks() -> None:
    assert [len(share.kv_heads) for share in deal(SMOL, (1, 1))] == [2, 1]
    five = deal(SMOL, (1, 1, 1, 1, 1))
    assert sorted(len(share.kv_heads) for share in five) == [0, 0, 1, 1, 1]
    assert min(len(share.down) for share in five) == 3


def test_the_share_of_one_machine_is_the_model() -> None:
    assert whole(SMOL).of(SMOL) == SMOL
    assert segment_bounds(3) == (0, 1, 2, 3)


def test_the_first_rank_has_outputs_at_any_speed() -> None:
    """With the first of them goes the embedding."""
    shares = deal(SMOL, (0.01, 100.0, 100.0))
    assert [share.vocab.start == 0 for share in shares] == [True, False, False]


def test_superblocks_are_held_whole() -> None:
    assert covered(range(896, 1792), 3584) == range(768, 1792)
    assert covered(range(192, 384), 576) == range(192, 384)
    assert covered(range(300, 300), 3584) == range(300, 300)


@pytest.mark.parametrize("speeds", [(), (1.0, 0.0), (-1.0,)])
def test_ranks_have_speeds(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ranks of speeds"):
        deal(SMOL, speeds)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"qk_norm": True, "qk_norm_whole": True}, "normed over all heads"),
        ({"low": LowRank(768, 256, 64)}, "products of products"),
        ({"moe": MoeSpec(8, 2, 256, norm_topk=True)}, "mixtures of experts"),
    ],
)
def test_why_layers_can_t_be_shared_is_said(changes: dict[str, Any], why: str) -> None:
    assert undivided(SMOL) is None
    assert why in (undivided(replace(SMOL, **changes)) or "")
