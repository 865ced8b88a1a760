"""Memory that loading took for a moment goes back to the system."""

from __future__ import annotations

import ctypes
import gc


def give_memory_back() -> None:
    """Free what is unused and ask the C library to return it: glibc keeps freed blocks of up to 32 MiB for itself otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
