"""What every `LayerRunner` must do, whatever it runs on.

Subclass `LayerRunnerSuite` in a test module that has a fixture `case` (a `RunnerCase`) and a fixture `runner` (loaded from it on one
thread). Each test compares a run with the same rows run another way.

Driving a `LayerRunner` row by row, and comparing what it gave.

Shapes: T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.errors import OutOfMemory
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import DenseTensor, StoredTensor, WeightSource, tensor_shapes
from paceline.engine.executor import Path
from paceline.engine.local import LayerRunner, RowPlan, StepWatch


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

    def source(self) -> CountedSource:
        return CountedSource(SeededWeights(self.spec))

    def runner(
        self, *, layers: LayerRange | None = None, edges: bool = True, threads: int = 1, source: WeightSource | None = None
    ) -> LayerRunner[Any]:
        options = LoadOptions(layers or self.spec.all_layers, self.weights, TOKENS // 16, threads=threads, edges=edges)
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

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        tensor = self._source.read(name, rows, columns)
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
    bits = activation_bits(runner, x_TD)
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


def activation_bits(runner: LayerRunner[Any], x_TD: Any) -> npt.NDArray[np.uint16]:
    """A copy of the bits of a runner's activations, uint16 [T, D]."""
    return runner.to_wire(x_TD).copy()


def tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
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


LENGTH = 150
"""Tokens of a prompt at least: more than one attention block of 128."""
BEHIND = 22
"""At least, behind the first block."""


