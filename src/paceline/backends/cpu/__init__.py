"""Layers in compiled Numba kernels, for x86 processors from AVX2 on and 64-bit ARM with the dot product: `Lowering` names the instructions they are made of.

Importing this package compiles nothing and imports no kernel: `load` does, once the kernel cache is known.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backends.memory import available_bytes, check_kv, give_memory_back
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.errors import ConfigError
from paceline.core.model import ModelSpec, rotary_dims

if TYPE_CHECKING:
    from paceline.backends.cpu.exchange import Exchange
    from paceline.backends.cpu.runner import CpuRunner
    from paceline.backends.cpu.sampler import CompiledSampler
    from paceline.core.weights import WeightSource

MOST_HEAD_DIM = 256
"""What attention's scratch has room for."""
MOST_EXPERTS = 512
"""What a product's scratch has room for: the logits of a panel's router."""


class Lowering(StrEnum):
    """Instructions that the kernels are made of, the fastest first. All compute the same bytes."""

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
"""LLVM's names of features of ARM; macOS's names of them; and on Linux, which word of the auxiliary vector has them (AT_HWCAP, AT_HWCAP2), and its bit."""
_chosen: Lowering | None = None


def is_arm() -> bool:
    return platform.machine() in {"aarch64", "arm64"}


@cache
def features() -> frozenset[str]:
    """What this processor has, under LLVM's names; of ARM's, what kernels ask for."""
    if is_arm():
        return _features_of_arm()
    from llvmlite import binding

    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def _features_of_arm() -> frozenset[str]:
    """As the system says: LLVM does not know every processor."""
    system = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return frozenset(feature for feature, (name, *_) in _ARM.items() if _has(system, f"hw.optional.arm.FEAT_{name}"))
    system.getauxval.restype = ctypes.c_ulong
    return frozenset(feature for feature, (_, kind, bit) in _ARM.items() if system.getauxval(ctypes.c_ulong(kind)) >> bit & 1)


