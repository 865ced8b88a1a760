"""The bundled model, from its GGUF, against transformers on the same file dequantised to float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.served import Served
from tests.golden import reference as hf
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from paceline.backends import cpu
from paceline.backends import torch as portable
from paceline.core.model import WeightsFormat
from paceline.machine.host import EngineHost
from paceline.machine.settings import NodeSettings
from paceline.node.build import build_node
from paceline.store.catalog import OpenedModel, open_model

PROMPTS = (
    "The three primary colours are red, blue and yellow. Mixing blue and yellow gives green, and mixing red and blue gives",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\ndef factorial(n):\n",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain the air is thinner, so water boils sooner, and pasta takes longer.",
)
SERIES = (
    "January, February, March, April, May, June,",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "The days of the week are Monday, Tuesday, Wednesday,",
)
"""Texts that go on in one way only."""
QUESTION = "Which city is the capital of France? Answer in one short sentence."
NEAR_TIE = 0.5
"""Difference of logits."""


@pytest.fixture(scope="module")
def bundled(paceline_home: Path) -> OpenedModel:
    return open_model("SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def prompts(bundled: OpenedModel) -> list[list[int]]:
    return [bundled.tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def exact(bundled_gguf: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled_gguf.parent, gguf_file=bundled_gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def exact_logits(exact: Any, prompts: list[list[int]]) -> list[hf.Logits]:
    return [hf.logits_of(exact, ids) for ids in prompts]


LOADS: Mapping[str, Any] = {"torch": portable.load, "cpu": cpu.load}


@pytest.fixture(scope="module", params=list(WeightsFormat))
def weights(request: pytest.FixtureRequest) -> WeightsFormat:
    return request.param


@pytest.fixture(scope="module", params=list(LOADS))
def runner(request: pytest.FixtureRequest, weights: WeightsFormat, bundled: OpenedModel, kernel_cache: Path) -> Iterator[Any]:
    name = request.param
    if name == "cpu" and not cpu.runs_here():
        pytest.skip("this processor has no AVX2")
    if name == "torch" and weights is not WeightsFormat.BF16:
        pytest.skip("torch holds bf16")
    loaded = LOADS[name](bundled.weights, hf.options(bundled.spec, weights, kernel_cache))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def series(bundled: OpenedModel, exact: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, answer, leads) of the reference."""
    prompts = [bundled.tokenizer.encode(text) for text in SERIES]
    return [(ids, *hf.greedy_of(exact, ids, 8)) for ids in prompts]


@pytest.mark.sampled(2, by="weights")
def test_logits_over_real_prompts(runner: Any, weights: WeightsFormat, prompts: list[list[int]], exact_logits: list[hf.Logits]) -> None:
    """In standard deviations of the logits.

    Kernels err 0.01 to 0.02 where activations are bf16 or int16. Our own int4 takes them as int8, as llama.cpp does, and errs 0.03
    (bench/RESULTS.md has both over longer texts). 4-bit groups held as int8 are rounded once more.
    """
    pairs = list(zip([hf.ours(runner, ids) for ids in prompts], exact_logits, strict=True))
    errors = np.concatenate([np.sqrt(np.square(found - theirs).mean(1)) / theirs.std() for found, theirs in pairs])
    agree = np.concatenate([found.argmax(1) == theirs.argmax(1) for found, theirs in pairs])
    # As stored, the bundled model is in four bits.
    coarse = weights is not WeightsFormat.BF16
    assert float(np.median(errors)) < (0.06 if coarse else 0.03)
    # A single place, where what the rounding of a few weights does is luck.
    assert float(errors.max()) < (0.35 if coarse else 0.25)
    assert float(agree.mean()) > 0.93


