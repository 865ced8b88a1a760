"""Options of a load on any backend, and its progress callbacks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paceline.core.model import LayerRange, WeightsFormat

LoadProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read) while a model loads."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """How far the compiling of a model's kernels is."""

    done: int
    total: int
    """Functions."""
    done_share: float
    """Share of the work, from 0 to 1."""
    left_s: float | None
    """Estimated from what the functions before took; None before the first one."""


CompileProgress = Callable[[Compiling], None]
"""Called from any thread, when compiling begins and for each compiled function."""
compile_progress: ContextVar[CompileProgress | None] = ContextVar("compile_progress", default=None)
"""Callback for loads that begin in this context. It is a context variable because callers between the command line and the kernels do not pass it on."""


@contextmanager
def showing_compiling(progress: CompileProgress) -> Generator[None]:
    """Make loads that begin in the block call `progress`."""
    token = compile_progress.set(progress)
    try:
        yield
    finally:
        compile_progress.reset(token)


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    MLX = "mlx"
    """A Mac's GPU, which shares the machine's memory."""

    @property
    def format_unasked(self) -> WeightsFormat:
        """Weights format of models on this device if the user names none."""
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
    """Most rows of a batch: a prefill chunk, and a row for every running sequence. Raising it: more working memory."""
    edges: bool = True
    """Load the embedding, the final norm and the head too. Stages of a pipeline leave them to the orchestrator."""
    kernel_cache: Path | None = None
    """Folder for compiled kernels; None: beside their sources."""
