"""Draws: distributions, filters against plain references, penalties, logprobs, and independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from paceline.core.errors import DrawFailed
from paceline.core.generation import SamplingParams, TokenLogprob
from paceline.engine.arithmetic import adjust, log, noise_key, token_noise, weights
from paceline.engine.sampling import Drawn, DrawState, PlainSampler, draw_each, kept, top_ids

V = 200


def logits(seed: int, rows: int = 1, vocab: int = V, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def state(seed: int = 1, prompt: tuple[int, ...] = (), banned: tuple[int, ...] = (), **params: object) -> DrawState:
    return DrawState(SamplingParams(**params), seed, prompt, banned)  # type: ignore[arg-type]


def draw_rows(rows_RV: np.ndarray, states: Sequence[DrawState], positions: Sequence[int], vocab: int = V) -> list[int | None]:
    """Tokens; None where there is none."""
    rows = [one.row(row, position) for row, (one, position) in enumerate(zip(states, positions, strict=True))]
    return [drawn.token if isinstance(drawn, Drawn) else None for drawn in PlainSampler(vocab).draw(rows_RV, rows)]


def draw(row_V: np.ndarray, one: DrawState, position: int = 0, vocab: int = V) -> int | None:
    return draw_rows(row_V[None], [one], [position], vocab)[0]


def logprob_of(row_V: np.ndarray, one: DrawState) -> TokenLogprob | None:
    (drawn,) = PlainSampler(V).draw(row_V[None], [one.row(0, 0)])
    assert isinstance(drawn, Drawn)
    return drawn.logprob


def reference_noise(ids: np.ndarray, seed: int, position: int) -> np.ndarray:
    """The race's finishing times, -log(1 - v), in plain float64."""
    bits = token_noise(ids.astype(np.uint32), noise_key(seed, position))
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
        together = draw_rows(rows, [state(temperature=0)] * 16, range(16))
        assert together == rows.argmax(axis=1).tolist()
        mixed = draw_rows(rows, [state(temperature=0 if i % 2 else 1.0) for i in range(16)], range(16))
        assert mixed[1::2] == together[1::2]

    def test_columns_beyond_the_vocabulary_are_never_drawn(self) -> None:
        row = np.zeros((1, V + 8), np.float32)
        row[0, V + 3], row[0, 5] = 9, 1
        assert draw_rows(row, [state(temperature=0)], [0]) == [5]


class TestBans:
    @pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0, "logprobs": 1}])
    def test_what_is_banned_is_not_drawn(self, params: dict[str, float]) -> None:
        row = np.full(V, -50, np.float32)
        row[[0, 9]] = 10
        row[4] = 1
        tokens = draw_rows(np.stack([row, row]), [state(banned=(0, 9), **params), state(**params)], [5, 5])
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
        ids = np.arange(n, dtype=np.uint32)
        v = np.stack([token_noise(ids, noise_key(3, p)) * 2.0**-32 for p in range(8)])
        counts = np.stack([np.histogram(row, 20, (0, 1))[0] for row in v])
        chi_square = ((counts - n / 20) ** 2 / (n / 20)).sum(axis=1)
        assert chi_square.max() < 50  # 19 degrees of freedom: 50 has a chance of 1e-4
        assert np.abs(np.corrcoef(v) - np.eye(8)).max() < 0.04
        neighbours = [float(np.corrcoef(row[:-1], row[1:])[0, 1]) for row in v]
        assert max(map(abs, neighbours)) < 0.04


