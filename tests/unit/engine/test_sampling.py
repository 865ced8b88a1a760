"""Draws: distributions, filters against plain references, penalties, logprobs, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.generation import SamplingParams
from paceline.engine.draw_state import DrawState
from paceline.engine.noise import noise_key, token_noise
from paceline.engine.sampling import Sampler, top_ids

V = 200


def logits(seed: int, rows: int = 1, vocab: int = V, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def state(seed: int = 1, prompt: tuple[int, ...] = (), bans_eos: bool = False, **params: object) -> DrawState:
    return DrawState(SamplingParams(**params), seed, prompt, bans_eos=bans_eos)  # type: ignore[arg-type]


def draw(row_V: np.ndarray, one: DrawState, position: int = 0, vocab: int = V) -> int | None:
    return Sampler(vocab, frozenset({0})).draw(row_V[None].copy(), [one], [position])[0][0]


def reference_noise(ids: np.ndarray, seed: int, position: int) -> np.ndarray:
    """The race's finishing times, -log(1 - v), in plain float64."""
    bits = token_noise(ids.astype(np.uint32), noise_key(seed, position), np.empty(len(ids), np.uint32), np.empty(len(ids), np.uint32))
    return -np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32)


def reference_kept(row_V: np.ndarray, params: SamplingParams) -> set[int]:
    """The textbook filters, over a full sort in float64."""
    z = row_V.astype(np.float64) / params.temperature
    order = np.argsort(-z, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    p = np.exp(z[order] - z[order[0]])
    p /= p.sum()
    n = 1 + int((np.cumsum(p)[:-1] < params.top_p).sum())
    order, p = order[:n], p[:n]
    return {int(i) for i, q in zip(order, p, strict=True) if q >= params.min_p * p[0]}


class TestGreedy:
    def test_takes_the_largest_and_the_lower_id_of_equals(self) -> None:
        row = np.zeros(V, np.float32)
        assert draw(row, state(temperature=0)) == 0
        row[[7, 90]] = 3
        assert draw(row, state(temperature=0)) == 7

    def test_rows_agree_with_argmax_in_any_batch(self) -> None:
        rows = logits(3, 16)
        sampler = Sampler(V, frozenset())
        together, _ = sampler.draw(rows.copy(), [state(temperature=0)] * 16, range(16))
        assert together == rows.argmax(axis=1).tolist()
        mixed, _ = sampler.draw(rows.copy(), [state(temperature=0 if i % 2 else 1.0) for i in range(16)], range(16))
        assert mixed[1::2] == together[1::2]

    def test_columns_beyond_the_vocabulary_are_never_drawn(self) -> None:
        row = np.zeros((1, V + 8), np.float32)
        row[0, V + 3], row[0, 5] = 9, 1
        assert Sampler(V, frozenset()).draw(row, [state(temperature=0)], [0])[0] == [5]


class TestBans:
    @pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0, "logprobs": 1}])
    def test_ignore_eos_masks_every_eos(self, params: dict[str, float]) -> None:
        row = np.full(V, -50, np.float32)
        row[[0, 9]] = 10
        row[4] = 1
        tokens, _ = Sampler(V, frozenset({0, 9})).draw(np.stack([row, row]), [state(bans_eos=True, **params), state(**params)], [5, 5])
        assert tokens[0] == 4
        assert tokens[1] in {0, 9}


class TestNoise:
    def test_depends_on_seed_position_and_token_and_nothing_else(self) -> None:
        ids = np.arange(V)
        base = reference_noise(ids, 5, 9)
        assert np.array_equal(base[30:40], reference_noise(ids[30:40], 5, 9))
        assert not np.array_equal(base, reference_noise(ids, 6, 9))
        assert not np.array_equal(base, reference_noise(ids, 5, 10))
        assert np.array_equal(reference_noise(ids, -1, 9), reference_noise(ids, (1 << 64) - 1, 9))

    def test_is_uniform_and_uncorrelated(self) -> None:
        n = 20_000
        ids, out, scratch = np.arange(n, dtype=np.uint32), np.empty(n, np.uint32), np.empty(n, np.uint32)
        v = np.stack([token_noise(ids, noise_key(3, p), out, scratch) * 2.0**-32 for p in range(8)])
        counts = np.stack([np.histogram(row, 20, (0, 1))[0] for row in v])
        chi_square = ((counts - n / 20) ** 2 / (n / 20)).sum(axis=1)
        assert chi_square.max() < 50  # 19 degrees of freedom: 50 has a chance of 1e-4
        assert np.abs(np.corrcoef(v) - np.eye(8)).max() < 0.04
        neighbours = [float(np.corrcoef(row[:-1], row[1:])[0, 1]) for row in v]
        assert max(map(abs, neighbours)) < 0.04


