"""Layers in compiled Numba kernels, for x86 processors from AVX2 on and 64-bit ARM with the dot product: `Lowering` names the instructions they are made of.

Importing this package compiles nothing and imports no kernel: `load` does, once the kernel cache is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backends.cpu.support import refuses
from paceline.backends.instructions import (
    Lowering,
    lowering_in_use,
    lowerings_here,
    runs_here,
    use_lowering,
)
from paceline.backends.memory import available_bytes, check_kv, give_memory_back
from paceline.backends.options import LoadOptions, LoadProgress

if TYPE_CHECKING:
    from paceline.backends.cpu.exchange import Exchange
    from paceline.backends.cpu.runner import CpuRunner
    from paceline.backends.cpu.sampler import CompiledSampler
    from paceline.core.weights import WeightSource

__all__ = [
    "Lowering",
    "compiled",
    "load",
    "load_sampler",
    "lowering_in_use",
    "lowerings_here",
    "prepare",
    "refuses",
    "runs_here",
    "use_lowering",
]


def compiled(folder: Path) -> bool:
    """Return whether a cache folder holds the compiled kernels of this version."""
    from paceline.backends import kernel_cache

    return kernel_cache.known(folder)


def prepare(lowering: Lowering | None, kernels: Path | None) -> None:
    """Choose the instruction set of this process's kernels and their cache folder. Must be called before they are imported.

    Args:
        lowering: the instruction set; None: the one that the process uses.
        kernels: folder for compiled kernels; None: next to their sources.

    Raises:
        ConfigError: this process uses kernels of another instruction set.
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
        lowering: the instruction set; None: the one that the process uses.
        exchange: shared memory of the tensor group that this rank belongs to; only the rank's share is loaded. Only the first rank has an embedding,
            and only it and ranks that prove theirs have a numerics id. None: this machine runs the layers alone.

    Raises:
        ConfigError: this process uses kernels of another instruction set.
        ModelFileError, UnsupportedModel: the source can't be read, or the kernels do not run the model.
        OutOfMemory: the KV pool does not fit.
    """
    from paceline.backends import kernel_cache

    prepare(lowering, options.kernel_cache)
    from paceline.backends.cpu.ahead import compiling_ahead
    from paceline.backends.cpu.kernels import kernels_of
    from paceline.backends.cpu.padding import Padded, padded
    from paceline.backends.cpu.sizes import BLOCK, NEIGHBOURS
    from paceline.backends.holding import forms_by, held_bytes, matrices, part_bytes
    from paceline.core.weights import EMBEDDING

    width = source.spec.hidden
    if padded(source.spec) is not source.spec:
        source = Padded(source)
    form_of = forms_by(options.weights, source.type_of)
    share = None if exchange is None else exchange.shares[exchange.rank]
    spec = source.spec if share is None else share.of(source.spec)
    weights = part_bytes(held_bytes(spec, form_of), options.layers, edges=options.edges)
    kv_blocks = -(-options.n_blocks // NEIGHBOURS) * NEIGHBOURS
    kv_token_bytes, free = spec.kv_bytes_per_token(options.layers), available_bytes() - weights
    check_kv(kv_blocks * BLOCK, kv_token_bytes, free)
    forms = {form_of(name) for name in matrices(source.spec)}
    needed = kernels_of(forms, form_of(EMBEDDING) if options.edges else None, mixture=spec.moe is not None, draws=options.edges)
    room = free - kv_blocks * BLOCK * kv_token_bytes
    with compiling_ahead(needed, options.threads, room, lowering or lowering_in_use() or Lowering.AVX2) as ahead:
        # Imported once the other processes run.
        from paceline.backends.cpu.pack import packer
        from paceline.backends.cpu.probe import numerics_id
        from paceline.backends.cpu.runner import CpuRunner
        from paceline.backends.cpu.weights import pack_model

        ahead.wait(packers=True)
        with kernel_cache.alone(wait=False):  # the load may wait for these, not for all kernels of another process
            for form in forms:
                packer(form)
        model = pack_model(source, options.layers, form_of, edges=options.edges, threads=options.threads, progress=progress, share=share)
        ahead.wait()
    # The other kernels are compiled after all bytes are read: their compiling shows no progress, and a pause is expected there.
    with kernel_cache.alone():
        # The id is that of the whole model, so stages with other layers of it have the same one.
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
