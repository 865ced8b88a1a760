"""Converts rows of GGML's blocks to float32: one compiled function for each type, without the interpreter's lock.

Shapes: N rows, K weights of a row, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.backends.ggml import k_quants, plain

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

_PLAIN: Final[Mapping[str, Callable[[Bytes, Float32], None]]] = {
    "Q4_0": plain.q4_0, "Q4_1": plain.q4_1, "Q5_0": plain.q5_0, "Q5_1": plain.q5_1, "Q8_0": plain.q8_0,
    "Q2_K": k_quants.q2_k, "Q3_K": k_quants.q3_k, "Q4_K": k_quants.q4_k, "Q5_K": k_quants.q5_k, "Q6_K": k_quants.q6_k,
    "IQ4_NL": plain.iq4_nl, "IQ4_XS": plain.iq4_xs, "MXFP4": plain.mxfp4, "NVFP4": plain.nvfp4,
    "TQ1_0": plain.tq1_0, "TQ2_0": plain.tq2_0,
}  # fmt: skip
_ON_GRID: Final[Mapping[str, Callable[[Bytes, Float32, Float32, Bytes], None]]] = {
    "IQ2_XXS": k_quants.iq2_xxs, "IQ2_XS": k_quants.iq2_xs, "IQ2_S": k_quants.iq2_s, "IQ3_XXS": k_quants.iq3_xxs,
    "IQ3_S": k_quants.iq3_s, "IQ1_S": k_quants.iq1_s, "IQ1_M": k_quants.iq1_m,
}  # fmt: skip

TYPES: Final = frozenset({*_PLAIN, *_ON_GRID})
"""GGML's names of the types that can be dequantised."""


def dequantise(type_name: str, rows_NB: Bytes, out_NK: Float32) -> None:
    """Write the values of rows of one type to `out_NK`."""
    if type_name in _PLAIN:
        _PLAIN[type_name](rows_NB, out_NK)
    else:
        _ON_GRID[type_name](rows_NB, out_NK, *_grid(type_name))


@cache
def _grid(type_name: str) -> tuple[Float32, Bytes]:
    """Return the grid points that a type's codes stand for, float32 [points, weights of a point], and the signs by their index, uint8 [128]."""
    from gguf import quants

    kind: Any = getattr(quants, type_name)
    kind.init_grid()
    grid = np.ascontiguousarray(kind.grid, np.float32).reshape(kind.grid_shape)
    return grid, np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8).copy()
