"""Draws tokens from logits.

Law: a row's token is a function of its logits, its sequence's parameters, seed and position, and of nothing beside it. A draw is a
Gumbel-max: the token of the largest `logit / temperature + noise` wins, and noise belongs to (seed, position, token). It is found
as an exponential race, `min(E / w)` with `E = -log(1 - v)`: since E >= v, every token with `v / w` above the best `E / w` has lost, and the
logarithms are taken of the few that are left. Pruning never changes a result.

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.generation import TokenLogprob
from paceline.engine.draw_state import DrawState
from paceline.engine.noise import noise_key, token_noise

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

_CUTS = (1e-2, 1e-4, 1e-7, 0.0)
"""Weights, relative to the largest, down to which a nucleus is looked for; the first that holds it saves sorting the rest."""
_SLACK = np.float32(1 - 1e-4)
"""Float32 pruning keeps this much more than it must: its rounding errors are 1000 times smaller."""


class Sampler:
    """Draws for all sequences of one engine. Keeps scratch rows: not for several threads."""

    def __init__(self, vocab: int, eos_ids: frozenset[int]) -> None:
        self._vocab = vocab
        self._eos = np.array(sorted(i for i in eos_ids if i < vocab), np.intp)
        self._ids_V = np.arange(vocab, dtype=np.uint32)
        self._noise_V = np.empty(vocab, np.uint32)
        self._bits_V = np.empty(vocab, np.uint32)
        self._z_V = np.empty(vocab, np.float32)
        self._w_V = np.empty(vocab, np.float32)

    def draw(
        self, logits_RV: Float32, states: Sequence[DrawState], positions: Sequence[int]
    ) -> tuple[list[int | None], list[TokenLogprob | None]]:
        """Draw one token a row.

        Args:
            logits_RV: finite or -inf; written to. Columns beyond the vocabulary are ignored.
            states: of the rows' sequences.
            positions: where the drawn tokens will stand; not looked at where all states are plain.

        Returns:
            Tokens (None where a row holds NaN, or its largest logit is infinite: the backend is broken), and log probabilities
            where asked for.
        """
        if logits_RV.shape[1] > self._vocab:
            logits_RV = logits_RV[:, : self._vocab]
        if all(state.plain for state in states):
            return self._largest(logits_RV, states), [None] * len(states)
        tokens: list[int | None] = []
        logprobs: list[TokenLogprob | None] = []
        for row_V, state, position in zip(logits_RV, states, positions, strict=True):
            raw_V = None if state.params.logprobs is None else row_V.copy()
            if state.bans_eos:
                row_V[self._eos] = -np.inf
            state.adjust(row_V)
            token = self._pick(row_V, state, position)
            tokens.append(token)
            logprobs.append(None if raw_V is None or token is None else _token_logprob(raw_V, token, state.params.logprobs or 0))
        return tokens, logprobs

    def _largest(self, logits_RV: Float32, states: Sequence[DrawState]) -> list[int | None]:
        banning = [row for row, state in enumerate(states) if state.bans_eos]
        if len(banning) == len(states):
            logits_RV[:, self._eos] = -np.inf
        elif banning:
            logits_RV[np.array(banning, np.intp)[:, None], self._eos] = -np.inf
        tokens: list[int] = logits_RV.argmax(axis=1).tolist()
        # A NaN counts as the largest, so the winner alone shows whether a row is sound.
        return [token if math.isfinite(logits_RV[row, token]) else None for row, token in enumerate(tokens)]

    def _pick(self, row_V: Float32, state: DrawState, position: int) -> int | None:
        top = row_V.max()
        if not math.isfinite(top):
            return None
        if state.greedy:
            return int(row_V.argmax())
        z_V = np.subtract(row_V, top, out=self._z_V[: len(row_V)])
        np.multiply(z_V, state.inverse_temperature, out=z_V)
        ids_C = self._candidates(z_V, state)
        return self._race_all(z_V, state.seed, position) if ids_C is None else self._race(ids_C, z_V, state.seed, position)

    def _candidates(self, z_V: Float32, state: DrawState) -> Ids | None:
        """Tokens that top-k, top-p and min-p leave, in this order; None for all of them. z: logits / temperature, less the largest."""
        top_k, top_p = state.params.top_k, state.params.top_p
        ids_C = top_ids(z_V, top_k) if 0 < top_k < len(z_V) else None
        if top_p < 1:
            ids_C = self._nucleus(z_V, top_p) if ids_C is None else _head(ids_C, np.exp(z_V[ids_C]), top_p, None)
        if state.log_min_p > -math.inf:
            ids_C = np.flatnonzero(z_V >= state.log_min_p) if ids_C is None else ids_C[z_V[ids_C] >= state.log_min_p]
        return ids_C

    def _nucleus(self, z_V: Float32, top_p: float) -> Ids:
        w_V = np.exp(z_V, out=self._w_V[: len(z_V)])
        total = float(w_V.sum())
        for cut in _CUTS:
            ids_C = np.flatnonzero(w_V >= cut)
            w_C = w_V[ids_C]
            if cut == 0.0 or float(w_C.sum(dtype=np.float64)) > top_p * total * (1 + 1e-9):
                order = np.argsort(-w_C, kind="stable")
                return _head(ids_C[order], w_C[order], top_p, total)
        raise AssertionError("the last cut keeps every token")

    def _race(self, ids_C: Ids, z_V: Float32, seed: int, position: int) -> int:
        n = len(ids_C)
        if n == 1:
            return int(ids_C[0])
        bits_C = token_noise(ids_C.astype(np.uint32), noise_key(seed, position), self._noise_V[:n], self._bits_V[:n])
        return int(ids_C[_finish(bits_C, z_V[ids_C])])

    def _race_all(self, z_V: Float32, seed: int, position: int) -> int:
        n = len(z_V)
        bits_V = token_noise(self._ids_V[:n], noise_key(seed, position), self._noise_V[:n], self._bits_V[:n])
        w_V = np.exp(z_V, out=self._w_V[:n])
        v_V = self._bits_V[:n].view(np.float32)
        np.add(bits_V, np.float32(0.5), out=v_V, dtype=np.float32, casting="unsafe")
        np.divide(w_V, v_V, out=w_V)  # now the inverse of v / w, without its division by zero
        best = int(w_V.argmax())
        finish = -math.log1p(-(float(bits_V[best]) + 0.5) * 2.0**-32) / math.exp(float(z_V[best])) * 2.0**32
        ids_C = np.flatnonzero(w_V >= np.float32(1 / finish) * _SLACK)
        return int(ids_C[_finish(bits_V[ids_C], z_V[ids_C])])


class Draws:
    """A batch's draws: at once where each row stands for itself; else when they are asked for, as a draw may depend on what was drawn before it."""

    def __init__(self, sampler: Sampler, logits_RV: Float32, states: Sequence[DrawState]) -> None:
        """Draw what can be drawn.

        Args:
            sampler: draws.
            logits_RV: see `Sampler.draw`.
            states: of each row's sequence.
        """
        self._sampler, self._logits_RV, self._states = sampler, logits_RV, states
        self._plain = sampler.draw(logits_RV, states, ())[0] if states and all(state.plain for state in states) else None

    def of(self, row: int, position: int) -> tuple[int | None, TokenLogprob | None]:
        """The token that a row draws, and its log probability if that was asked for. Once a row.

        Args:
            row: of the logits. All tokens before `position` are counted in its state.
            position: where the token will stand.
        """
        if self._plain is not None:
            return self._plain[row], None
        tokens, logprobs = self._sampler.draw(self._logits_RV[row : row + 1], self._states[row : row + 1], (position,))
        return tokens[0], logprobs[0]


