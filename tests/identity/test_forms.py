"""Answers of a given form from the bundled model: the same bytes greedy and drawn, one and sixteen at once, with drafts and without, cut anywhere."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.fakes.clock import FakeClock
from tests.identity.drafted import drain
from tests.identity.test_matrix import Shallow
from tests.sampling import ALL

from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.core.generation import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.grammar import Grammars
from paceline.engine.local import LocalExecutor
from paceline.machine.setup import load_runner
from paceline.store.catalog import open_model
from paceline.store.home import Home

LAYERS = 30 if ALL else 6
"""Layers of the bundled model's 30: every layer is like another."""
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "in_stock": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "colour", "in_stock", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(FORM))


def test_same_bytes_of_a_form(paceline_home: object) -> None:
    opened = open_model("smollm2-135m")
    weights = Shallow(opened.weights, LAYERS)
    options = LoadOptions(
        weights.spec.all_layers, WeightsFormat.INT4, 256, threads=1, edges=True, kernel_cache=Home.from_environment().kernels
    )
    executor = LocalExecutor(load_runner(choose(weights.spec, WeightsFormat.INT4), weights, options))
    grammars = Grammars(opened.tokenizer)
    requests = [
        GenerationRequest(
            RequestId(f"r{n}"),
            tuple(opened.tokenizer.encode(f"Thing number {n} in JSON: ")),
            80,
            SamplingParams(temperature=0.8 * (n % 2), seed=n),
            grammar=GRAMMAR,
        )
        for n in range(16 if ALL else 6)
    ]

    def engine(running: int) -> Engine:
        config = EngineConfig(max_context=256, max_running=running, step_timeout_s=1e9, step_budget_s=1e9)
        return Engine(executor, opened.tokenizer, config, FakeClock(), drafting=DraftingConfig(), grammars=grammars)

    alone = drain(engine(1), [replace(request, draft="off") for request in requests])
    together, drafted = engine(16), engine(16)
    assert drain(together, [replace(request, draft="off") for request in requests]) == alone
    assert drain(drafted, requests) == alone
    assert drafted.stats().steps < together.stats().steps
    for answer in alone.values():
        assert answer.finish is FinishReason.STOP
        assert list(json.loads(answer.text)) == FORM["required"]
    cut = [
        replace(request, so_far={0: tuple(alone[request.request_id, 0].token_ids[: 1 + place % 11])})
        for place, request in enumerate(requests)
    ]
    for place, (key, rest) in enumerate(drain(engine(16), cut).items()):
        assert [*alone[key].token_ids[: 1 + place % 11], *rest.token_ids] == [*alone[key].token_ids]
    executor.close()
