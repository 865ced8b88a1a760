"""Frequencies of the rotary position embedding, and tables for the backends that turn by table. Shapes: C positions, I = head_dim / 2 frequencies."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.core.model import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> npt.NDArray[np.float64]:
    """Radians a position, float64 [I]. Llama 3 scaling as in Meta's release (`rope_type: llama3`)."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim) / rope.linear_factor
    if rope.llama3 is None:
        return plain
    factor, low, high, original = rope.llama3
    wavelength = 2 * math.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def rope_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin) of every position and frequency, float32 [C, I], computed in float64."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