class TestDraws:
    @pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}])
    def test_follow_the_distribution(self, params: dict[str, float]) -> None:
        row, one, n = logits(11, vocab=40)[0], state(seed=77, temperature=1.3, **params), 8000
        sampler = Sampler(40, frozenset())
        drawn = [sampler.draw(row[None].copy(), [one], [position])[0][0] for position in range(n)]
        kept = np.array(sorted(reference_kept(row, one.params)))
        p = np.exp((row[kept] - row.max()).astype(np.float64) / 1.3)
        expected = n * p / p.sum()
        counts = np.array([drawn.count(int(i)) for i in kept])
        assert counts.sum() == n, "a token that was filtered out was drawn"
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < len(kept) + 4 * math.sqrt(2 * len(kept)) + 8

    @given(st.integers(0, 10_000), st.floats(0.05, 4), st.integers(0, 1 << 62), st.integers(0, 5000))
    @settings(max_examples=80, deadline=None)
    def test_pruned_race_equals_the_full_one(self, case: int, temperature: float, seed: int, position: int) -> None:
        row = logits(case, vocab=3000, spread=1 + case % 7)[0]
        z = (row - row.max()) * np.float32(1 / temperature)
        full = np.log(reference_noise(np.arange(3000), seed, position)) - z
        assert draw(row, state(seed=seed, temperature=temperature), position, 3000) == int(full.argmin())

    @given(st.integers(0, 10_000), st.integers(0, 80), st.floats(0.01, 1), st.floats(0, 0.5), st.floats(0.2, 2))
    @settings(max_examples=150, deadline=None)
    def test_only_what_the_filters_keep_is_drawn(self, case: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
        row = logits(case, spread=1 + case % 5)[0]
        params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
        # Kept by the reference with bounds a hair wider: float32 may put a token at the edge on either side.
        wide = reference_kept(row, SamplingParams(top_k=top_k, top_p=min(1, top_p + 1e-4), min_p=min_p * 0.9999, temperature=temperature))
        drawn = {draw(row, state(seed=s, **params)) for s in range(12)}
        assert drawn <= wide

    @given(st.integers(0, 1000), st.floats(0.02, 0.99))
    @settings(max_examples=60, deadline=None)
    def test_nucleus_is_found_at_every_cut(self, case: int, top_p: float) -> None:
        row = logits(case, spread=(0.01, 1, 4, 20)[case % 4])[0]
        z = row - row.max()
        kept = set(Sampler(V, frozenset())._nucleus(z, top_p).tolist())
        narrow, wide = (reference_kept(row, SamplingParams(top_p=p)) for p in (max(0.0, top_p - 1e-4), min(1.0, top_p + 1e-4)))
        assert narrow <= kept <= wide

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        rows = logits(5, 9)
        states = [
            state(seed=i, temperature=0.3 + i / 4, top_p=(1, 0.9, 0.5)[i % 3], top_k=(0, 20)[i % 2], logprobs=(None, 3)[i % 2])
            for i in range(9)
        ]
        sampler = Sampler(V, frozenset({0}))
        together, logprobs = sampler.draw(rows.copy(), states, range(9))
        for i in (8, 3, 0, 5):
            token, logprob = sampler.draw(rows[i : i + 1].copy(), [states[i]], [i])
            assert (token[0], logprob[0]) == (together[i], logprobs[i])

    def test_a_tiny_temperature_is_greedy(self) -> None:
        row = logits(2)[0]
        assert draw(row, state(temperature=1e-300)) == draw(row, state(temperature=1e-3)) == int(row.argmax())

    def test_close_distributions_mostly_draw_alike(self) -> None:
        """What drafts live on: noise belongs to tokens, so a draft's draw agrees as often as the distributions do."""
        row = logits(8)[0]
        other = row + logits(9, spread=0.05)[0]
        sampler = Sampler(V, frozenset())
        pairs = [[sampler.draw(x[None].copy(), [state(seed=4)], [p])[0][0] for x in (row, other)] for p in range(300)]
        assert sum(a == b for a, b in pairs) > 270


class TestBrokenLogits:
    @pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.5, "logprobs": 2}])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_give_no_token_and_spoil_no_neighbour(self, params: dict[str, float], value: float) -> None:
        rows = logits(1, 3)
        rows[1, 17] = value
        tokens, _ = Sampler(V, frozenset()).draw(rows, [state(**params)] * 3, [1, 2, 3])
        assert tokens[1] is None
        assert tokens[0] is not None
        assert tokens[2] is not None

    def test_nothing_but_minus_infinity_gives_no_token(self) -> None:
        assert draw(np.full(V, -np.inf, np.float32), state(temperature=0)) is None
        assert draw(np.full(V, -np.inf, np.float32), state(temperature=1)) is None


