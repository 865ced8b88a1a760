"""Layers through MLX: Metal on a Mac, processors elsewhere, by mlx-lm's models (ADR 30). Importing this package does not import mlx: `load` does."""

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
        ModelFileError: from the source.
        UnsupportedModel: a family that does not run there.
        ConfigError: an impossible block size.
        OutOfMemory: the KV pool does not fit.
    """
    # What reads a GGUF file's blocks is compiled: before the modules that hold it.
    compiled = kernel_cache.use(options.kernel_cache)
    from paceline.backends.mlx.loading import load_mlx

    if compiled:
        return load_mlx(source, options, progress)
    with kernel_cache.alone():
        runner = load_mlx(source, options, progress)
        kernel_cache.complete()
    return runner
