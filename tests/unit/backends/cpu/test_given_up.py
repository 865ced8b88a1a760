"""A step that was given up in the middle, or overflowed, leaves nothing behind: whatever runs next gives the bytes it would have given."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.conformance.suites.layer_runner import Rows, RunnerCase, blocks, plan_of, run, same, tokens

from paceline.backends import cpu
from paceline.core.model import ModelSpec, RopeSpec, WeightsFormat
from paceline.engine.executor import Path
from paceline.engine.local import StepWatch
from paceline.store.home import Home

SPEC = ModelSpec(
    model_type="llama", n_layers=12, hidden=96, n_heads=6, n_kv_heads=2, head_dim=32, ffn=160, vocab=307, max_context=2048,
    rms_eps=1e-5, rope=RopeSpec(10_000.0), tied_head=True,
)  # fmt: skip
LONG = 1900
"""More than three segments of attention: what one row looks at is cut into pieces."""


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
@pytest.mark.parametrize("count", [1, 40])
def test_a_step_given_up_at_any_time_changes_nothing_that_follows(count: int) -> None:
    case = RunnerCase(
        "int4", lambda *args: cpu.load(args[0], replace(args[1], kernel_cache=Home.from_environment().kernels)), SPEC, WeightsFormat.INT4
    )
    runner = case.runner(threads=2)
    try:
        table = blocks(runner, LONG + count)
        ids = tokens(LONG + count, SPEC.vocab)
        for first in range(0, LONG, 475):
            run(runner, Rows(ids[first : first + 475], first, table))
        rows = Rows(ids[LONG:], LONG, table, Path.GENERATED)
        whole = run(runner, rows)[0]
        given_up = 0
        for turn in range(60):
            watch = StepWatch()
            # After more and more layers: at some time inside what runs.
            waits = threading.Thread(target=_after, args=(watch, turn % SPEC.n_layers))
            waits.start()
            runner.run_layers(runner.embed(np.array(rows.ids, np.int32)), replace(plan_of([rows]), watch=watch))
            given_up += watch.layers_done < SPEC.n_layers - 1
            watch.give_up()
            waits.join()
            assert same(runner, whole, run(runner, rows)[0])
        assert given_up > 0
    finally:
        runner.close()


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
@pytest.mark.parametrize("hidden", [96, 100])
def test_rows_that_overflow_change_nothing_that_follows(hidden: int) -> None:
    case = RunnerCase(
        "int8",
        lambda *args: cpu.load(args[0], replace(args[1], kernel_cache=Home.from_environment().kernels)),
        replace(SPEC, hidden=hidden, n_layers=2),
        WeightsFormat.INT8,
    )
    runner = case.runner()
    try:
        rows = [Rows(range(20), 0, [2 * turn, 2 * turn + 1]) for turn in range(3)]
        whole = run(runner, rows[0])[0]
        infinite = np.full((20, hidden), 0x7F80, np.uint16)
        runner.logits(runner.run_layers(infinite, plan_of([rows[1]])), np.arange(20, dtype=np.int32))
        assert same(runner, whole, run(runner, rows[2])[0])
    finally:
        runner.close()


def _after(watch: StepWatch, layers: int) -> None:
    while watch.layers_done < layers and not watch.gives_up:
        pass
    watch.give_up()