@pytest.mark.sampled(2, by="weights")
def test_greedy_answers(runner: Any, series: list[tuple[list[int], list[int], list[float]]]) -> None:
    """Up to the reference's first near tie, from where rounding decides."""
    compared = 0
    for ids, answer, leads in series:
        clear = next((place for place, lead in enumerate(leads) if lead < NEAR_TIE), len(leads))
        assert hf.our_greedy(runner, ids, len(answer))[:clear] == answer[:clear]
        compared += clear
    assert compared >= 6


@pytest.mark.sampled(2, by="weights")
def test_the_answer_reads(runner: Any, bundled: OpenedModel) -> None:
    prompt = bundled.tokenizer.render_chat([{"role": "user", "content": QUESTION}])
    answer = hf.our_greedy(runner, prompt, 12)
    assert "Paris" in b"".join(map(bundled.tokenizer.token_bytes, answer)).decode()


CONTINUATIONS = (
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small green apple"),
    ("def add(a, b):\n    return", " a + b\n"),
    ("One, two, three, four,", " five, six, seven"),
    ("Água ferve a 100", " graus Celsius \U0001f321"),
)
LIKELIHOOD_ERROR = 0.5
"""Of a token's log probability, at most, where activations have eight bits; a fifth of it in the mean."""


@pytest.fixture(scope="module")
def api(paceline_home: Path) -> Iterator[Served[EngineHost]]:
    node = build_node(NodeSettings(kv_tokens=4096, context=1024, max_running=8, max_waiting=8))
    served = Served(node.host)
    yield served
    served.close()
    assert node.close()


@pytest.mark.parametrize("most", [1, 0])
def test_the_likelihoods_of_texts_are_transformers(api: Served[EngineHost], bundled: OpenedModel, exact: Any, most: int) -> None:
    """As lm-eval's `local-completions` asks, and as it reads what comes: it adds up what stands behind the context, without the token drawn."""
    before = [bundled.tokenizer.encode(context) for context, _ in CONTINUATIONS]
    whole = [bundled.tokenizer.encode(context + text) for context, text in CONTINUATIONS]
    assert all(ids[: len(context)] == context for ids, context in zip(whole, before, strict=True))
    asked = {"model": bundled.name, "prompt": whole, "temperature": 0, "max_tokens": most, "logprobs": 3, "seed": 1234, "echo": True}
    choices = api.http.post("/v1/completions", json=asked).json()["choices"]
    errors: list[float] = []
    compared = 0
    for choice, ids, context in zip(sorted(choices, key=lambda one: one["index"]), whole, before, strict=True):
        theirs = torch.log_softmax(torch.from_numpy(hf.logits_of(exact, ids)), dim=-1).numpy()
        expected = [float(theirs[place - 1, token]) for place, token in enumerate(ids) if place]
        shown = choice["logprobs"]
        found, tops = shown["token_logprobs"], shown["top_logprobs"]
        assert len(found) == len(tops) == len(shown["tokens"]) == len(shown["text_offset"]) == len(ids) + most
        assert (found[0], tops[0]) == (None, None)
        errors += [abs(one - other) for one, other in zip(found[1 : len(ids)], expected, strict=True)]
        end = len(found) - most
        likelihood = sum(found[len(context) : end])
        assert likelihood == pytest.approx(sum(expected[len(context) - 1 :]), abs=LIKELIHOOD_ERROR * (len(ids) - len(context)))
        # Whether the model would have written it, as lm-eval sees that, but where the reference hesitates.
        for place in range(len(context), end):
            row = theirs[place - 1]
            second, first = np.partition(row, -2)[-2:]
            best = max(tops[place].values())
            assert best == pytest.approx(float(first), abs=LIKELIHOOD_ERROR)
            assert 1 <= len(tops[place]) <= 3, "ids that read the same are one"
            if first - second > NEAR_TIE:
                assert (found[place] == best) == (int(row.argmax()) == ids[place])
                compared += 1
    assert compared >= 8
    assert max(errors) < LIKELIHOOD_ERROR
    assert sum(errors) / len(errors) < LIKELIHOOD_ERROR / 5
