"""Answers of every kind of form over two stages, which may be lost: the bytes of one machine, greedy and drawn, one and sixteen at once, with drafts
and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.pipelines import Machine, MemoryRouter
from tests.identity.drafted import Answers, drain
from tests.identity.test_forms import FORM
from tests.identity.test_matrix import Shallow

from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.core.clock import SystemClock
from paceline.core.generation import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import LayerRange, WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.engine.grammar import Grammars
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.machine.setup import load_runner
from paceline.server.formats.find import find_format
from paceline.server.formats.grammar import BranchChoice, calls_grammar, content_grammar
from paceline.store.catalog import open_model
from paceline.store.home import Home
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.search import PipelineLimits

pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles kernels

BLOCKS = 200
ANSWER = 72
HERMES = find_format("<tool_call>")


def forms() -> dict[str, Grammar]:
    """One of every kind."""
    assert HERMES.thinking is not None
    calls = calls_grammar(
        HERMES, {"sell": FORM, "stop": {}}, BranchChoice.REQUIRED, parallel=True, token_id=lambda _: None, in_reasoning=False
    )
    assert calls is not None
    return {
        "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(FORM)),
        "regex": Grammar(GrammarKind.REGEX, r"[A-Z][a-z]{2,8}( [a-z]{1,8}){2,6}\. Signed: [A-Z]{2,3}"),
        "grammar": Grammar(GrammarKind.LARK, 'start: line line line\nline: /[a-z]{1,9}/ " = " /[0-9]{1,12}/ ";\\n"'),
        "calls": calls,
        "behind reasoning": content_grammar(HERMES, FORM, token_id=lambda _: None, in_reasoning=False),
    }


class Fleet:
    """The first layers of the bundled model: whole, as a head that has none, and as machines that run parts."""

    def __init__(self) -> None:
        opened = open_model("smollm2-135m")
        self._source = Shallow(opened.weights, 3)
        self.spec, self.tokenizer = self._source.spec, opened.tokenizer
        self._grammars = Grammars(opened.tokenizer)
        everything = self.spec.all_layers
        self.whole, self.head = self._load(everything), self._load(LayerRange(0, 0))
        self.stage = self._load(everything, edges=False)
        prompts = [opened.tokenizer.encode(f"Thing number {n}: ") for n in range(16)]
        kinds = list(forms().values())
        self.requests = [
            GenerationRequest(
                RequestId(f"r{n}"),
                tuple(prompt),
                ANSWER,
                SamplingParams(temperature=0.9 * (n // len(kinds) % 2), seed=n, logprobs=2 if n % 3 == 0 else None),
                grammar=kinds[n % len(kinds)],
                draft="off",
            )
            for n, prompt in enumerate(prompts)
        ]
        executor = LocalExecutor(self.whole)
        executor.close = lambda: None
        self.alone = drain(self.engine(executor, 1), self.requests)

    def engine(self, executor: Executor, batch: int) -> Engine:
        config = EngineConfig(max_context=512, max_running=batch, step_timeout_s=1e9, step_budget_s=1e9)
        # A clock that stands still makes every draft look cheap.
        return Engine(executor, self.tokenizer, config, FakeClock(), drafting=DraftingConfig(), grammars=self._grammars)

    def over_stages(self, batch: int, requests: list[GenerationRequest], dies_at: int | None) -> tuple[Answers, int, int]:
        """What requests answer over two stages, in how many steps, and how often a stage was replaced."""
        machines = [Machine(name, self.stage, self.spec.hidden, BLOCKS) for name in ("a", "b", "c")]
        for machine in machines[1:]:
            machine.lock = machines[0].lock  # of the one runner that all have
        machines[1].dies_at = dies_at
        cut = self.spec.n_layers // 2
        router = MemoryRouter(machines, [LayerRange(0, cut), LayerRange(cut, self.spec.n_layers)])
        executor = PipelineExecutor(self.head, self.spec.n_layers, router, PipelineLimits(stall_s=60.0), SystemClock())
        try:
            engine = self.engine(executor, batch)
            return drain(engine, requests), engine.stats().steps, executor.failovers
        finally:
            router.close()

    def close(self) -> None:
        for runner in (self.whole, self.head, self.stage):
            runner.close()

    def _load(self, layers: LayerRange, *, edges: bool = True) -> LayerRunner[Any]:
        options = LoadOptions(layers, WeightsFormat.INT4, BLOCKS, threads=1, edges=edges, kernel_cache=Home.from_environment().kernels)
        return load_runner(choose(self.spec, WeightsFormat.INT4), self._source, options)


@pytest.fixture(scope="module")
def fleet(paceline_home: object) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def test_the_answers_are_of_their_forms(fleet: Fleet) -> None:
    ended = [answer for answer in fleet.alone.values() if answer.finish is FinishReason.STOP]
    assert len(ended) >= 8
    for answer, form in ((fleet.alone[request.request_id, 0], request.grammar) for request in fleet.requests):
        if answer.finish is FinishReason.STOP and form is not None and form.kind is GrammarKind.JSON_SCHEMA:
            assert list(json.loads(answer.text)) == FORM["required"]
    assert len({answer.text for answer in fleet.alone.values()}) >= 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("draft", ["off", None], ids=["without drafts", "with drafts"])
@pytest.mark.parametrize("dies_at", [None, 9], ids=["whole", "a stage dies"])
def test_two_stages_give_the_bytes_of_one_machine(fleet: Fleet, batch: int, draft: str | None, dies_at: int | None) -> None:
    asked = fleet.requests if batch == 16 else fleet.requests[:6]
    answers, steps, failovers = fleet.over_stages(batch, [replace(request, draft=draft) for request in asked], dies_at)
    assert answers == {(request.request_id, 0): fleet.alone[request.request_id, 0] for request in asked}
    assert failovers == (dies_at is not None)
    if draft is None and batch == 1:
        assert steps < 0.9 * sum(len(answer.token_ids) for answer in answers.values()), "forced text was not guessed"
