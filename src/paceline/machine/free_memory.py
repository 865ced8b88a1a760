"""How much memory the next load of a model may take: what is free, less what the process itself takes to load it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from paceline.backends import cpu
from paceline.backends.memory import MIB, available_bytes
from paceline.backends.table import Kernels
from paceline.machine import accelerator

LOAD_BYTES_A_THREAD: Final = 16 * MIB
"""A slab of rows as read, as float32 and as requantised (`backends.quantize.SLAB_WEIGHTS`)."""
FETCH_BYTES: Final = 48 * MIB
"""Of a host, while layers come from another machine: pieces, and what gRPC has of them. The C library keeps most of it."""
KERNELS_BYTES: Final = 110 * MIB
"""Numba, and kernels that lie compiled. Source: a process with 8 layers of a small model, before and after: some 105 MiB."""
COMPILER_BYTES: Final = 210 * MIB
"""The same where they must be compiled first."""
TORCH_BYTES: Final = 250 * MIB
"""Torch, and the compiled functions beside it."""


def free_bytes(kernels: Kernels, threads: int, kernel_cache: Path | None) -> int:
    """Bytes that weights, KV and working memory of the next load may take together.

    Args:
        kernels: that it is loaded into; for CUDA's it is the GPU's memory.
        threads: that load.
        kernel_cache: where compiled kernels are kept; None: beside their sources.
    """
    if kernels is Kernels.CUDA:
        return accelerator.free_cuda_bytes()
    return max(0, available_bytes() - load_bytes(kernels, threads, kernel_cache))


def load_bytes(kernels: Kernels, threads: int, kernel_cache: Path | None) -> int:
    """Bytes that the process itself takes while it loads a model next, of the machine's memory; arguments as `free_bytes`."""
    return _first_load_bytes(kernels, kernel_cache) + threads * LOAD_BYTES_A_THREAD


def _first_load_bytes(kernels: Kernels, kernel_cache: Path | None) -> int:
    """What this process takes once, with the first model that it loads."""
    if kernels is not Kernels.AVX512_BF16:
        return 0 if "torch" in sys.modules else TORCH_BYTES
    if "paceline.backends.cpu.runner" in sys.modules:
        return 0
    return KERNELS_BYTES if kernel_cache is not None and cpu.compiled(kernel_cache) else COMPILER_BYTES