def top_ids(x_V: Float32, k: int) -> Ids:
    """Ids of the k largest values, largest first; of equal ones the lower id first."""
    n = len(x_V)
    least = np.partition(x_V, n - k)[n - k]
    ids_C = np.flatnonzero(x_V >= least)
    return ids_C[np.argsort(-x_V[ids_C], kind="stable")][:k]


def _head(ids_C: Ids, w_C: Float32, top_p: float, total: float | None) -> Ids:
    """The fewest tokens, from the first on, whose weights sum to `top_p` of `total` (of their own sum, if None). At least one."""
    before_C = np.cumsum(w_C, dtype=np.float64)
    target = top_p * (before_C[-1] if total is None else total)
    return ids_C[: max(1, int(np.searchsorted(before_C, target)) + 1)]


def _finish(bits_C: npt.NDArray[np.uint32], z_C: Float32) -> int:
    """Index of the winner: the least of log E - z."""
    e_C: Float64 = -np.log1p((bits_C + 0.5) * -(2.0**-32))
    return int((np.log(e_C) - z_C).argmin())


def _token_logprob(raw_V: Float32, token: int, n_top: int) -> TokenLogprob:
    top = raw_V.max()
    log_sum = float(top) + math.log(float(np.exp(raw_V - top).sum()))
    alternatives = top_ids(raw_V, min(n_top, len(raw_V))).tolist() if n_top else []
    return TokenLogprob(token, float(raw_V[token]) - log_sum, tuple((i, float(raw_V[i]) - log_sum) for i in alternatives))
