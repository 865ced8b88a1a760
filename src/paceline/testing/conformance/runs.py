"""Driving a `LayerRunner` row by row, and comparing what it gave.

Shapes: T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions, LoadProgress, PromptWeights
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import DenseTensor, StoredTensor, WeightSource
from paceline.engine.executor import Path
from paceline.engine.local import LayerRunner, RowPlan


class Load(Protocol):
    """A backend's `load`."""

    def __call__(self, source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None, /) -> LayerRunner[Any]: ...


TOKENS = 8192
"""KV tokens a suite's runner is asked for."""
AT_ONCE = 32
"""Rows whose logits are asked for in one call."""


@dataclass(frozen=True, slots=True)
class RunnerCase:
    """A backend, a small model and a weights format."""

    name: str
    load: Load
    spec: ModelSpec
    weights: WeightsFormat
    prompt_weights: PromptWeights | None = None

    def source(self) -> CountedSource:
        return CountedSource(SeededWeights(self.spec))

    def runner(
        self, *, layers: LayerRange | None = None, edges: bool = True, threads: int = 1, source: WeightSource | None = None
    ) -> LayerRunner[Any]:
        options = LoadOptions(
            layers or self.spec.all_layers, self.weights, TOKENS // 16, threads=threads, edges=edges, prompt_weights=self.prompt_weights
        )
        return self.load(source or self.source(), options)


class CountedSource:
    """A source that counts how many rows of each tensor were read."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.rows: dict[str, int] = {}

    @property
    def spec(self) -> ModelSpec:
        return self._source.spec

    @property
    def digest(self) -> str:
        return self._source.digest

    def names(self) -> Iterable[str]:
        return self._source.names()

    def nbytes(self, name: str) -> int:
        return self._source.nbytes(name)

    def type_of(self, name: str) -> str:
        return self._source.type_of(name)

    def read(self, name: str, rows: slice | None = None) -> StoredTensor:
        tensor = self._source.read(name, rows)
        n = tensor.data.shape[0] if isinstance(tensor, DenseTensor) else tensor.shape[0]
        self.rows[name] = self.rows.get(name, 0) + n
        return tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence in one batch."""

    ids: Sequence[int]
    first: int
    table: Sequence[int]
    path: Path = Path.PROMPT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sequence's rows gave: the residual's bf16 bits [T, D] and logits [T, V]."""

    x_TD: npt.NDArray[np.uint16]
    logits_TV: npt.NDArray[np.float32]

    @classmethod
    def joined(cls, parts: Sequence[Outcome]) -> Outcome:
        return cls(np.concatenate([p.x_TD for p in parts]), np.concatenate([p.logits_TV for p in parts]))

    def tail(self, first: int) -> Outcome:
        return Outcome(self.x_TD[first:], self.logits_TV[first:])


def plan_of(batch: Sequence[Rows]) -> RowPlan:
    """The plan of a batch."""
    n_rows = np.array([len(rows.ids) for rows in batch], np.int32)
    tables = np.full((len(batch), max(len(rows.table) for rows in batch)), -1, np.int32)
    for row, rows in zip(tables, batch, strict=True):
        row[: len(rows.table)] = rows.table
    starts = (np.cumsum(n_rows) - n_rows).astype(np.int32)
    firsts, paths = np.array([r.first for r in batch], np.int32), np.array([int(r.path) for r in batch], np.int32)
    return RowPlan(starts, n_rows, firsts, paths, tables)


def run(runner: LayerRunner[Any], *batch: Rows) -> list[Outcome]:
    """Run one batch, with logits of every row."""
    plan = plan_of(batch)
    ids = np.array([token for rows in batch for token in rows.ids], np.int32)
    x_TD = runner.run_layers(runner.embed(ids), plan)
    bits = activation_bits(x_TD)
    logits = [runner.logits(x_TD, np.arange(at, min(at + AT_ONCE, len(ids)), dtype=np.int32)).copy() for at in range(0, len(ids), AT_ONCE)]
    ends = np.cumsum(plan.n_rows_S)[:-1]
    return [Outcome(x, y) for x, y in zip(np.split(bits, ends), np.split(np.concatenate(logits), ends), strict=True)]


def run_cut(runner: LayerRunner[Any], rows: Rows, sizes: Sequence[int]) -> Outcome:
    """Run one sequence's rows in chunks of the sizes given, over and over."""
    parts: list[Outcome] = []
    at, turn = 0, 0
    while at < len(rows.ids):
        size = sizes[turn % len(sizes)]
        parts += run(runner, Rows(rows.ids[at : at + size], rows.first + at, rows.table, rows.path))
        at, turn = at + size, turn + 1
    return Outcome.joined(parts)


def activation_bits(x_TD: Any) -> npt.NDArray[np.uint16]:
    """A copy of the bits of a runner's activations, uint16 [T, D]."""
    if isinstance(x_TD, np.ndarray):
        return np.array(x_TD).view(np.uint16)
    import torch

    return x_TD.contiguous().view(torch.int16).cpu().numpy().copy().view(np.uint16)


def tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def blocks(runner: LayerRunner[Any], n_tokens: int, first: int = 0) -> list[int]:
    """A table of adjacent blocks for a number of tokens."""
    return list(range(first, first - (-n_tokens // runner.block_size)))


def same(runner: LayerRunner[Any], left: Outcome, right: Outcome) -> bool:
    """Whether two runs of the same rows agree: to the byte, or closely where the runner says that its kernels can't."""
    if runner.holds_identity:
        return bool(np.array_equal(left.x_TD, right.x_TD) and np.array_equal(left.logits_TV, right.logits_TV))
    scale = float(np.abs(left.logits_TV).max())
    return bool(np.abs(left.logits_TV - right.logits_TV).max() < 0.02 * scale)
