"""Runs layers with torch: on any CPU that it supports, and on CUDA. Importing this package does not import torch; `load` does."""

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
        ModelFileError: the source can't be read.
        UnsupportedModel: torch does not run this family or format on the device.
        ConfigError: the options are impossible on the device.
        OutOfMemory: the KV pool does not fit.
    """
    from paceline.backends import kernel_cache

    # The cache is set up before modules with compiled functions are imported.
    compiled = kernel_cache.use(options.kernel_cache)
    # Functions are compiled at their first call, so the very first load must run alone.
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
    """Import and return `torch.cuda`, with cuBLASLt for its products (`cuda.py` says why). torch reads this setting at import, and warns of a later one."""
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    import torch

    return torch.cuda
