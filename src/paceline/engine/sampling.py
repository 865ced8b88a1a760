"""Draws tokens from logits: the definition in NumPy, as in docs/internals/arithmetic.md under Sampling. Faster samplers must give equal results.

Law: a row's token is a function of its logits, its sequence's parameters, seed and position, and of nothing else. A draw is a Gumbel-max: the token with the
largest `logit / temperature + noise` wins, and noise belongs to (seed, position, token). It is computed as an exponential race: the token with the least
`log(E) - logit / temperature` wins, with `E = -log(1 - v)`.

Shapes: R rows, V vocabulary, C candidates.

`DrawState` keeps a sequence's state from token to token: its parameters, seed, and the adjustments of its logits.
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
"""Values of min-p below this have no plain logarithm; they keep every token."""


class DrawState:
    """The sampling parameters of one sequence in the form samplers use, and the adjustments of its logits."""

    __slots__ = ("adjustments", "greedy", "inverse_temperature", "log_min_p", "matcher", "params", "seed")

    def __init__(
        self, params: SamplingParams, seed: int, prompt_ids: Collection[int], banned: Iterable[int] = (), matcher: Matcher | None = None
    ) -> None:
        """Start with a prompt.

        Args:
            params: within the ranges of `core.generation`.
            seed: seed of the sequence's noise; counts modulo 2**64.
            prompt_ids: tokens of the prompt, for the penalties.
            banned: tokens that are never drawn.
            matcher: follows the structured output that the answer must have.
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
        """Return the draw of one row.

        Args:
            logits_row: index of the row in a batch's logits.
            position: position of the token to draw.
            guessed: draft tokens before it that are not counted yet; the draw counts only if they are accepted.
        """
        adjustments = self.adjustments
        tokens = adjustments.after(guessed) if guessed and adjustments.grow else adjustments.now
        return DrawRow(logits_row, self, position, tokens, None if self.matcher is None else self.matcher.mask(guessed))


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A requested draw: the row of the logits, and the state to draw with."""

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
    """A drawn token, and its log probability if that was requested."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler(Protocol):
    """Draws tokens for rows. All implementations draw the same tokens, bit for bit."""

    def draw(self, logits_RV: Float32, rows: Sequence[DrawRow]) -> list[Drawn | DrawFailed]:
        """Draw one token for each row.

        Args:
            logits_RV: logits of a batch. Columns beyond the vocabulary are ignored. They may be written to, but are restored in the end.
            rows: the draws.

        Returns:
            The result of each row. It is a failure if the row holds NaN, its largest logit is infinite, or no token is left.
        """
        ...


class PlainSampler:
    """The definition of a draw: one pass over the vocabulary for each operation."""

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
    """Draw rows together, or separately if that raises. A row that raises on its own becomes that row's failure."""
    try:
        return sampler.draw(logits_RV, rows)
    except Exception as error:
        logger.exception("a draw of %d rows failed", len(rows))
        if len(rows) == 1:
            return [DrawFailed(f"Drawing a token failed: {type(error).__name__}: {error}", "Tell the developers.")]
        return [draw_each(sampler, logits_RV, [row])[0] for row in rows]


def undrawable(row: DrawRow) -> DrawFailed:
    """Return the failure of a row without a token."""
    matcher = row.state.matcher
    if matcher is not None and matcher.error is not None:
        return FormFailed(TOO_COMPLEX, "Ask for a simpler form.")
    return DrawFailed(
        f"No token can be drawn for position {row.position}: the model's logits are not finite, or every token is ruled out",
        "Ask again; if it comes back, the model's file or a machine it runs on is damaged.",
    )


def kept(x_V: Float32, z_V: Float32, state: DrawState) -> Ids:
    """Return the ids of the tokens that top-k, top-p and min-p leave, applied in this order. Among equal logits the lower id comes first.

    Args:
        x_V: adjusted logits.
        z_V: adjusted logits minus the largest, divided by the temperature.
        state: the parameters.
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
    """Return the ids of the k largest values, largest first; among equal values the lower id first."""
    return np.argsort(-x_V, kind="stable")[:k]


def _race(ids_C: Ids, z_C: Float32, key: tuple[np.uint32, np.uint32]) -> int:
    """Return the index of the winner."""
    bits_C = token_noise(ids_C.astype(np.uint32), key)
    e_C = -log(1.0 - (bits_C.astype(np.float64) + 0.5) * 2.0**-32)
    return int((log(e_C) - z_C).argmin())


def _token_logprob(raw_V: Float32, token: int, n_top: int) -> TokenLogprob:
    top = raw_V.max()
    log_total = log_of(float(weights(raw_V - top).sum()) * 2.0**-WEIGHT_BITS)
    of = lambda i: float(raw_V[i]) - float(top) - log_total  # noqa: E731
    return TokenLogprob(token, of(token), tuple((i, of(i)) for i in top_ids(raw_V, n_top).tolist()))
