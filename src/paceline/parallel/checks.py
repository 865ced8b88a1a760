"""Whether rows that another machine sent can be activations at all. Shapes: T rows, D hidden."""

from __future__ import annotations

import numpy as np

from paceline.core.errors import ShardCorrupt
from paceline.engine.local import WireBits

LARGEST = 0x477F
"""The bits of the largest bf16 below 2^16, which fp16 could still carry. Residuals of real models stay far below; infinities and NaN are above."""


def check_activations(x_TD: WireBits, n_rows: int, width: int) -> None:
    """Refuse what can't be rows of a residual.

    Args:
        x_TD: bits of bf16.

    Raises:
        ShardCorrupt: another shape, or values that are not finite, or far too large.
    """
    if x_TD.shape != (n_rows, width):
        raise ShardCorrupt(f"Activations of shape {x_TD.shape} came where ({n_rows}, {width}) was due")
    if x_TD.size and int(np.bitwise_and(x_TD, 0x7FFF).max()) > LARGEST:
        raise ShardCorrupt("Activations came that are not finite, or beyond 2^16")
