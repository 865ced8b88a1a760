"""The numerics id of a backend, and whether its kernels hold the rules of byte identity (rule 7).

One seeded layer and head run 33 rows whole and cut into pieces of 1 to 17 rows, on each thread count in use. If sums over keys have segments, the rows
run once more behind enough keys to show them. If all cuts give the same bytes, identity holds and the id is the hash of these bytes: equal ids mean equal
bytes. Otherwise the id covers all results, and `holds_identity` is false. Every machine draws the same weights and inputs.

Shapes: T rows, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core.model import ModelSpec, MoeSpec, WindowSpec
from paceline.core.weights import DenseTensor, StoredTensor, WeightSource, columns_of, tensor_shapes
from paceline.engine.executor import Path
from paceline.engine.local import LayerRunner, RowPlan

ROWS = 33
"""Rows of the seeded sequence."""
WINDOW = 20
"""Keys of the seeded window: later rows do not see the first keys, and the window crosses the end of a segment."""
CUTS = ((33,), (1, 2, 3, 16, 11), (17, 16))
"""Rows of each piece, for each cut. There are few pieces, because on a busy machine each waits for every thread."""

_SEED = 2026
_SPREAD = np.float32(0.2)
"""Standard deviation of the seeded weights."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """The result of measuring a backend's kernels."""

    id: str
    """16 hex digits."""
    holds_identity: bool


def measure(
    make: Callable[[WeightSource, int], LayerRunner[Any]],
    source: WeightSource,
    threads: Iterable[int],
    to_bytes: Callable[[Any], bytes],
    label: str,
    behind: int = 0,
) -> Numerics:
    """Run the seeded layer in all cuts on all thread counts, and return the numerics id.

    Args:
        make: loads a runner of all layers of a source, with embedding and head, on a number of threads.
        source: a small seeded model with the family, head size and expert count of the model that will run.
        threads: thread counts to measure.
        to_bytes: returns the bytes of the runner's activations.
        label: name of the kernels and the weights format; different ones never share an id.
        behind: position of a second run of the rows, a multiple of the block size; 0: they run only once.
    """
    answers: dict[int, set[bytes]] = {}
    for count in sorted(set(threads)):
        runner = make(source, count)
        try:
            ids = np.arange(ROWS, dtype=np.int32) * 7 % source.spec.vocab
            for first in (0, behind) if behind else (0,):
                found = answers.setdefault(first, set())
                found.update(answer(runner, runner.embed(ids), to_bytes, cut, logits=True, behind=first) for cut in CUTS)
        finally:
            runner.close()
    digest = hashlib.sha256(label.encode())
    for found in answers.values():
        digest.update(b"".join(sorted(found)))
    return Numerics(digest.hexdigest()[:16], all(len(found) == 1 for found in answers.values()))


def together(ids: Sequence[str]) -> str:
    """Return the id of kernels that compute in several formats, from the id for each format."""
    return ids[0] if len(ids) == 1 else hashlib.sha256(" ".join(ids).encode()).hexdigest()[:16]


def answer(
    runner: LayerRunner[Any], x_TD: Any, to_bytes: Callable[[Any], bytes], cut: Sequence[int], *, logits: bool, behind: int = 0
) -> bytes:
    """Run one sequence in pieces, and return the bytes of the residual, then of the logits if they are wanted. Uses the runner's first blocks.

    Args:
        to_bytes: returns the bytes of the runner's activations.
        cut: rows of each piece.
        behind: position of the first row. The keys before it are full blocks of an earlier run of these rows from position 0, drawn repeatedly.
    """
    own = -(-sum(cut) // runner.block_size)
    table = np.arange(own, dtype=np.int32)[::-1]
    if behind:
        full = table[: sum(cut) // runner.block_size]
        before = np.random.Generator(np.random.PCG64(_SEED)).choice(full, behind // runner.block_size)
        table = np.concatenate([before, table + own])
    table = np.ascontiguousarray(table.reshape(1, -1), np.int32)
    residual, head = list[bytes](), list[bytes]()
    first = 0
    for count in cut:
        start, n_rows, position, kind = (np.array([n], np.int32) for n in (0, count, behind + first, Path.PROMPT))
        out = runner.run_layers(x_TD[first : first + count], RowPlan(start, n_rows, position, kind, table))
        residual.append(to_bytes(out))
        if logits:
            head.append(runner.logits(out, np.arange(count, dtype=np.int32)).tobytes())
        first += count
    return b"".join(residual + head)


def small(spec: ModelSpec) -> ModelSpec:
    """Return a small model of the same family and head size, with one layer. If some layers have a window or lack rope, it has two layers:
    one with a short window and with rope, and one without either.
    """
    window = spec.window and WindowSpec(min(WINDOW, spec.window.tokens), (True, False), spec.window.rope)
    moe = spec.moe and MoeSpec(
        min(8, spec.moe.n_experts), min(2, spec.moe.top_k, spec.moe.n_experts), 96, spec.moe.norm_topk, spec.moe.biased
    )
    return replace(
        spec,
        n_layers=2 if window or any(spec.unturned) else 1,
        unturned=(False, True) if any(spec.unturned) else (),
        hidden=128,
        n_heads=4,
        n_kv_heads=2,
        ffn=192,
        vocab=256,
        max_context=64,
        moe=moe,
        tied_head=True,
        window=window,
    )


class SeededWeights:
    """A `WeightSource` of random tensors for any spec. Every machine draws the same ones."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.digest = spec, f"seeded-{_SEED}"
        self._shapes = tensor_shapes(spec)
        self._places = {name: place for place, name in enumerate(self._shapes)}

    def names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def nbytes(self, name: str) -> int:
        return 4 * int(np.prod(self._shapes[name]))

    def type_of(self, name: str) -> str:  # noqa: ARG002  (all alike)
        return "F32"

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def random_of(self, name: str) -> np.random.Generator:
        """Return the generator that a tensor is drawn from."""
        return np.random.Generator(np.random.PCG64((_SEED, self._places[name])))

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        whole = self.random_of(name).standard_normal(self._shapes[name], np.float32) * _SPREAD
        return columns_of(DenseTensor(whole if rows is None else whole[rows], "f32"), columns)
