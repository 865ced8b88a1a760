"""Noise as a function of (seed, position, token id), so that a draw does not depend on what else is drawn.

Counter-based: a 64-bit key is mixed from seed and position, and each token id is hashed under it. A draft, a replay or another
batch that asks for the same position gets the same noise; two tokens of one position never share theirs (the hash permutes).

Sources: splitmix64 (Steele, Lea, Flood 2014) for keys; "lowbias32" (C. Wellons, hash-prospector) for tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise_key(seed: int, position: int) -> tuple[np.uint32, np.uint32]:
    """The key of one position. Any integer is a seed; it counts modulo 2**64."""
    key = _splitmix(_splitmix(seed & _MASK64) ^ (position * _GOLDEN & _MASK64))
    return np.uint32(key >> 32), np.uint32(key & 0xFFFFFFFF)


def token_noise(ids: UInt32, key: tuple[np.uint32, np.uint32]) -> UInt32:
    """32 random bits a token.

    Args:
        ids: token ids.
        key: of the position, from `noise_key`.
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
