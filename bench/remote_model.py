"""Whether a draft model on another node pays: a large verifier on one core and the drafter on another, against the verifier alone.

    python bench/remote_model.py [--shape llama-1b] [--agreement 0.6,0.8,0.95] [--rounds 2] [--tokens 32] [--cores 0,1]

The verifier says what the bundled model says, at a larger model's cost: beside the bundled model's layers and head, every step runs those of a seeded
model of that shape (of its layers as many as fit memory well, several times over), whose result is not used. At a seeded share of positions it says
its second choice instead, so the bundled model as a drafter agrees with it as often as was asked for. The drafter is a member of a fleet, in a process
of its own over mTLS on loopback, with one thread on the second core. *Alone* is that verifier without drafts: with one thread on the first core, and
with two threads on both. All take turns, and every answer must be the same, byte for byte. `at work` is the verifier's processor time a token (with
drafts: what its node spends on asking included).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from tests.fakes.seeded_models import PRESETS, shape, write_gguf

from draft_peers import DraftPeers
from paceline.bench.drafts import DraftTally, answer_all
from paceline.bench.exercises import ExerciseKind, load
from paceline.core.clock import SystemClock
from paceline.core.generation import Notice
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.drafts import OFF
from paceline.engine.engine import Engine
from paceline.engine.executor import StepBatch, StepOutput
from paceline.engine.local import LayerRunner, LocalExecutor, RowPlan
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up

MODEL, DRAFTER = "smollm2-135m", "model"
BLOCKS, MAX_ROWS, CONTEXT = 64, 256, 1024
HELD_LAYERS = 4
"""Of the large model; run as often as it has as many."""
IMPOSSIBLE = -1e30


class Costly:
    """A `LayerRunner` that computes what another does, and beside it what a larger one would."""

    def __init__(self, runner: LayerRunner[Any], large: LayerRunner[Any], times: int) -> None:
        self._runner, self._large, self._times = runner, large, times
        self._x: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run_layers(self, x_TD: Any, plan: RowPlan) -> Any:
        x = self._large.embed(np.zeros(int(plan.n_rows_S.sum()), np.int32))
        for _ in range(self._times):
            self._x = self._large.run_layers(x, plan)
        return self._runner.run_layers(x_TD, plan)

    def logits(self, x_TD: Any, rows_R: Any) -> Any:
        self._large.logits(self._x, rows_R)
        return self._runner.logits(x_TD, rows_R)


class Disagrees(LocalExecutor[Any]):
    """Says the model's second choice at some positions.

    Args:
        agreement: share of positions at which it says the first.
    """

    agreement = 1.0

    def submit(self, batch: StepBatch) -> None:
        super().submit(batch)
        self._batch = batch

    def collect(self, deadline: float) -> StepOutput | None:
        output = super().collect(deadline)
        if output is not None:
            places = [step.first_position + row for step in self._batch.steps for row in step.logits_rows]
            for row, place in enumerate(places):
                if Random(place).random() >= self.agreement:
                    output.logits_RV[row, output.logits_RV[row].argmax()] = IMPOSSIBLE
        return output

    def notices(self) -> tuple[Notice, ...]:
        return ()


def verifier(path: Path, layers: int, threads: int) -> tuple[Disagrees, Any]:
    small, large = (set_up(NodeSettings(model, threads=threads)) for model in (MODEL, str(path)))
    runners = [each.load(each.opened.spec.all_layers, BLOCKS, MAX_ROWS, None) for each in (small, large)]
    return Disagrees(Costly(runners[0], runners[1], layers // HELD_LAYERS)), small.opened.tokenizer  # type: ignore[arg-type]


def run(engine: Engine, prompts: Sequence[tuple[int, ...]], draft: str, tokens: int, cores: set[int]) -> tuple[Any, DraftTally, float]:
    os.sched_setaffinity(0, cores)
    began_s, total = time.process_time(), DraftTally()
    answers = []
    for prompt in prompts:
        answer, tally = answer_all(engine, [prompt], draft, [tokens], SystemClock())
        answers += answer
        total += tally
    return answers, total, time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=PRESETS, default="llama-1b")
    parser.add_argument("--agreement", default="0.6,0.8,0.95")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--cores", default="0,1")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    first, second = (int(core) for core in options.cores.split(","))
    layers = shape(options.shape).n_layers
    path = Path(tempfile.gettempdir()) / f"{options.shape}-{HELD_LAYERS}-q4_1.gguf"
    if not path.exists():
        write_gguf(path, shape(options.shape, n_layers=HELD_LAYERS), "Q4_1", 0)
    os.sched_setaffinity(0, {first, second})
    two, tokenizer = verifier(path, layers, 2)
    os.sched_setaffinity(0, {first})
    one, _ = verifier(path, layers, 1)
    peers = DraftPeers(tokenizer.size, MODEL, second)
    source = peers.source(DRAFTER, 100.0)
    config = EngineConfig(max_context=CONTEXT, max_running=1, prefill_chunk=MAX_ROWS - 1, prefix_cache=True)
    clock = SystemClock()
    engines = [
        Engine(each, tokenizer, config, clock, drafting=DraftingConfig(sources={DRAFTER: source} if each is one else {}))
        for each in (one, two)
    ]
    prompts = [exercise.prompt_ids(tokenizer)[: CONTEXT // 4] for exercise in load(ExerciseKind.PROSE)[: options.prompts]]
    ways = {"alone, 1 core": (0, OFF, {first}), "alone, 2 cores": (1, OFF, {first, second}), "drafted": (0, DRAFTER, {first})}
    print(f"{options.shape}: {layers} layers, load {os.getloadavg()[0]:.1f}", flush=True)
    try:
        for agreement in map(float, options.agreement.split(",")):
            one.agreement = two.agreement = agreement
            wanted = None
            for which, draft, cores in ways.values():  # so that prompts are known, and what steps cost
                answers, _, _ = run(engines[which], prompts, draft, options.tokens, cores)
                wanted = wanted or answers
                assert answers == wanted, "other bytes"
            rounds: list[dict[str, tuple[float, float]]] = []
            for turn in range(options.rounds):
                measured: dict[str, tuple[float, float]] = {}
                for name in list(ways)[:: -1 if turn % 2 else 1]:
                    which, draft, cores = ways[name]
                    answers, tally, work_s = run(engines[which], prompts, draft, options.tokens, cores)
                    assert answers == wanted, "other bytes"
                    measured[name] = tally.per_s, work_s / (options.tokens * len(prompts))
                    right = f", {tally.accepted}/{tally.drafted} right, {tally.steps} steps" if draft != OFF else ""
                    print(f"  {agreement} {name}: {tally.per_s:.2f} tokens/s, {1e3 * measured[name][1]:.0f} ms at work{right}", flush=True)
                rounds.append(measured)
            drafted = [each["drafted"] for each in rounds]
            for name in ("alone, 1 core", "alone, 2 cores"):
                ratios = sorted(mine[0] / each[name][0] for mine, each in zip(drafted, rounds, strict=True))
                work = median(each[name][1] / mine[1] for mine, each in zip(drafted, rounds, strict=True))
                print(
                    f"{options.shape}, agreement {agreement}: drafted / {name}: {median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
                    f"in processor time {work:.2f}x; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    finally:
        peers.close()


if __name__ == "__main__":
    main()