class TestDraws:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}])
    def test_follow_the_distribution(self, params: dict[str, float]) -> None:
        row, one, n = logits(11, vocab=40)[0], state(seed=77, temperature=1.3, **params), 8000
        drawn = [draw(row, one, position, 40) for position in range(n)]
        kept = np.array(sorted(reference_kept(row, one.params)))
        p = np.exp((row[kept] - row.max()).astype(np.float64) / 1.3)
        expected = n * p / p.sum()
        counts = np.array([drawn.count(int(i)) for i in kept])
        assert counts.sum() == n, "a token that was filtered out was drawn"
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < len(kept) + 4 * math.sqrt(2 * len(kept)) + 8

    @given(st.integers(0, 10_000), st.floats(0.05, 4), st.integers(0, 1 << 62), st.integers(0, 5000))
    @settings(max_examples=examples(80), deadline=None)
    def test_the_race_is_won_by_the_least_time(self, case: int, temperature: float, seed: int, position: int) -> None:
        row = logits(case, vocab=3000, spread=1 + case % 7)[0]
        z = (row - row.max()) * np.float32(1 / temperature)
        full = np.log(reference_noise(np.arange(3000), seed, position)) - z
        assert draw(row, state(seed=seed, temperature=temperature), position, 3000) == int(full.argmin())

    @given(st.integers(0, 10_000), st.integers(0, 80), st.floats(0.01, 1), st.floats(0, 0.5), st.floats(0.2, 2))
    @settings(max_examples=examples(150), deadline=None)
    def test_only_what_the_filters_keep_is_drawn(self, case: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
        row = logits(case, spread=1 + case % 5)[0]
        params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
        # Kept by the reference with bounds a hair wider: float32 may put a token at the edge on either side.
        wide = reference_kept(row, SamplingParams(top_k=top_k, top_p=min(1, top_p + 1e-4), min_p=min_p * 0.9999, temperature=temperature))
        drawn = {draw(row, state(seed=s, **params)) for s in range(12)}
        assert drawn <= wide

    @given(st.integers(0, 1000), st.floats(0.02, 0.99))
    @settings(max_examples=examples(60), deadline=None)
    def test_a_nucleus_is_the_textbook_s(self, case: int, top_p: float) -> None:
        row = logits(case, spread=(0.01, 1, 4, 20)[case % 4])[0]
        found = set(kept(row, row - row.max(), state(top_p=top_p)).tolist())
        narrow, wide = (reference_kept(row, SamplingParams(top_p=p)) for p in (max(0.0, top_p - 1e-4), min(1.0, top_p + 1e-4)))
        assert narrow <= found <= wide

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        rows = logits(5, 9)
        states = [
            state(seed=i, temperature=0.3 + i / 4, top_p=(1, 0.9, 0.5)[i % 3], top_k=(0, 20)[i % 2], logprobs=(None, 3)[i % 2])
            for i in range(9)
        ]
        sampler = PlainSampler(V)
        together = sampler.draw(rows, [one.row(i, i) for i, one in enumerate(states)])
        for i in (8, 3, 0, 5):
            assert sampler.draw(rows[i : i + 1], [states[i].row(0, i)]) == [together[i]]

    def test_a_tiny_temperature_is_greedy(self) -> None:
        row = logits(2)[0]
        assert draw(row, state(temperature=1e-300)) == draw(row, state(temperature=1e-3)) == int(row.argmax())

    def test_close_distributions_mostly_draw_alike(self) -> None:
        """What drafts live on: noise belongs to tokens, so a draft's draw agrees as often as the distributions do."""
        row = logits(8)[0]
        other = row + logits(9, spread=0.05)[0]
        pairs = [[draw(x, state(seed=4), p) for x in (row, other)] for p in range(300)]
        assert sum(a == b for a, b in pairs) > 270


class TestBrokenLogits:
    @pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.5, "logprobs": 2}])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_give_no_token_and_spoil_no_neighbour(self, params: dict[str, float], value: float) -> None:
        rows = logits(1, 3)
        rows[1, 17] = value
        tokens = draw_rows(rows, [state(**params)] * 3, [1, 2, 3])
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
    @settings(max_examples=examples(60), deadline=None)
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
        adjust(adjusted, one.params, one.row(0, 0).adjusted)
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
            prompt=tuple(range(50)), banned=(0,), repetition_penalty=repetition, temperature=temperature, presence_penalty=-2.0, **ranks
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
        logprob = logprob_of(row, one)
        assert logprob is not None
        reference = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert logprob.token_id == 50
        assert logprob.logprob == pytest.approx(reference[50], abs=1e-4)
        assert [i for i, _ in logprob.top] == np.argsort(-row, kind="stable")[:4].tolist()
        assert [value for _, value in logprob.top] == pytest.approx(reference[[i for i, _ in logprob.top]].tolist(), abs=1e-4)

    def test_none_asked_none_given_and_zero_alternatives(self) -> None:
        assert logprob_of(logits(6)[0], state()) is None
        logprob = logprob_of(logits(6)[0], state(logprobs=0))
        assert logprob is not None
        assert logprob.top == ()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_top_ids_breaks_ties_by_id(values: list[int], data: st.DataObject) -> None:
    x = np.array(values, np.float32)
    k = data.draw(st.integers(1, len(values)))
    assert top_ids(x, k).tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


