"""Two ranks over MLX's ring, each a process, beside MLX alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tests.conformance.suites.layer_runner import Rows, blocks, run, tokens
from tests.conformance.test_layer_runners import SPECS

from paceline.backends import mlx
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.model import WeightsFormat
from paceline.core.ports import find_port
from paceline.engine.executor import Path as RowPath
from paceline.engine.local import LayerRunner
from paceline.store.home import Home

SPEC = SPECS["qwen3"]
LENGTHS = (5, 9, 17, 33, 61, 140)
NEAR_TIE = 0.05
"""Standard deviations of the logits: sums of two bf16 halves round otherwise than one sum."""

RANK = """
import json, sys
from typing import Any
import mlx.core as mx
from tests.unit.backends.test_mlx_ring import SPEC, answers, kv_is_whole, load_options
from paceline.backends.mlx.loading import load_mlx
from paceline.backends.numerics import SeededWeights
group = mx.distributed.init(backend="ring", strict=True)
rank = load_mlx(SeededWeights(SPEC), load_options(), None, group)
if group.rank():
    rank.follow()
    print(json.dumps({"followed": True}))
else:
    said = {"answers": answers(rank)[0], "kv": kv_is_whole(rank), "id": rank.numerics_id, "bytes": rank.block_bytes, "holds": rank.holds_identity}
    rank.close()
    print(json.dumps(said))
"""


def load_options() -> LoadOptions:
    return LoadOptions(SPEC.all_layers, WeightsFormat.BF16, 64, kernel_cache=Home.from_environment().kernels)


def answers(runner: LayerRunner[object]) -> tuple[list[list[int]], list[list[bool]]]:
    """Greedy tokens of several sequences side by side, and whether each was a near tie."""
    prompts = [tokens(length, SPEC.vocab, length) for length in LENGTHS]
    tables, first = list[Sequence[int]](), 0
    for prompt in prompts:
        tables.append(blocks(runner, len(prompt) + 6, first))
        first += len(tables[-1])
    outcomes = run(runner, *(Rows(ids, 0, at) for ids, at in zip(prompts, tables, strict=True)))
    found, near = [list[int]() for _ in prompts], [list[bool]() for _ in prompts]
    for step in range(5):
        for own, ties, outcome in zip(found, near, outcomes, strict=True):
            last = outcome.logits_TV[-1]
            second, best = np.sort(last)[-2:]
            own.append(int(last.argmax()))
            ties.append(bool(best - second < NEAR_TIE * last.std()))
        batch = [Rows(own[-1:], len(ids) + step, at, RowPath.GENERATED) for own, ids, at in zip(found, prompts, tables, strict=True)]
        outcomes = run(runner, *batch)
    return found, near


def kv_is_whole(runner: LayerRunner[object]) -> bool:
    """Whether a prefix that was copied out and into other blocks is the prefix that was computed."""
    ids = tokens(40, SPEC.vocab, 3)
    here, there = [0, 1, 2], [20, 21, 22]
    run(runner, Rows(ids[:32], 0, here))
    computed = run(runner, Rows(ids[32:], 32, here))[0]
    for source, target in zip(here[:2], there[:2], strict=True):
        data = memoryview(bytearray(runner.block_bytes))
        runner.export_block(source, data)  # type: ignore[arg-type]
        runner.import_block(target, data)  # type: ignore[arg-type]
    return bool(np.array_equal(run(runner, Rows(ids[32:], 32, there))[0].logits_TV, computed.logits_TV))


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_two_ranks_answer_with_the_tokens_of_one(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in (find_port("127.0.0.1"), find_port("127.0.0.1"))]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile), "PYTHONPATH": os.pathsep.join(["src", "."])},
            cwd=Path(__file__).parents[3],
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], ended
    led, followed = (json.loads(said) for said, _ in ended)
    alone = mlx.load(SeededWeights(SPEC), load_options())
    found, near = answers(alone)
    clear = [(ties.index(True) if True in ties else len(ties)) for ties in near]
    assert [own[:n] for own, n in zip(led["answers"], clear, strict=True)] == [own[:n] for own, n in zip(found, clear, strict=True)]
    assert sum(clear) >= 6
    assert led["kv"]
    assert led["holds"]
    assert led["id"] != alone.numerics_id
    assert led["bytes"] == alone.block_bytes
    assert followed == {"followed": True}
