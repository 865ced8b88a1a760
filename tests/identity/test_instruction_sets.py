"""Promise 1 on processors that have less: stages of different instructions in one pipeline give the bytes of one machine, and one takes over from another;
and where torch's kernels say that a row's bytes don't depend on its neighbours, they don't."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.far_runners import FarRunner
from tests.identity.draft_rounds import CROWD, FEW, HITS, PREEMPTED, Configuration
from tests.identity.drafted import BLOCKS, TINY, Subject, tiny

from paceline.backends import cpu

BOUNDS = {
    "all": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
MIXED = {
    "one at a time": (Configuration("ngram", 2, 1), None),
    "a prefix is held": (Configuration("model", 3, CROWD, HITS), None),
    "one at a time, a stage dies": (Configuration("knowing", 3, 1), 9),
    "sixteen, a stage dies": (Configuration("auto", 2, CROWD), 15),
    "preempted, a stage dies": (Configuration("jacobi", 3, CROWD, PREEMPTED), 15),
}
"""How requests run over stages of different instructions, and the batch at which one of these goes away."""
pytestmark = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="these bounds are x86's")


def told(bound: str) -> dict[str, Any]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, str(Path(__file__).parent / "on_torch.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **BOUNDS[bound]}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.whole("three processes import torch")
def test_identity_is_declared_where_it_holds_and_ids_tell_instruction_sets_apart() -> None:
    with ThreadPoolExecutor(2) as together:
        found = dict(zip(BOUNDS, together.map(told, BOUNDS), strict=True))
    assert all(one["agree"] for one in found.values() if one["holds"]), found
    assert found["avx2"]["holds"], found
    assert len({one["id"] for one in found.values()}) == len({one["isa"] for one in found.values()})


@dataclass(frozen=True, slots=True)
class Fleet:
    """A model on machines of every instruction set that this processor has."""

    subject: Subject
    far: list[FarRunner]


@pytest.fixture(scope="module")
def fleet(paceline_home: object) -> Iterator[Fleet]:
    others = [each for each in cpu.lowerings_here() if each is not cpu.lowering_in_use()]
    if not others:
        pytest.skip("this processor has the instructions of fewer than two lowerings")
    far = [FarRunner(TINY, lowering, BLOCKS) for lowering in others]
    subject = tiny(FakeClock)
    try:
        assert [each.wait().lowering for each in far] == others
        yield Fleet(subject, far)
    finally:
        subject.close()
        for each in far:
            each.close()


@pytest.mark.timeout(600)  # the first run on a machine compiles kernels
def test_all_may_stand_in_for_one_another(fleet: Fleet) -> None:
    assert {each.numerics_id for each in fleet.far} == {fleet.subject.stage.numerics_id}


@pytest.mark.timeout(600)  # the first run on a machine compiles kernels
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("config", "dies_at"), MIXED.values(), ids=MIXED)
def test_stages_of_different_instructions_give_the_bytes_of_one_machine(fleet: Fleet, config: Configuration, dies_at: int | None) -> None:
    """The second machine computes with the least that there is, the others by turns with what is here and elsewhere."""
    subject, far = fleet.subject, fleet.far
    machines = [subject.stage, *reversed(far)]
    assert len(machines) > config.stages, "no machine is spare"
    asked = subject.requests[: FEW if config.batch == 1 else CROWD]
    expected = {(request.request_id, index): subject.alone[request.request_id, index] for request in asked for index in range(request.n)}
    assert subject.run(config, asked, machines, dies_at) == expected
