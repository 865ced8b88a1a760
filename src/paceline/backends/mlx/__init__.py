"""Runs layers with MLX and mlx-lm's models (ADR 30): on Metal on a Mac, elsewhere on processors. Importing this package does not import mlx; `load` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.backends import kernel_cache
from paceline.backends.options import LoadOptions, LoadProgress

if TYPE_CHECKING:
    from paceline.core.weights import WeightSource
    from paceline.engine.local import LayerRunner


def load(source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None) -> LayerRunner[Any]:
    """Load a range of layers.

    Raises:
        ModelFileError: the source can't be read.
        UnsupportedModel: MLX does not run this family.
        ConfigError: the block size is impossible.
        OutOfMemory: the KV pool does not fit.
    """
    # The code that reads a GGUF file's blocks is compiled, so the cache must be set up before its modules are imported.
    compiled = kernel_cache.use(options.kernel_cache)
    from paceline.backends.mlx.loading import load_mlx

    if compiled:
        return load_mlx(source, options, progress)
    with kernel_cache.alone():
        runner = load_mlx(source, options, progress)
        kernel_cache.complete()
    return runner
