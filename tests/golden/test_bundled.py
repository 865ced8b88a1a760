"""The bundled model, from its GGUF, against transformers on the same file dequantised to float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.golden import reference as hf
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from paceline.backends import cpu
from paceline.backends import torch as portable
from paceline.core.model import WeightsFormat
from paceline.engine.executor import Path as KernelPath
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
        pytest.skip("this processor has no AVX512-BF16")
    loaded = LOADS[name](bundled.weights, hf.options(bundled.spec, weights, kernel_cache))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def series(bundled: OpenedModel, exact: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, answer, leads) of the reference."""
    prompts = [bundled.tokenizer.encode(text) for text in SERIES]
    return [(ids, *hf.greedy_of(exact, ids, 8)) for ids in prompts]


@pytest.mark.parametrize("path", list(KernelPath))
def test_logits_over_real_prompts(
    runner: Any, weights: WeightsFormat, prompts: list[list[int]], exact_logits: list[hf.Logits], path: KernelPath
) -> None:
    """In standard deviations of the logits.

    Kernels err 0.01 to 0.02 where activations are bf16 or int16. Our own int4 takes them as int8, as llama.cpp does, and errs 0.03
    (docs/performance.md has both over longer texts). 4-bit groups held as int8 are rounded once more.
    """
    pairs = list(zip([hf.ours(runner, ids, path) for ids in prompts], exact_logits, strict=True))
    errors = np.concatenate([np.sqrt(np.square(found - theirs).mean(1)) / theirs.std() for found, theirs in pairs])
    agree = np.concatenate([found.argmax(1) == theirs.argmax(1) for found, theirs in pairs])
    # As stored, the bundled model is in four bits.
    coarse = weights is WeightsFormat.INT8 or (weights in {WeightsFormat.INT4, WeightsFormat.STORED} and runner.one_path)
    assert float(np.median(errors)) < (0.06 if coarse else 0.03)
    # A single place, where what the rounding of a few weights does is luck.
    assert float(errors.max()) < (0.35 if coarse else 0.25)
    assert float(agree.mean()) > 0.93


def test_greedy_answers(runner: Any, series: list[tuple[list[int], list[int], list[float]]]) -> None:
    """Up to the reference's first near tie, from where rounding decides."""
    compared = 0
    for ids, answer, leads in series:
        clear = next((place for place, lead in enumerate(leads) if lead < NEAR_TIE), len(leads))
        assert hf.our_greedy(runner, ids, len(answer))[:clear] == answer[:clear]
        compared += clear
    assert compared >= 6


def test_the_answer_reads(runner: Any, bundled: OpenedModel) -> None:
    prompt = bundled.tokenizer.render_chat([{"role": "user", "content": QUESTION}])
    answer = hf.our_greedy(runner, prompt, 12)
    assert "Paris" in b"".join(map(bundled.tokenizer.token_bytes, answer)).decode()
