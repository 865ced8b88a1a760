"""Instruction sets of the compiled kernels, and the ones that this processor has."""

from __future__ import annotations

import ctypes
import platform
import sys
from enum import StrEnum
from functools import cache

from paceline.core.errors import ConfigError


class Lowering(StrEnum):
    """An instruction set that kernels are compiled to, the fastest first. All compute the same bytes."""

    AVX512_BF16 = "avx512bf16"
    AVX512_VNNI = "avx512vnni"
    AVX_VNNI = "avxvnni"
    AVX2 = "avx2"
    NEON_I8MM = "neon-i8mm"
    NEON = "neon"


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
_FEATURES = {
    Lowering.AVX512_BF16: (*_AVX512, "avx512bf16"),
    Lowering.AVX512_VNNI: _AVX512,
    Lowering.AVX_VNNI: (*_AVX2, "avxvnni"),
    Lowering.AVX2: _AVX2,
    Lowering.NEON_I8MM: ("dotprod", "i8mm"),
    Lowering.NEON: ("dotprod",),
}
_ARM = {"dotprod": ("DotProd", 16, 20), "i8mm": ("I8MM", 26, 13), "lse": ("LSE", 16, 8)}
"""ARM features by LLVM's name: macOS's name, and on Linux the word of the auxiliary vector (16: AT_HWCAP, 26: AT_HWCAP2) and the bit in it."""
_chosen: Lowering | None = None


def is_arm() -> bool:
    return platform.machine() in {"aarch64", "arm64"}


@cache
def features() -> frozenset[str]:
    """Return this processor's features under LLVM's names; on ARM only those that kernels may use."""
    if is_arm():
        return _features_of_arm()
    from llvmlite import binding

    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def _features_of_arm() -> frozenset[str]:
    """Return the ARM features that the operating system reports, because LLVM does not know every processor."""
    system = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return frozenset(feature for feature, (name, *_) in _ARM.items() if _has(system, f"hw.optional.arm.FEAT_{name}"))
    system.getauxval.restype = ctypes.c_ulong
    return frozenset(feature for feature, (_, kind, bit) in _ARM.items() if system.getauxval(ctypes.c_ulong(kind)) >> bit & 1)


def _has(system: ctypes.CDLL, name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    return system.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0 and value.value == 1


def compiled_for() -> str | None:
    """Return the features that kernels are compiled for in addition to those that LLVM knows by the processor's name, in Numba's notation.

    None: LLVM knows all of them.
    """
    return ",".join(f"+{feature}" for feature in sorted(features())) if is_arm() else None


@cache
def lowerings_here() -> tuple[Lowering, ...]:
    """Return the instruction sets that this processor has, the fastest first."""
    here = features()
    return tuple(lowering for lowering, needed in _FEATURES.items() if here.issuperset(needed))


def runs_here() -> bool:
    """Return whether this processor can run compiled kernels at all."""
    return bool(lowerings_here())


def lowering_in_use() -> Lowering | None:
    """Return the instruction set of this process's kernels: the chosen one, or the fastest here. None: this processor has none of them."""
    return _chosen or next(iter(lowerings_here()), None)


def use_lowering(lowering: Lowering) -> None:
    """Choose the instruction set of this process's kernels. Must be called before the first kernel is imported.

    Raises:
        ConfigError: kernels of another instruction set are in use.
    """
    global _chosen  # noqa: PLW0603 - one a process, as kernels are
    if lowering is not lowering_in_use() and "paceline.backends.cpu.lowering" in sys.modules:
        raise ConfigError(
            f"--device cpu-{lowering} can't be used: this process runs kernels of {lowering_in_use()}", "Start another process for it."
        )
    _chosen = lowering
