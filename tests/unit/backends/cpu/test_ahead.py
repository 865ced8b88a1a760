"""Kernels compiled by several processes while weights are read: all are compiled whoever ends early, and progress is told as it was measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.unit.backends.cpu.test_team import SPEC

from paceline.backends import cpu
from paceline.backends.cpu import ahead
from paceline.backends.cpu.ahead import Ahead
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.kernels import COSTS, cost_of, is_packer, kernels_of, missing
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import Compiling, LoadOptions, showing_compiling
from paceline.core.model import BLOCK_TOKENS, WeightsFormat
from paceline.store.home import Home

NAMES = kernels_of({Form.Q4_1, Form.Q8_0}, Form.Q8_0, mixture=False, draws=True)
ANSWERS = "import sys; print(flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
ENDS_AT_ONCE = "pass"
ENDS_AT_THE_THIRD = "import sys; print(flush=True)\nfor _ in 'ab': print(sys.stdin.readline(), end='', flush=True)"


@pytest.mark.parametrize("worker", [ANSWERS, ENDS_AT_ONCE, ENDS_AT_THE_THIRD])
@pytest.mark.parametrize("n_workers", [1, 3])
def test_waiting_ends_whatever_becomes_of_the_processes(worker: str, n_workers: int) -> None:
    told = list[Compiling]()
    with showing_compiling(told.append):
        compiling = Ahead(NAMES, n_workers, [sys.executable, "-c", worker])
    compiling.wait(packers=True)
    compiling.wait()
    compiling.close()
    assert (told[0].done, told[0].total, told[0].left_s) == (0, len(NAMES), None)
    assert all(one.left_s is not None and one.left_s >= 0 for one in told[1:])
    if worker is ANSWERS:
        assert sorted(one.done for one in told) == list(range(len(NAMES) + 1))
        assert max(one.done_share for one in told) == pytest.approx(1)


def test_a_load_that_fails_ends_the_processes() -> None:
    compiling = Ahead(NAMES, 2, [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.readline(); import time; time.sleep(600)"])
    compiling.close()
    assert all(worker.returncode is not None for worker in compiling._workers)


def test_without_processes_the_one_that_waits_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()
    monkeypatch.setattr(ahead, "compile_kernel", compiled.append)
    compiling = Ahead(NAMES, 0, [])
    compiling.wait(packers=True)
    assert compiled == [name for name in NAMES if is_packer(name)]
    compiling.wait()
    assert compiled == NAMES
    compiling.close()


def test_a_model_needs_the_kernels_of_its_forms_and_kind() -> None:
    dense = {name for name in NAMES if not is_packer(name)}
    assert not any("experts" in name or "q4_k" in name for name in dense)
    assert set(kernels_of({Form.Q4_1, Form.Q8_0}, None, mixture=True, draws=False)) - set(NAMES) == {"tasks.do_experts"}
    assert [is_packer(name) for name in NAMES] == sorted((is_packer(name) for name in NAMES), reverse=True)
    assert {prefix for prefix in COSTS if any(name.startswith(prefix) for name in [*NAMES, "tasks.do_experts"])} == set(COSTS)
    costs = [cost_of(name) for name in NAMES if not is_packer(name)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
def test_what_a_load_compiles_has_these_names_in_the_cache() -> None:
    options = LoadOptions(SPEC.all_layers, WeightsFormat.BF16, 2, BLOCK_TOKENS, 2, kernel_cache=Home.from_environment().kernels)
    cpu.load(SeededWeights(SPEC), options).close()
    assert missing(kernels_of({Form.BF16}, Form.BF16, mixture=False, draws=False), Path(os.environ["NUMBA_CACHE_DIR"])) == []