class TestAdjustments:
    @given(
        st.lists(st.integers(0, V - 1), max_size=20),
        st.lists(st.integers(0, V - 1), max_size=30),
        st.floats(0.5, 2),
        st.floats(-2, 2),
        st.floats(-2, 2),
        st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=5),
    )
    @settings(max_examples=60, deadline=None)
    def test_match_the_plain_reference(
        self, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float, bias: dict[int, float]
    ) -> None:
        row = logits(4)[0]
        one = state(
            prompt=tuple(prompt), repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
        )
        for token in output:
            one.count(token)
        expected = row.astype(np.float64)
        for token, value in bias.items():
            expected[token] += value
        for token in {*prompt, *output}:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        for token in {*output}:
            expected[token] -= presence + frequency * output.count(token)
        adjusted = row.copy()
        one.adjust(adjusted)
        np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-4)

    def test_a_bias_decides(self) -> None:
        assert draw(logits(1)[0], state(temperature=0, logit_bias={33: 100.0})) == 33

    @pytest.mark.parametrize("repetition", [5e-324, 1e-45, 1e-40, 1e-38, 1e-6, 10.0])
    @pytest.mark.parametrize("temperature", [0.0, 1.1e-5, 2.0])
    def test_no_penalty_makes_a_row_unsound(self, repetition: float, temperature: float) -> None:
        row = logits(5)[0]
        row[[3, 4]] = (0.0, -np.inf)
        ranks = {"top_k": 40, "top_p": 0.9} if temperature == 2.0 else {}
        one = state(
            prompt=tuple(range(50)), bans_eos=True, repetition_penalty=repetition, temperature=temperature, presence_penalty=-2.0, **ranks
        )
        one.count(60)
        token = draw(row, one)
        assert token not in {None, 0, 4}
        if repetition < 1e-3:  # what was there, and above zero, wins
            assert token in {*np.flatnonzero(row[:50] > 0), 60}


class TestLogprobs:
    def test_are_of_the_raw_logits(self) -> None:
        row = logits(6)[0]
        one = state(temperature=0.2, top_k=3, logit_bias={50: 100.0}, logprobs=4)
        _, (logprob,) = Sampler(V, frozenset()).draw(row[None].copy(), [one], [0])
        assert logprob is not None
        reference = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert logprob.token_id == 50
        assert logprob.logprob == pytest.approx(reference[50], abs=1e-4)
        assert [i for i, _ in logprob.top] == np.argsort(-row, kind="stable")[:4].tolist()
        assert [value for _, value in logprob.top] == pytest.approx(reference[[i for i, _ in logprob.top]].tolist(), abs=1e-4)

    def test_none_asked_none_given_and_zero_alternatives(self) -> None:
        _, logprobs = Sampler(V, frozenset()).draw(logits(6, 2), [state(), state(logprobs=0)], [0, 0])
        assert logprobs[0] is None
        assert logprobs[1] is not None
        assert logprobs[1].top == ()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_top_ids_breaks_ties_by_id(values: list[int], data: st.DataObject) -> None:
    x = np.array(values, np.float32)
    k = data.draw(st.integers(1, len(values)))
    assert top_ids(x, k).tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
