"""Requests one after another, then as many at once, of two tensor ranks, one of which is killed now and then: bytes are those of one process, none is
lost, and what ranks take does not grow.

`make soak` asks 100 times each way; the ordinary run 8.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.seeded_models import TINY, write_gguf
from tests.soak.soak import resident_bytes

from paceline.backends import cpu
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.machine.build import BuiltEngine, build_engine
from paceline.machine.settings import NodeSettings
from paceline.ways.tensor.group import TensorGroup
from paceline.ways.tensor.loading import load_group
from paceline.ways.tensor.ranks import MOST_STARTS

pytestmark = [
    pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2"),
    pytest.mark.timeout(1800),
]

REQUESTS = int(os.environ.get("PACELINE_SOAK_RANKED", "8"))
TOKENS = 16
KINDS = 8
"""Requests that differ."""
KILLS = min(MOST_STARTS, 1 + REQUESTS // 40)
"""As many as a group bears within ten minutes."""
MOST_GROWN = 16 << 20
BOUND_S = 900.0


def request(name: str, kind: int) -> GenerationRequest:
    ids = tuple(np.random.default_rng(kind).integers(5, TINY.vocab, 40 + 90 * kind).tolist())  # the longer ones are several batches
    return GenerationRequest(RequestId(name), ids, TOKENS, SamplingParams(temperature=0.8, seed=kind), ignore_eos=True)


def answers(built: BuiltEngine, name: str, kinds: list[int], kill: int = 0) -> list[list[int]]:
    """What comes of requests side by side. Kills a rank once a quarter of all tokens have come, a half, ...: `kill` times."""
    found: dict[str, list[int]] = {f"{name}-{i}": [] for i in range(len(kinds))}
    for i, kind in enumerate(kinds):
        built.engine.add(request(f"{name}-{i}", kind))
    due, end = [len(kinds) * TOKENS * (each + 1) // 4 for each in range(kill)], time.monotonic() + BOUND_S
    while any(len(tokens) < TOKENS for tokens in found.values()):
        assert time.monotonic() < end, "no more tokens come"
        for chunk in built.engine.step():
            assert chunk.error is None, chunk.error
            found[chunk.request_id] += chunk.token_ids
        if due and sum(map(len, found.values())) >= due[0]:
            due.pop(0)
            os.kill(group_of(built).processes[1], signal.SIGKILL)
    return list(found.values())


def group_of(built: BuiltEngine) -> TensorGroup:
    assert isinstance(built.runner, TensorGroup)
    return built.runner


def settings(model: Path, *speeds: float) -> NodeSettings:
    return NodeSettings(str(model), context=1024, kv_tokens=8192, threads=2, draft="off", tensor=speeds)


def test_ranks_answer_as_one_process_however_often_they_are_asked(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", TINY, "Q4_K_M")
    alone = build_engine(settings(model, 1.0), spread=load_group)
    try:
        right = [answers(alone, f"alone-{kind}", [kind])[0] for kind in range(KINDS)]
    finally:
        alone.close()
    built = build_engine(settings(model, 2.0, 1.0), spread=load_group)
    try:
        resident: list[int] = []
        for i in range(REQUESTS):
            assert answers(built, f"one-{i}", [i % KINDS]) == [right[i % KINDS]]
            if i >= KINDS - 1:  # all that is compiled and touched was
                resident.append(resident_bytes(group_of(built).processes[1]))
        assert resident[-1] - resident[0] < MOST_GROWN
        kinds = [i % KINDS for i in range(REQUESTS)]
        assert answers(built, "many", kinds, KILLS) == [right[kind] for kind in kinds]
        ranks = group_of(built).processes[1:]
    finally:
        began = time.monotonic()
        built.close()
        sys.stdout.write(f"{2 * REQUESTS} answers, {KILLS} kills; closed in {time.monotonic() - began:.2f} s\n")
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
