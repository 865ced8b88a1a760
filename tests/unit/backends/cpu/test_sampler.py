"""The compiled sampler draws what the plain one draws, bit for bit, whatever the logits, the parameters, the batch and the threads."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from paceline.backends import cpu
from paceline.core.errors import DrawFailed
from paceline.core.generation import SamplingParams
from paceline.engine.sampling import Drawn, DrawState, PlainSampler, Sampler
from paceline.store.home import Home

LARGE = 151_936


@pytest.fixture(scope="module")
def compiled(paceline_home: object) -> Iterator[Sampler]:
    sampler = cpu.load_sampler(LARGE, 3, Home.from_environment().kernels)
    yield sampler
    sampler.close()


def said(drawn: Sequence[Drawn | DrawFailed]) -> list[object]:
    return [str(one) if isinstance(one, DrawFailed) else one for one in drawn]


def check(compiled: Sampler, logits_RV: np.ndarray, states: Sequence[DrawState], position: int = 5) -> list[object]:
    """Both draw the same, twice over, and leave the logits as they were."""
    before = logits_RV.copy()
    rows = [state.row(row, position + row) for row, state in enumerate(states)]
    plain = said(PlainSampler(LARGE).draw(logits_RV, rows))
    assert said(compiled.draw(logits_RV, rows)) == plain
    assert np.array_equal(logits_RV, before, equal_nan=True)
    return plain


SPECIAL = (-math.inf, -0.0, 0.0, 1.0, 1.0 + 2**-23, 1e-45, -3e38, 3e38, math.inf, math.nan, -math.nan)

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.1e-5, 1e-3, 0.7, 1.0, 2.0]) | st.floats(0, 2),
    top_k=st.sampled_from([0, 0, 1, 2, 20, 64, 1000, (1 << 31) - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-9, 0.8, 0.95, 1 - 2**-53]) | st.floats(0, 1),
    min_p=st.sampled_from([0.0, 0.0, 5e-324, 1e-30, 0.05, 1.0]) | st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 5e-324, 1e-40, 0.5, 1.1, 10.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, 40), st.floats(-100, 100, width=32), max_size=4),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 20]),
)


@st.composite
def logits(draw: st.DrawFn) -> np.ndarray:
    """A row that is random, flat, peaked or full of ties, with special values strewn in."""
    n = draw(st.sampled_from([1, 2, 63, 64, 65, 127, 500, 4096, 5001]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["random", "flat", "peaked", "ties", "far"]))
    spread = draw(st.sampled_from([1e-6, 0.5, 3.0, 20.0, 1e4]))
    row_V = (rng.standard_normal(n) * spread).astype(np.float32)
    if kind == "flat":
        row_V[:] = row_V[0]
    elif kind == "peaked":
        row_V[rng.integers(0, n, 3)] += np.float32(8 * spread)
    elif kind == "ties":
        row_V = np.round(row_V)
    elif kind == "far":
        row_V[rng.random(n) < 0.9] = -np.inf
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        row_V[rng.integers(0, n)] = value
    return row_V


@given(st.lists(st.tuples(params, st.integers(0, 1 << 64)), min_size=1, max_size=4), logits(), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_draws_are_those_of_the_definition(
    compiled: Sampler, cases: list[tuple[SamplingParams, int]], row_V: np.ndarray, data: st.DataObject
) -> None:
    n = len(row_V)
    ids = st.lists(st.integers(0, n - 1), max_size=12)
    states: list[DrawState] = []
    for given_params, seed in cases:
        bias = {token: value for token, value in given_params.logit_bias.items() if token < n}
        fields = {name: getattr(given_params, name) for name in SamplingParams.__slots__} | {"logit_bias": bias}
        state = DrawState(SamplingParams(**fields), seed, data.draw(ids), banned=data.draw(st.lists(st.integers(0, n - 1), max_size=2)))
        for token in data.draw(ids):
            state.count(token)
        states.append(state)
    with np.errstate(all="ignore"):
        check(compiled, np.tile(row_V, (len(states), 1)), states, data.draw(st.integers(0, 1 << 40)))


@pytest.mark.parametrize("n", [LARGE, LARGE - 1, 49_152, 128_256])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.5, 9.0])
def test_large_vocabularies(compiled: Sampler, n: int, spread: float) -> None:
    modes: list[dict[str, float]] = [
        {},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"top_p": 0.95, "logprobs": 20},
        {"top_k": 5000, "min_p": 0.01},
        {"top_k": n - 1, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.1e-5},
    ]
    logits_RV = (np.random.default_rng(n).standard_normal((len(modes), n)) * spread).astype(np.float32)
    states = [DrawState(SamplingParams(**mode), seed, range(0, n, 7), banned=[3]) for seed, mode in enumerate(modes)]  # type: ignore[arg-type]
    assert not any(isinstance(one, str) for one in check(compiled, logits_RV, states))


def test_rows_of_any_layout_and_order(compiled: Sampler) -> None:
    """A view of a wider array, rows in another order, one row twice, float64: the same draws."""
    wide = np.random.default_rng(1).standard_normal((6, 700)).astype(np.float32)
    states = [DrawState(SamplingParams(), seed, ()) for seed in range(4)]
    rows = [state.row(row, 9) for state, row in zip(states, (5, 0, 3, 3), strict=True)]
    right = said(PlainSampler(LARGE).draw(wide[:, :650], rows))
    assert said(compiled.draw(wide[:, :650], rows)) == right
    assert said(compiled.draw(wide[:, :650].astype(np.float64), rows)) == right
    assert said(compiled.draw(np.asfortranarray(wide[:, :650]), rows)) == right


def test_threads_change_nothing_and_end(compiled: Sampler) -> None:
    n, many = 40_000, 48
    logits_RV = (np.random.default_rng(2).standard_normal((many, n)) * 3).astype(np.float32)
    modes = ({}, {"top_p": 0.9}, {"top_k": 50, "logprobs": 2}, {"temperature": 0.0})
    states = [DrawState(SamplingParams(**modes[row % 4]), row, ()) for row in range(many)]  # type: ignore[arg-type]
    before = threading.active_count()
    alone, crowd = cpu.load_sampler(n, 1, None), cpu.load_sampler(n, 5, None)
    assert threading.active_count() == before + 4
    rows = [state.row(row, 77) for row, state in enumerate(states)]
    right = said(alone.draw(logits_RV, rows))
    for _ in range(50):
        assert said(crowd.draw(logits_RV, rows)) == right
    alone.close()
    crowd.close()
    crowd.close()
    assert threading.active_count() == before


def test_tokens_beyond_the_row_are_left_alone(compiled: Sampler) -> None:
    state = DrawState(SamplingParams(logit_bias={90: 5.0}, repetition_penalty=1.5), 1, (1, 99), banned=[80])
    (drawn,) = compiled.draw(np.zeros((1, 70), np.float32), [state.row(0, 3)])
    assert isinstance(drawn, Drawn)


def test_logits_are_not_kept_beyond_their_draw(compiled: Sampler) -> None:
    logits_RV = np.zeros((2, LARGE), np.float32)
    compiled.draw(logits_RV, [DrawState(SamplingParams(temperature=0.0), 1, ()).row(row, 5) for row in range(2)])
    kept = weakref.ref(logits_RV)
    del logits_RV
    assert kept() is None
