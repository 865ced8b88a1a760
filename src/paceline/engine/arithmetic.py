"""The arithmetic of draws, in NumPy. docs/internals/arithmetic.md, Sampling, is its definition.

Every operation is an IEEE add, subtract, multiply, divide or floor, each rounded separately, or is on integers. So compiled kernels and all processors compute
the same bits. Sums are over integers, so that their order does not matter.

Noise is a function of (seed, position, token id), so a draw does not depend on other draws. A 64-bit key is mixed from seed and position, and each token id is
hashed under it. A draft, a replay or another batch gets the same noise for the same position; two tokens of one position never share theirs (the hash is a
permutation). Sources: splitmix64 (Steele, Lea, Flood 2014) for keys; "lowbias32" (C. Wellons, hash-prospector) for tokens.

Adjustments change the logits of single tokens before a draw, in this order: bias (minus infinity bans the token); the repetition penalty, for tokens of prompt
and answer, which scales as in transformers; presence and frequency penalty, for tokens of the answer, which subtract as OpenAI documents them. All is in
float32, each operation rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.generation import SamplingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LOG2E = float(np.float32(1.4426950408889634))
EXP2 = (1.8671305e-3, 9.0170288e-3, 5.5799913e-2, 2.4016444e-1, 6.9315130e-1, 1.0)
"""Coefficients of 2**r on [0, 1), highest power first; relative error 2e-7 in float32."""
WEIGHT_BITS = 40
"""Bits of the largest weight, 2**40: the sum over a vocabulary of 2**23 tokens does not overflow."""
WEIGHTLESS = -42.0
"""Power of two at and below which weights are zero."""
LN2 = 0.6931471805599453
ROOT_HALF = 0x3FE6A09E667F3BCD
"""Bits of the square root of 1/2, float64."""
LOG_SERIES = tuple(1 / odd for odd in range(21, 0, -2))
"""Coefficients of atanh(s) / s, highest power of s * s first."""


def weights(z: Float32) -> Int64:
    """Return exp(z) * 2**40 as integers, rounded half to even, for z <= 0; relative error 5e-6 at most."""
    t = np.maximum(z * np.float32(LOG2E), np.float32(WEIGHTLESS))
    whole = np.floor(t)
    rest = t - whole
    p = np.full_like(rest, EXP2[0])
    for coefficient in EXP2[1:]:
        p = p * rest + np.float32(coefficient)
    return np.rint(np.ldexp(p.astype(np.float64), whole.astype(np.int32) + WEIGHT_BITS)).astype(np.int64)


def log(x: Float64) -> Float64:
    """Return the natural logarithm of positive normal numbers, within 4 units in the last place."""
    bits = x.view(np.int64)
    exponent = (bits - ROOT_HALF) >> 52
    m = (bits - (exponent << 52)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = np.full_like(s, LOG_SERIES[0])
    for coefficient in LOG_SERIES[1:]:
        series = series * square + coefficient
    return exponent * LN2 + 2.0 * s * series


def log_of(x: float) -> float:
    """Return `log` of one number."""
    return float(log(np.array([x]))[0])


UInt32 = npt.NDArray[np.uint32]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise_key(seed: int, position: int) -> tuple[np.uint32, np.uint32]:
    """Return the noise key of one position. Any integer is a seed; it counts modulo 2**64."""
    key = _splitmix(_splitmix(seed & _MASK64) ^ (position * _GOLDEN & _MASK64))
    return np.uint32(key >> 32), np.uint32(key & 0xFFFFFFFF)


def token_noise(ids: UInt32, key: tuple[np.uint32, np.uint32]) -> UInt32:
    """Return 32 random bits for each token.

    Args:
        key: the position's, from `noise_key`.
    """
    x = ids ^ key[0]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15)) ^ key[1]) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _splitmix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.float32(1e30))
"""Limit up to which a repetition penalty near zero raises logits. It lies beyond any model's logits and is finite when divided by any temperature."""


