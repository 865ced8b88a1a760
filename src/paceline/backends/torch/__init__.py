"""Layers through torch: any CPU it runs on, and CUDA. Importing this package does not import torch: `load` does."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from paceline.backends.options import DeviceKind, LoadOptions, LoadProgress

if TYPE_CHECKING:
    from paceline.core.weights import WeightSource
    from paceline.engine.local import LayerRunner


def load(
    source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None, *, device: DeviceKind = DeviceKind.CPU
) -> LayerRunner[Any]:
    """Load a range of layers.

    Raises:
        ModelFileError: from the source.
        UnsupportedModel: a family or format that does not run there.
        ConfigError: what was asked for can't be.
        OutOfMemory: the KV pool does not fit.
    """
    from paceline.backends import kernel_cache

    # Before the modules that hold compiled functions.
    compiled = kernel_cache.use(options.kernel_cache)
    # They are compiled where they are first called, so the first load of all is alone.
    with nullcontext() if compiled else kernel_cache.alone():
        if device is DeviceKind.CUDA:
            import_cuda()
            from paceline.backends.torch.cuda import load_cuda

            runner: LayerRunner[Any] = load_cuda(source, options, progress)
        else:
            from paceline.backends.torch.loading import load_cpu

            runner = load_cpu(source, options, progress)
        kernel_cache.complete()
    return runner


def import_cuda() -> Any:
    """`torch.cuda`, with cuBLASLt for its products (`cuda.py` says why). torch reads the choice where it is imported, and warns of a later one."""
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    import torch

    return torch.cuda
