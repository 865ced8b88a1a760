"""The numerics id sees what a long context computes, too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from paceline.backends.cpu import probe
from paceline.backends.cpu.attention import SEGMENT
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.lowering import EMIT
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.simd import Emit, F, I, Value
from paceline.core.errors import PacelineError
from paceline.core.model import LayerRange, ModelSpec, RopeSpec
from paceline.engine.local import RowPlan

pytestmark = pytest.mark.timeout(400)  # the first run on a machine compiles kernels

SPEC = ModelSpec("llama", 2, 128, 4, 2, 32, 128, 64, 4096, 1e-5, RopeSpec(1e4), tied_head=True)

Bits = npt.NDArray[np.uint16]


def runner_of(differs: Callable[[RowPlan, Bits], Bits]) -> type[CpuRunner]:
    """Another build's: it computes something else."""

    class Another(CpuRunner):
        def run_layers(self, x_TD: Bits, plan: RowPlan, part: LayerRange | None = None) -> Bits:
            return differs(plan, super().run_layers(x_TD, plan, part))

    return Another


def rows_that_see(plan: RowPlan, keys: int) -> npt.NDArray[np.bool_]:
    """Which rows of a plan of one sequence see more than so many."""
    return plan.first_position_S[0] + np.arange(plan.n_rows_S[0]) >= keys


@pytest.mark.parametrize("segments", [1, 2])
def test_builds_that_differ_beyond_segments_have_other_ids(monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    def id_of() -> str:
        return probe.numerics_id(SPEC, {Form.Q4_K, Form.Q8_0}, 2)

    def differs(plan: RowPlan, x_TD: Bits) -> Bits:
        x_TD[rows_that_see(plan, segments * SEGMENT), 0] ^= 1
        return x_TD

    same = id_of()
    assert id_of() == same
    monkeypatch.setattr(probe, "CpuRunner", runner_of(differs))
    assert id_of() != same


def test_a_build_whose_cuts_differ_beyond_a_segment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(plan: RowPlan, x_TD: Bits) -> Bits:
        if plan.n_rows_S[0] == 1:
            x_TD[rows_that_see(plan, SEGMENT), 0] ^= 1
        return x_TD

    monkeypatch.setattr(probe, "CpuRunner", runner_of(differs))
    with pytest.raises(PacelineError, match="cuts"):
        probe.numerics_id(SPEC, {Form.Q8_0}, 1)


@pytest.mark.parametrize(("low", "high"), [(-126.0, -125.9), (-101.0, -100.9), (0.4, 0.5), (127.9, 128.0)])
def test_an_exponential_that_is_off_by_a_bit_somewhere_has_another_id(monkeypatch: pytest.MonkeyPatch, low: float, high: float) -> None:
    right = EMIT.exp2

    def wrong(e: Emit, x: Value) -> Value:
        b, result = e.b, right(e, x)
        inside = b.and_(b.fcmp_ordered(">", x, e.const(low)), b.fcmp_ordered("<", x, e.const(high)))
        return b.select(inside, b.bitcast(b.xor(b.bitcast(result, I), e.const_i(1)), F), result)

    def id_of() -> str:
        monkeypatch.setattr(probe, "exponentials", njit(probe.exponentials.py_func))  # compiled again
        return probe.numerics_id(SPEC, {Form.Q8_0}, 1)

    same = id_of()
    monkeypatch.setattr(EMIT, "exp2", wrong)
    assert id_of() != same
