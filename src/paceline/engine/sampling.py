"""Draws tokens from logits: the definition in NumPy, as docs/internals/arithmetic.md has it under Sampling, and what a faster one must be equal to.

Law: a row's token is a function of its logits, its sequence's parameters, seed and position, and of nothing beside it. A draw is a
Gumbel-max: the token of the largest `logit / temperature + noise` wins, and noise belongs to (seed, position, token). It is found
as an exponential race, the least `log(E) - logit / temperature` with `E = -log(1 - v)`.

Shapes: R rows, V vocabulary, C candidates.

What drawing a sequence's tokens needs to remember from token to token: its parameters, seed, and the logits that are adjusted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DrawFailed, FormFailed
from paceline.core.generation import SamplingParams, TokenLogprob
from paceline.engine.arithmetic import WEIGHT_BITS, AdjustedTokens, Adjustments, adjust, log, log_of, noise_key, token_noise, weights
from paceline.engine.matcher import Mask, Matcher

TOO_COMPLEX = "The answer ends before its form does: the form grew beyond what can be followed"
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: their draws could not differ, but their division overflows."""
_LEAST_MIN_P = 1e-300
"""Shares below this are no number that has a plain logarithm; they keep every token."""


class DrawState:
    """Parameters of one sequence in the form samplers use, and what adjusts its logits."""

    __slots__ = ("adjustments", "greedy", "inverse_temperature", "log_min_p", "matcher", "params", "seed")

    def __init__(
        self, params: SamplingParams, seed: int, prompt_ids: Collection[int], banned: Iterable[int] = (), matcher: Matcher | None = None
    ) -> None:
        """Begin with a prompt.

        Args:
            params: within the ranges of `core.generation`.
            seed: of the sequence's noise; counts modulo 2**64.
            banned: tokens that are never drawn.
            matcher: of the form that the answer must have.
        """
        self.params, self.matcher = params, matcher
        self.seed = seed
        self.greedy = params.temperature < GREEDY_BELOW
        self.inverse_temperature = np.float32(1.0 if self.greedy else 1.0 / params.temperature)
        self.log_min_p = np.float32(log_of(max(params.min_p, _LEAST_MIN_P))) if params.min_p > 0 else np.float32(-math.inf)
        self.adjustments = Adjustments(params, prompt_ids, banned)

    def count(self, token_id: int) -> None:
        self.adjustments.count(token_id)
        if self.matcher is not None:
            self.matcher.take(token_id)

    def row(self, logits_row: int, position: int, guessed: Sequence[int] = ()) -> DrawRow:
        """One draw.

        Args:
            logits_row: which row of a batch's logits.
            guessed: tokens in front of it that are not counted yet; the draw counts only if they come true.
        """
        adjustments = self.adjustments
        tokens = adjustments.after(guessed) if guessed and adjustments.grow else adjustments.now
        return DrawRow(logits_row, self, position, tokens, None if self.matcher is None else self.matcher.mask(guessed))


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A draw that is wanted: from which row of the logits, and of what."""

    logits_row: int
    state: DrawState
    position: int
    adjusted: AdjustedTokens
    mask: Mask | None = None
    """Tokens that may be drawn; None: all."""


logger = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and its log probability if that was asked for."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler(Protocol):
    """Draws rows. Implementations draw the same tokens, bit for bit."""

    def draw(self, logits_RV: Float32, rows: Sequence[DrawRow]) -> list[Drawn | DrawFailed]:
        """Draw one token a row.

        Args:
            logits_RV: of a batch. Columns beyond the vocabulary are ignored. May be written to, but is as it was in the end.

        Returns:
            What each row gave: a failure where it holds NaN, its largest logit is infinite, or no token is left.
        """
        ...


class PlainSampler:
    """The definition: a pass over the vocabulary for each thing that is done."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def draw(self, logits_RV: Float32, rows: Sequence[DrawRow]) -> list[Drawn | DrawFailed]:
        return [self._draw(logits_RV[row.logits_row, : self._vocab], row) for row in rows]

    def _draw(self, raw_V: Float32, row: DrawRow) -> Drawn | DrawFailed:
        state = row.state
        x_V = raw_V.copy()
        adjust(x_V, state.params, row.adjusted)
        top = x_V.max()
        if not (math.isfinite(raw_V.max()) and math.isfinite(top)):
            return undrawable(row)
        token = int(x_V.argmax())
        if not state.greedy:
            z_V = (x_V - top) * state.inverse_temperature
            ids_C = kept(x_V, z_V, state)
            if not len(ids_C):
                return undrawable(row)
            token = int(ids_C[_race(ids_C, z_V[ids_C], noise_key(state.seed, row.position))])
        n_top = state.params.logprobs
        return Drawn(token, None if n_top is None else _token_logprob(raw_V, token, n_top))


def draw_each(sampler: Sampler, logits_RV: Float32, rows: Sequence[DrawRow]) -> list[Drawn | DrawFailed]:
    """Draw rows, each for itself where drawing them together raises: a draw that raises is the failure of its row alone."""
    try:
        return sampler.draw(logits_RV, rows)
    except Exception as error:
        logger.exception("a draw of %d rows failed", len(rows))
        if len(rows) == 1:
            return [DrawFailed(f"Drawing a token failed: {type(error).__name__}: {error}", "Tell the developers.")]
        return [draw_each(sampler, logits_RV, [row])[0] for row in rows]


def undrawable(row: DrawRow) -> DrawFailed:
    """The failure of a row without a token."""
    matcher = row.state.matcher
    if matcher is not None and matcher.error is not None:
        return FormFailed(TOO_COMPLEX, "Ask for a simpler form.")
    return DrawFailed(
        f"No token can be drawn for position {row.position}: the model's logits are not finite, or every token is ruled out",
        "Ask again; if it comes back, the model's file or a machine it runs on is damaged.",
    )


def kept(x_V: Float32, z_V: Float32, state: DrawState) -> Ids:
    """Tokens that top-k, top-p and min-p leave, in this order; the lower id goes before where logits are equal.

    Args:
        x_V: adjusted logits.
        z_V: less the largest, by temperature.
    """
    order = np.argsort(-x_V, kind="stable")
    params = state.params
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        sums_C = np.cumsum(weights(z_V[order]))
        total = int(sums_C[-1])
        order = order[: int(np.searchsorted(sums_C, min(total, max(1, math.ceil(params.top_p * total))))) + 1]
    return np.sort(order[z_V[order] >= state.log_min_p])


def top_ids(x_V: Float32, k: int) -> Ids:
    """Ids of the k largest values, largest first; of equal ones the lower id first."""
    return np.argsort(-x_V, kind="stable")[:k]


def _race(ids_C: Ids, z_C: Float32, key: tuple[np.uint32, np.uint32]) -> int:
    """Index of the winner."""
    bits_C = token_noise(ids_C.astype(np.uint32), key)
    e_C = -log(1.0 - (bits_C.astype(np.float64) + 0.5) * 2.0**-32)
    return int((log(e_C) - z_C).argmin())


def _token_logprob(raw_V: Float32, token: int, n_top: int) -> TokenLogprob:
    top = raw_V.max()
    log_total = log_of(float(weights(raw_V - top).sum()) * 2.0**-WEIGHT_BITS)
    of = lambda i: float(raw_V[i]) - float(top) - log_total  # noqa: E731
    return TokenLogprob(token, of(token), tuple((i, of(i)) for i in top_ids(raw_V, n_top).tolist()))
