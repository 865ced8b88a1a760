"""Draws tokens from logits: the definition in NumPy, as docs/arithmetic.md has it under Sampling, and what a faster one must be equal to.

Law: a row's token is a function of its logits, its sequence's parameters, seed and position, and of nothing beside it. A draw is a
Gumbel-max: the token of the largest `logit / temperature + noise` wins, and noise belongs to (seed, position, token). It is found
as an exponential race, the least `log(E) - logit / temperature` with `E = -log(1 - v)`.

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DrawFailed
from paceline.core.generation import TokenLogprob
from paceline.engine.adjustments import adjust
from paceline.engine.arithmetic import WEIGHT_BITS, log, log_of, noise_key, token_noise, weights
from paceline.engine.draw_state import DrawRow, DrawState

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
        return DrawFailed(f"The answer's form can't be followed any further: {matcher.error}", "Ask for a simpler form.")
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