def _has(system: ctypes.CDLL, name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    return system.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0 and value.value == 1


def compiled_for() -> str | None:
    """What kernels are compiled for, beside what LLVM knows of the processor by its name, as Numba takes it. None: LLVM knows all."""
    return ",".join(f"+{feature}" for feature in sorted(features())) if is_arm() else None


@cache
def lowerings_here() -> tuple[Lowering, ...]:
    """Those whose instructions this processor has, the fastest first."""
    here = features()
    return tuple(lowering for lowering, needed in _FEATURES.items() if here.issuperset(needed))


def runs_here() -> bool:
    """Whether this processor has the instructions of any lowering."""
    return bool(lowerings_here())


def lowering_in_use() -> Lowering | None:
    """What this process's kernels are made of; None: this processor has the instructions of none."""
    return _chosen or next(iter(lowerings_here()), None)


def use_lowering(lowering: Lowering) -> None:
    """Choose what this process's kernels are made of; before the first of them is imported.

    Raises:
        ConfigError: kernels of another are in use.
    """
    global _chosen  # noqa: PLW0603 - one a process, as kernels are
    if lowering is not lowering_in_use() and "paceline.backends.cpu.lowering" in sys.modules:
        raise ConfigError(
            f"--device cpu-{lowering} can't be used: this process runs kernels of {lowering_in_use()}", "Start another process for it."
        )
    _chosen = lowering


def compiled(folder: Path) -> bool:
    """Whether the kernels of this version lie compiled in a cache folder."""
    from paceline.backends import kernel_cache

    return kernel_cache.known(folder)


def refuses(spec: ModelSpec) -> str | None:
    """Why these kernels can't run a model; None where they can."""
    from paceline.backends.cpu.padding import padded

    spec = padded(spec)
    if spec.moe is not None and spec.moe.n_experts > MOST_EXPERTS:
        return f"layers of {spec.moe.n_experts} experts have no compiled kernels"
    if spec.head_dim > MOST_HEAD_DIM:
        return f"heads of {spec.head_dim} have no compiled kernels"
    if (rotary := rotary_dims(spec.rope, spec.head_dim)) % 32:
        return f"heads of which {rotary} dimensions turn have no compiled kernels"
    sizes = {"hidden": spec.hidden, "head_dim": spec.head_dim}
    if (low := spec.low) is not None:
        sizes |= {"v_head_dim": low.value_dim, "q_lora_rank": low.queries, "kv_lora_rank": low.keys}
        if low.value_dim > spec.head_dim:  # what is mixed takes the place of its query
            return f"values of {low.value_dim} beside keys of {spec.head_dim} have no compiled kernels"
    normed = ", and the norms of its heads leave no room for more" if spec.qk_norm else ""
    return next((f"{name} is not a multiple of 32{normed}" for name, size in sizes.items() if size % 32), None)


def prepare(lowering: Lowering | None, kernels: Path | None) -> None:
    """Decide what this process's kernels are made of and where they are kept, before they are imported; arguments as `load` has them.

    Raises:
        ConfigError: it uses kernels of another lowering.
    """
    if lowering is not None:
        use_lowering(lowering)
    from paceline.backends import kernel_cache

    kernel_cache.use(kernels)


def load(
    source: WeightSource,
    options: LoadOptions,
    progress: LoadProgress | None = None,
    *,
    lowering: Lowering | None = None,
    exchange: Exchange | None = None,
) -> CpuRunner:
    """Load a range of layers.

    Args:
        lowering: to use; None: what the process uses.
        exchange: of a tensor group, of whose ranks this is one: its share is loaded. Only the first rank has an embedding, and a numerics id besides those that prove theirs. None: alone.

    Raises:
        ConfigError: this process uses kernels of another lowering.
        ModelFileError, UnsupportedModel: from the source.
        OutOfMemory: the KV pool does not fit.
    """
    from paceline.backends import kernel_cache

    prepare(lowering, options.kernel_cache)
    from paceline.backends.cpu.pack import packer
    from paceline.backends.cpu.padding import Padded, padded
    from paceline.backends.cpu.probe import numerics_id
    from paceline.backends.cpu.runner import CpuRunner
    from paceline.backends.cpu.sizes import BLOCK, NEIGHBOURS
    from paceline.backends.cpu.weights import pack_model
    from paceline.backends.holding import forms_by, held_bytes, matrices, part_bytes

    width = source.spec.hidden
    if padded(source.spec) is not source.spec:
        source = Padded(source)
    form_of = forms_by(options.weights, source.type_of)
    share = None if exchange is None else exchange.shares[exchange.rank]
    spec = source.spec if share is None else share.of(source.spec)
    weights = part_bytes(held_bytes(spec, form_of), options.layers, edges=options.edges)
    kv_blocks = -(-options.n_blocks // NEIGHBOURS) * NEIGHBOURS
    check_kv(kv_blocks * BLOCK, spec.kv_bytes_per_token(options.layers), available_bytes() - weights)
    forms = {form_of(name) for name in matrices(source.spec)}
    with kernel_cache.alone(wait=False):  # who waits for bytes has patience for these, not for all that another process compiles
        for form in forms:
            packer(form)
    model = pack_model(source, options.layers, form_of, edges=options.edges, threads=options.threads, progress=progress, share=share)
    # The rest behind all bytes: compiling shows no progress, and who waits for a load has patience with it there.
    with kernel_cache.alone():
        # Of the whole model: stages that hold other layers of it have the same id.
        identity = numerics_id(source.spec, forms, options.threads) if exchange is None or exchange.rank == 0 or exchange.proves else ""
        runner = CpuRunner(
            model,
            n_blocks=options.n_blocks,
            threads=options.threads,
            numerics_id=identity,
            max_rows=options.max_rows,
            width=width,
            exchange=exchange,
        )
        kernel_cache.complete()
    give_memory_back()
    return runner


def load_sampler(vocab: int, threads: int, kernels: Path | None) -> CompiledSampler:
    """A sampler in kernels that every processor runs.

    Args:
        threads: that share a batch's rows, the caller's included.
        kernels: where compiled kernels are kept; None: beside their sources.
    """
    from paceline.backends import kernel_cache

    kernel_cache.use(kernels)
    with kernel_cache.alone():
        from paceline.backends.cpu.sampler import CompiledSampler

        sampler = CompiledSampler(vocab, threads)
        kernel_cache.complete()
    return sampler