class LayerRunnerSuite:
    """The suite. Every row's result is a function of the sequence's own tokens and paths."""

    @pytest.fixture
    def prompt(self, case: RunnerCase, runner: LayerRunner[Any]) -> Rows:
        length = max(LENGTH, runner.block_size + BEHIND)
        return Rows(tokens(length, case.spec.vocab), 0, blocks(runner, length))

    @pytest.mark.parametrize("path", list(Path))
    @pytest.mark.parametrize("sizes", [(1,), (2, 3), (16, 17), (33,), (64, 1, 7), (128,)], ids=str)
    def test_chunks_change_nothing(self, runner: LayerRunner[Any], prompt: Rows, path: Path, sizes: tuple[int, ...]) -> None:
        rows = Rows(prompt.ids, 0, prompt.table, path)
        assert same(runner, run(runner, rows)[0], run_cut(runner, rows, sizes))

    def test_paths_of_one_path_are_one(self, runner: LayerRunner[Any], prompt: Rows) -> None:
        whole = run(runner, prompt)[0]
        generated = run(runner, Rows(prompt.ids, 0, prompt.table, Path.GENERATED))[0]
        assert runner.one_path == bool(np.array_equal(whole.logits_TV, generated.logits_TV))
        # Two paths are two roundings of one model.
        scale = float(np.abs(whole.logits_TV).max())
        assert float(np.abs(whole.logits_TV - generated.logits_TV).mean()) < 0.05 * scale

    def test_other_sequences_change_nothing(self, case: RunnerCase, runner: LayerRunner[Any]) -> None:
        lengths = (40, 133, 3, 1, 16)
        batch: list[Rows] = []
        at = 0
        for seed, length in enumerate(lengths):
            table = blocks(runner, length, at)
            at += len(table)
            batch.append(Rows(tokens(length, case.spec.vocab, seed), 0, table))
        together = run(runner, *batch)
        for rows, outcome in zip(batch, together, strict=True):
            assert same(runner, run(runner, rows)[0], outcome)

    @pytest.mark.parametrize("count", [1, 2, 5, 16])
    def test_decoding_side_by_side_changes_nothing(self, case: RunnerCase, runner: LayerRunner[Any], count: int) -> None:
        prompts = [Rows(tokens(9 + 11 * s, case.spec.vocab, s), 0, ()) for s in range(count)]
        ends = [len(rows.ids) for rows in prompts]
        tables, at = [], 0
        for end in ends:
            tables.append(blocks(runner, end + 4, at))
            at += len(tables[-1])
        answers = [tokens(4, case.spec.vocab, 100 + s) for s in range(count)]
        for rows, table in zip(prompts, tables, strict=True):
            run(runner, Rows(rows.ids, 0, table))
        steps = [
            run(runner, *(Rows(a[i : i + 1], end + i, t, Path.GENERATED) for a, end, t in zip(answers, ends, tables, strict=True)))
            for i in range(4)
        ]
        for s in range(count):
            alone = run(runner, Rows(answers[s], ends[s], tables[s], Path.GENERATED))[0]
            assert same(runner, alone, Outcome.joined([step[s] for step in steps]))

    def test_prompt_and_generated_rows_mix(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        table = blocks(runner, 60, len(prompt.table))
        first = Rows(tokens(50, case.spec.vocab, 1), 0, table)
        second = Rows(tokens(10, case.spec.vocab, 2), 50, table, Path.GENERATED)
        run(runner, first)
        alone = run(runner, second)[0]
        mixed = run(runner, second, prompt)
        assert same(runner, alone, mixed[0])
        assert same(runner, run(runner, prompt)[0], mixed[1])

    def test_a_prefix_exported_by_one_runner_is_the_prefix_of_another(
        self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows
    ) -> None:
        """Into other blocks, beside others; the rows behind it have the bytes they have behind the prefix that was computed."""
        full = len(prompt.ids) // runner.block_size
        held = full * runner.block_size
        ahead = Rows(prompt.ids[:held], 0, prompt.table)
        behind = Rows(prompt.ids[held:], held, prompt.table)
        run(runner, ahead)
        computed = run(runner, behind)[0]
        other = case.runner(threads=2)
        try:
            assert (other.kv_layout, other.block_bytes) == (runner.kv_layout, runner.block_bytes)
            used = Rows(tokens(40, case.spec.vocab, 7), 0, blocks(other, 40))
            before = run(other, used)[0]
            table = blocks(other, len(prompt.ids), len(used.table))
            assert table != prompt.table[: len(table)]
            for source, target in zip(prompt.table[:full], table, strict=False):
                data = memoryview(bytearray(runner.block_bytes))
                runner.export_block(BlockId(source), data)
                a_layer = len(data) // len(runner.layers)
                for place, layer in enumerate(range(runner.layers.start, runner.layers.stop)):
                    own = memoryview(bytearray(a_layer))
                    runner.export_block(BlockId(source), own, LayerRange(layer, layer + 1))
                    assert own == data[place * a_layer : (place + 1) * a_layer]
                    other.import_block(BlockId(target), own, LayerRange(layer, layer + 1))
                again = memoryview(bytearray(runner.block_bytes))
                other.export_block(BlockId(target), again)
                assert again == data
            assert same(other, run(other, Rows(behind.ids, held, table))[0], computed)
            assert same(other, run(other, used)[0], before)
        finally:
            other.close()

    def test_threads_change_nothing(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        other = case.runner(threads=2)
        try:
            for path in Path:
                rows = Rows(prompt.ids, 0, prompt.table, path)
                assert same(runner, run(runner, rows)[0], run(other, rows)[0])
        finally:
            other.close()

    def test_blocks_may_lie_anywhere(self, runner: LayerRunner[Any], prompt: Rows) -> None:
        whole = run(runner, prompt)[0]
        spare = [b for b in range(runner.n_blocks) if b not in prompt.table]
        scattered = np.random.default_rng(3).permutation(spare)[: len(prompt.table)].tolist()
        assert same(runner, whole, run_cut(runner, Rows(prompt.ids, 0, scattered), (33,)))

    def test_what_a_block_held_before_is_forgotten(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        whole = run(runner, prompt)[0]
        run(runner, Rows(tokens(len(prompt.ids), case.spec.vocab, 9), 0, list(reversed(prompt.table))))
        assert same(runner, whole, run_cut(runner, prompt, (16,)))

    def test_a_table_may_be_longer_than_its_rows(self, runner: LayerRunner[Any], prompt: Rows) -> None:
        spare = list(range(len(prompt.table), len(prompt.table) + 12))
        assert same(runner, run(runner, prompt)[0], run(runner, Rows(prompt.ids, 0, [*prompt.table, *spare]))[0])

    def test_first_position_truncates(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        run(runner, prompt)
        draft, accepted = tokens(7, case.spec.vocab, 4), tokens(5, case.spec.vocab, 5)
        start = len(prompt.ids) - 9
        run(runner, Rows(draft, start, prompt.table, Path.GENERATED))
        after = run(runner, Rows(accepted, start, prompt.table, Path.GENERATED))[0]
        run(runner, Rows(prompt.ids[:start], 0, prompt.table))
        assert same(runner, run_cut(runner, Rows(accepted, start, prompt.table, Path.GENERATED), (1,)), after)

    def test_what_was_given_up_and_is_run_again_is_what_it_would_have_been(
        self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows
    ) -> None:
        whole = run(runner, prompt)[0]
        ids = np.array(prompt.ids, np.int32)
        at_once, at_some_time, never = StepWatch(), StepWatch(), StepWatch()
        at_once.give_up()
        runner.run_layers(runner.embed(ids), replace(plan_of([prompt]), watch=at_once))
        assert at_once.layers_done == 0
        other = threading.Thread(target=at_some_time.give_up)
        other.start()
        runner.run_layers(runner.embed(ids), replace(plan_of([prompt]), watch=at_some_time))
        other.join()
        runner.run_layers(runner.embed(ids), replace(plan_of([prompt]), watch=never))
        assert 0 < never.layers_done <= case.spec.n_layers
        assert same(runner, whole, run_cut(runner, prompt, (64, 1, 7)))

    def test_layers_split_over_two_runners(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        cut = case.spec.n_layers // 2
        head = case.runner(layers=LayerRange(0, cut))
        tail = case.runner(layers=LayerRange(cut, case.spec.n_layers), edges=False)
        try:
            whole, plan = run(runner, prompt)[0], plan_of([prompt])
            x_TD = tail.run_layers(head.run_layers(head.embed(np.array(prompt.ids, np.int32)), plan), plan)
            last = np.array([len(prompt.ids) - 1], np.int32)
            assert same(runner, whole.tail(len(prompt.ids) - 1), Outcome(activation_bits(tail, x_TD)[-1:], head.logits(x_TD, last)))
            assert np.array_equal(whole.x_TD, activation_bits(tail, x_TD))
        finally:
            head.close()
            tail.close()

    def test_a_part_of_the_layers_runs_alone_and_travels(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        cut = case.spec.n_layers // 2
        whole, plan = run(runner, prompt)[0], plan_of([prompt])
        x_TD = runner.run_layers(runner.embed(np.array(prompt.ids, np.int32)), plan, LayerRange(0, cut))
        bits_TD = runner.to_wire(x_TD).copy()
        assert bits_TD.shape == (len(prompt.ids), case.spec.hidden)
        x_TD = runner.run_layers(runner.from_wire(bits_TD), plan, LayerRange(cut, case.spec.n_layers))
        assert np.array_equal(whole.x_TD, activation_bits(runner, x_TD))
        nothing = LayerRange(cut, cut)
        assert np.array_equal(runner.to_wire(runner.run_layers(runner.from_wire(bits_TD), plan, nothing)), bits_TD)
        with pytest.raises(ValueError, match="holds"):
            runner.run_layers(runner.from_wire(bits_TD), plan, LayerRange(0, case.spec.n_layers + 1))

    def test_only_the_tensors_asked_for_are_read_and_once(self, case: RunnerCase) -> None:
        source = case.source()
        case.runner(layers=LayerRange(1, 2), edges=False, source=source).close()
        shapes = tensor_shapes(source.spec)
        assert source.rows == {name: shapes[name][0] for name in source.names() if name.startswith("model.layers.1.")}

    def test_edges_are_read_once(self, case: RunnerCase) -> None:
        source = case.source()
        case.runner(source=source).close()
        assert source.rows == {name: shape[0] for name, shape in tensor_shapes(source.spec).items()}

    def test_progress_is_told_in_bytes(self, case: RunnerCase) -> None:
        told: list[tuple[int, int]] = []
        options = LoadOptions(case.spec.all_layers, case.weights, 16)
        source = case.source()
        case.load(source, options, lambda done, total: told.append((done, total))).close()
        total = sum(source.nbytes(name) for name in source.names())
        assert told[-1] == (total, total)
        assert [done for done, _ in told] == sorted(done for done, _ in told)

    def test_no_rows_no_logits(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        x_TD = runner.run_layers(runner.embed(np.array(prompt.ids, np.int32)), plan_of([prompt]))
        assert runner.logits(x_TD, np.array([], np.int32)).shape == (0, case.spec.vocab)

    def test_logits_come_in_the_order_asked(self, case: RunnerCase, runner: LayerRunner[Any], prompt: Rows) -> None:
        whole = run(runner, prompt)[0]
        x_TD = runner.run_layers(runner.embed(np.array(prompt.ids, np.int32)), plan_of([prompt]))
        order = np.array([149, 3, 77], np.int32)
        logits_RV = runner.logits(x_TD, order)
        assert logits_RV.dtype == np.float32
        assert same(runner, Outcome(whole.x_TD[order], whole.logits_TV[order]), Outcome(activation_bits(runner, x_TD)[order], logits_RV))

    def test_room_is_what_was_asked(self, runner: LayerRunner[Any]) -> None:
        assert runner.n_blocks * runner.block_size >= TOKENS
        assert len(runner.numerics_id) == 16

    def test_a_pool_larger_than_memory_is_refused(self, case: RunnerCase) -> None:
        options = LoadOptions(case.spec.all_layers, case.weights, 1 << 36)
        with pytest.raises(OutOfMemory, match=r"KV pool of \d+ tokens.*--kv-tokens"):
            case.load(case.source(), options)

    def test_closing_twice_is_closing(self, case: RunnerCase) -> None:
        closed = case.runner()
        closed.close()
        closed.close()
