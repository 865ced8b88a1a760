"""Tables of the rotary position embedding, shared by the backends that turn by table.

Shapes: C positions, I = head_dim / 2 frequencies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.core.model import RopeSpec
from paceline.core.rope import inverse_frequencies

Float32 = npt.NDArray[np.float32]


def rope_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Float32, Float32]:
    """(cos, sin) of every position and frequency, float32 [C, I], computed in float64."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