class TestArithmetic:
    @given(st.floats(2.0**-1022, 2.0**1000))
    def test_logarithms_are_right(self, x: float) -> None:
        assert float(log(np.array([x]))[0]) == pytest.approx(math.log(x), rel=1e-15, abs=1e-300)

    def test_logarithms_next_to_one_are_right(self) -> None:
        x = 1.0 - np.array([1.0, 3.0, 1001.0]) * 2.0**-33
        assert log(x).tolist() == pytest.approx([math.log1p(v) for v in (x - 1.0).tolist()], rel=1e-15)

    def test_weights_are_exponentials_and_nothing_far_below(self) -> None:
        z = np.linspace(-27, 0, 20_001, dtype=np.float32)
        assert np.abs(weights(z) - np.exp(z.astype(np.float64)) * 2.0**40).max() < 2.0**40 * 5e-7
        relative = weights(z[-2000:]) / (np.exp(z[-2000:].astype(np.float64)) * 2.0**40)
        assert np.abs(relative - 1).max() < 5e-7
        assert weights(np.array([0, -40, -1e30, -np.inf], np.float32)).tolist() == [1 << 40, 0, 0, 0]


class TestGuesses:
    @pytest.mark.parametrize(
        "params", [{"presence_penalty": 1.5}, {"frequency_penalty": -0.7}, {"repetition_penalty": 1.4}, {"top_p": 0.9}]
    )
    def test_count_in_the_draws_behind_them_and_nowhere_else(self, params: dict[str, float]) -> None:
        """A row behind guessed tokens is drawn as it would be once they were drawn."""
        row, guessed = logits(12)[0], (7, 3, 7, 190)
        ahead, later = state(prompt=(3, 9), **params), state(prompt=(3, 9), **params)
        before = ahead.row(0, 10).adjusted.count_A.copy()
        rows = [ahead.row(0, 10 + n, guessed[:n]) for n in range(5)]
        at_once = [PlainSampler(V).draw(row[None], [one])[0] for one in rows]
        assert np.array_equal(ahead.row(0, 10).adjusted.count_A, before)
        for n in range(5):
            assert PlainSampler(V).draw(row[None], [later.row(0, 10 + n)]) == [at_once[n]]
            if n < 4:
                later.count(guessed[n])


class TestFailures:
    def test_a_draw_that_raises_fails_alone(self) -> None:
        """The logits are narrower than a token that is biased: drawing the batch raises."""
        rows = logits(3, 3)
        states = [state(temperature=0), state(temperature=0, logit_bias={V + 5: 1.0}), state(temperature=0)]
        drawn = draw_each(PlainSampler(V + 10), rows, [one.row(i, 4) for i, one in enumerate(states)])
        assert [one.token if isinstance(one, Drawn) else None for one in drawn] == [int(rows[0].argmax()), None, int(rows[2].argmax())]
        assert isinstance(drawn[1], DrawFailed)
        assert "IndexError" in drawn[1].message

    def test_nothing_left_is_a_failure(self) -> None:
        """What no range lets through: min_p above 1 keeps no token."""
        (drawn,) = PlainSampler(V).draw(logits(3), [state(min_p=1.5).row(0, 4)])
        assert isinstance(drawn, DrawFailed)
        assert "position 4" in drawn.message
