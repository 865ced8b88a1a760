"""Memory for kernels: zeroed, and starting on a cache line. NumPy asks for large pages where an array is large."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CACHE_LINE = 64


def aligned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that start on a cache line."""
    raw = np.zeros(n_bytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n_bytes]
