"""What a backend is asked to load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paceline.core.model import LayerRange, WeightsFormat

LoadProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read) while a model loads."""


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    MLX = "mlx"
    """A Mac's GPU, whose memory is the machine's."""

    @property
    def format_unasked(self) -> WeightsFormat:
        """The weights format that it runs models in where none is asked for."""
        match self:
            case DeviceKind.CPU:
                return WeightsFormat.STORED
            case DeviceKind.CUDA | DeviceKind.MLX:
                return WeightsFormat.BF16


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A range of layers, its weights format and its share of this machine."""

    layers: LayerRange
    weights: WeightsFormat
    n_blocks: int
    """KV blocks to allocate."""
    block_size: int = 16
    threads: int = 1
    max_rows: int = 1024
    """Rows of a batch at most: a prefill chunk and a row for every running sequence. Raising it takes working memory."""
    edges: bool = True
    """Load the embedding, the final norm and the head too. Stages of a pipeline leave them to the orchestrator."""
    kernel_cache: Path | None = None
    """Folder for compiled kernels; None: beside their sources."""
