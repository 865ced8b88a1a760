"""Promise 1 at length: contexts of several segments give the same bytes however rows, chunks, batches and threads are cut.

One layer with seeded weights; what is compared is the residual, which every later byte follows from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from paceline.backends.cpu import places
from paceline.backends.cpu.attention import SEGMENT
from paceline.backends.cpu.forms import Form, Inputs
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.weights import pack_model
from paceline.backends.holding import cpu_working_bytes
from paceline.backends.numerics import SeededWeights
from paceline.core.model import LowRank, ModelSpec, MoeSpec, RopeSpec
from paceline.engine.local import RowPlan

pytestmark = pytest.mark.timeout(400)  # the first run on a machine compiles kernels

ROWS = 1100
CONTEXT = 8192
SHAPES = [(32, 2, 2), (64, 3, 1), (64, 9, 3), (96, 8, 2), (128, 7, 1), (64, 16, 2), (256, 1, 1), (32, 16, 1)]
"""Head dimension, query heads, KV heads: groups of 1, 3, 4, 7, 8 and 16."""


def spec(dim: int, heads: int, kv_heads: int) -> ModelSpec:
    return ModelSpec("llama", 1, 64, heads, kv_heads, dim, 64, 64, CONTEXT, 1e-5, RopeSpec(1e5), tied_head=True)


class Case:
    """One model on one, two and three threads."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        source = SeededWeights(spec(*shape))
        model = pack_model(source, source.spec.all_layers, lambda _: Form.Q8_0, edges=True)
        # Two long sequences and short ones.
        self.blocks = 3 * CONTEXT // 16
        self.runners = {
            threads: CpuRunner(model, n_blocks=self.blocks, threads=threads, numerics_id="", max_rows=ROWS) for threads in (1, 2, 3)
        }
        self.x = self.runners[1].embed(np.random.default_rng(1).integers(0, 64, CONTEXT, dtype=np.int32)).copy()

    def run(self, threads: int, pieces: Sequence[Sequence[tuple[int, int, int]]]) -> dict[int, npt.NDArray[np.uint16]]:
        """The residual of each sequence: batches of (sequence, first position, rows)."""
        out = {s: np.zeros((stop, self.x.shape[1]), np.uint16) for batch in pieces for s, first, count in batch for stop in [first + count]}
        places = np.random.default_rng(threads).permutation(self.blocks).astype(np.int32)
        for batch in pieces:
            counts, firsts = np.array([piece[2] for piece in batch], np.int32), np.array([piece[1] for piece in batch], np.int32)
            starts = (np.cumsum(counts) - counts).astype(np.int32)
            tables = np.stack([places[s * CONTEXT // 16 : (s + 1) * CONTEXT // 16] for s, _, _ in batch])
            x = np.concatenate([self.x[first : first + count] for _, first, count in batch])
            y = self.runners[threads].run_layers(x, RowPlan(starts, counts, firsts, np.zeros(len(batch), np.int32), tables))
            for (s, first, count), start in zip(batch, starts.tolist(), strict=True):
                out[s][first : first + count] = y[start : start + count]
        return out

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    yield made
    made.close()


def chunks(length: int, sizes: Sequence[int], sequence: int = 0) -> list[list[tuple[int, int, int]]]:
    """A sequence from 0 to `length` in chunks of these sizes, over and over."""
    cut, first = list[list[tuple[int, int, int]]](), 0
    while first < length:
        count = min(sizes[len(cut) % len(sizes)], length - first)
        cut.append([(sequence, first, count)])
        first += count
    return cut


def test_chunks_and_threads_change_nothing(case: Case) -> None:
    length = 5 * SEGMENT + 77
    expected = case.run(1, chunks(length, [512]))[0]
    for threads, sizes in ((1, [1091, 3, 37]), (2, [193, 1, 544, 7]), (3, [1100]), (3, [63, 64, 65])):
        np.testing.assert_array_equal(case.run(threads, chunks(length, sizes))[0], expected)


def test_generated_and_guessed_rows_are_the_prompt_s_rows(case: Case) -> None:
    """Beside other sequences, short and long, of one row or several, whose segments may be spread over threads."""
    length = 3 * SEGMENT + 5
    expected = case.run(1, chunks(length, [600]))[0]
    for threads in (1, 2, 3):
        prompts = [[(0, first, count), (1, first, count)] for [(_, first, count)] in chunks(length - 24, [500])]
        first = length - 24
        steps = [
            [(0, first, 1), (1, first, 8), (2, 0, 5)],
            [(0, first + 1, 8), (2, 5, 1)],
            [(0, first + 9, 1)],
            [(0, first + 10, 6), (1, first + 8, 16)],
            [(0, first + 16, 8), (2, 6, 100)],
        ]
        found = case.run(threads, [*prompts, *steps])
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(found[1], expected)
        np.testing.assert_array_equal(found[2], expected[:106])


@pytest.mark.parametrize("shape", [(32, 3, 1), (64, 4, 2)])
def test_eight_thousand_tokens(shape: tuple[int, int, int]) -> None:
    case = Case(shape)
    try:
        expected = case.run(1, chunks(CONTEXT - 1, [1024]))[0]
        tail = CONTEXT - 1 - 20
        cut = [*chunks(tail, [997, 1100]), *([(0, tail + i, 1)] for i in range(12)), [(0, tail + 12, 8), (1, 0, 40)]]
        for threads in (2, 3):
            np.testing.assert_array_equal(case.run(threads, cut)[0], expected)
    finally:
        case.close()


SPEC = replace(spec(128, 16, 4), hidden=512, ffn=1536, vocab=40_000)
PLANNED = {
    "dense": SPEC,
    "mixture": replace(SPEC, moe=MoeSpec(16, 4, 256, norm_topk=True)),
    "low rank": replace(SPEC, head_dim=96, n_kv_heads=16, rope=RopeSpec(10000.0, dims=32), low=LowRank(768, 256, 64)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_spec", PLANNED.values(), ids=PLANNED)
@pytest.mark.parametrize("threads", [1, 3])
def test_working_memory_is_what_was_planned(threads: int, model_spec: ModelSpec) -> None:
    """What a runner holds beside weights and KV, logits included, and hardly less."""
    source = SeededWeights(model_spec)
    model = pack_model(source, source.spec.all_layers, lambda name: Form.Q8_0 if "embed" in name else Form.Q4_1, edges=True)
    runner = CpuRunner(model, n_blocks=200, threads=threads, numerics_id="", max_rows=500)
    try:
        x = runner.embed(np.zeros(90, np.int32))
        runner.logits(x, np.arange(40, dtype=np.int32))
        runner.logits(x, np.arange(90, dtype=np.int32))
        held = sum(array.nbytes for array in runner._arrays.rest) + runner._logits.nbytes
        held -= int(runner._sizes[places.LAYER_STRIDE])
        inputs = {Inputs.INT8, Inputs.INT16}
        planned = cpu_working_bytes(model_spec, max_rows=500, threads=threads, n_blocks=200, logits_rows=90, inputs=inputs)
        assert held <= planned <= 1.3 * held
    finally:
        runner.close()