@dataclass(frozen=True, slots=True)
class AdjustedTokens:
    """Adjustments of A distinct tokens, by column."""

    ids_A: npt.NDArray[np.int32]
    bias_A: Float32
    seen_A: npt.NDArray[np.bool_]
    """The repetition penalty applies to the token."""
    count_A: Float32
    """How often the token was drawn, where that is counted."""

    def __len__(self) -> int:
        return len(self.ids_A)


_NONE = AdjustedTokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_), np.empty(0, np.float32))


class Adjustments:
    """The logit adjustments of one sequence. A token is added in constant time, so that a long prompt is read only once."""

    __slots__ = ("_bias", "_counts", "_ids", "_n", "_place", "_repeats", "_seen", "_subtracts")

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int], banned: Iterable[int]) -> None:
        self._repeats = params.repetition_penalty != 1
        self._subtracts = params.presence_penalty != 0 or params.frequency_penalty != 0
        bias = dict(params.logit_bias) | dict.fromkeys(banned, -math.inf)
        tokens = dict.fromkeys(bias) | (dict.fromkeys(prompt_ids) if self._repeats else {})
        self._place = {token: place for place, token in enumerate(tokens)}
        self._n = len(tokens)
        self._ids = np.fromiter(tokens, np.int32, self._n)
        self._bias = np.zeros(self._n, np.float32)
        self._bias[: len(bias)] = list(bias.values())
        self._seen = np.zeros(self._n, np.bool_)
        if self._repeats:
            self._seen[[self._place[token] for token in {*prompt_ids}]] = True
        self._counts = np.zeros(self._n, np.float32)

    @property
    def grow(self) -> bool:
        """True if a draw depends on the tokens drawn before it."""
        return self._repeats or self._subtracts

    @property
    def now(self) -> AdjustedTokens:
        """The adjustments as views, valid until the next token is counted."""
        n = self._n
        if not n:
            return _NONE
        return AdjustedTokens(self._ids[:n], self._bias[:n], self._seen[:n], self._counts[:n])

    def count(self, token: int) -> None:
        """Count a drawn token."""
        if not self.grow:
            return
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._n
            self._reserve(self._n + 1)
            self._n += 1
            self._ids[place] = token
        self._seen[place] = self._repeats
        self._counts[place] += self._subtracts

    def after(self, tokens: Iterable[int]) -> AdjustedTokens:
        """Return the adjustments as they would be after these tokens, as a copy."""
        fork = copy(self)
        fork.detach()
        for token in tokens:
            fork.count(token)
        return fork.now

    def detach(self) -> None:
        """Replace the arrays shared with the object this was copied from by copies."""
        self._place = dict(self._place)
        self._ids, self._bias = self._ids.copy(), self._bias.copy()
        self._seen, self._counts = self._seen.copy(), self._counts.copy()

    def _reserve(self, n: int) -> None:
        if n > len(self._ids):
            more = 64 + len(self._ids)
            self._ids, self._bias = np.pad(self._ids, (0, more)), np.pad(self._bias, (0, more))
            self._seen, self._counts = np.pad(self._seen, (0, more)), np.pad(self._counts, (0, more))


def adjust(row_V: Float32, params: SamplingParams, tokens: AdjustedTokens) -> None:
    """Adjust the logits of a row in place."""
    if not len(tokens):
        return
    ids_A = tokens.ids_A
    logits = row_V[ids_A] + tokens.bias_A
    penalty = np.maximum(np.float32(params.repetition_penalty), np.float32(TINY))
    scaled = np.where(logits > 0, np.minimum(logits, np.float32(HUGE) * penalty) / penalty, logits * penalty)
    logits = np.where(tokens.seen_A, scaled, logits)
    subtracted = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * tokens.count_A
    row_V[ids_A] = np.where(tokens.count_A > 0, logits - subtracted, logits)
