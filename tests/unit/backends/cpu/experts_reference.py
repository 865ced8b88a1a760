"""`docs/internals/arithmetic.md`, Experts, in plain NumPy: which a row goes through, their shares, and the sum of what they give.

Shapes: E experts, K of them a row, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.unit.backends.cpu.arithmetic import Float32, fma
from tests.unit.backends.cpu.rows_reference import exp2


def choose(logits_E: Float32, k: int, *, normed: bool) -> tuple[list[int], Float32]:
    """Experts in order, and their shares."""
    above = [e for e in range(len(logits_E)) if logits_E[e] > -np.inf]
    below = [e for e in range(len(logits_E)) if e not in above]
    chosen = sorted([*sorted(above, key=lambda e: (-logits_E[e], e)), *below][:k])
    top = np.float32(max((logits_E[e] for e in above), default=-np.inf))
    with np.errstate(invalid="ignore"):
        weights = exp2((logits_E - top) * np.float32(1.44269504))
        total = np.float32(0)
        for e in chosen if normed else range(len(logits_E)):
            total += weights[e]
        return chosen, weights[chosen] / total


def mix(given_KD: Float32, chosen: Sequence[int], shares_K: Float32, experts: int) -> Float32:
    """What the experts of a row give, put together."""
    n = min(16, experts)
    sums = np.zeros((16, given_KD.shape[1]), np.float32)
    for given_D, e, share in zip(given_KD, chosen, shares_K, strict=True):
        segment = next(s for s in range(n) if s * experts // n <= e < (s + 1) * experts // n)
        sums[segment] = fma(np.full_like(given_D, share), given_D, sums[segment])
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    return sums[0]
