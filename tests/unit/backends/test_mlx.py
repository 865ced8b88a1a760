"""MLX's runner beside mlx-lm itself, and what it refuses. What every runner must do is in tests/conformance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from tests.conformance.suites.layer_runner import Rows, blocks, run, tokens
from tests.conformance.test_layer_runners import SPECS

from paceline.backends import mlx, table
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import DeviceKind, LoadOptions
from paceline.backends.table import Kernels, choose
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import Activation, LayerRange, ModelSpec, RopeSpec, WeightsFormat, YarnSpec, yarn_gain
from paceline.core.weights import rope_tables
from paceline.engine.executor import Path
from paceline.store.home import Home

BF16, INT4 = WeightsFormat.BF16, WeightsFormat.INT4
needs_mlx = pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
LLAMA = SPECS["llama"]


def loaded(spec: ModelSpec, weights: WeightsFormat = BF16) -> Any:
    return mlx.load(SeededWeights(spec), options(spec, weights))


def options(spec: ModelSpec, weights: WeightsFormat = BF16) -> LoadOptions:
    return LoadOptions(spec.all_layers, weights, 64, kernel_cache=Home.from_environment().kernels)


NEAR_TIE = 0.05
"""Standard deviations of the logits. Softmax over keys in blocks of 128 rounds otherwise than over as many as there are, and bf16 logits of a
random model are often a step apart, or none."""


def their_answer(spec: ModelSpec, weights: WeightsFormat, prompt: Sequence[int], length: int) -> list[int]:
    """Of mlx-lm's own model, cache and loop, up to its first near tie."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from paceline.backends.mlx.loading import load_model

    model = load_model(SeededWeights(spec), LoadOptions(spec.all_layers, weights, 1), None).edges
    answer: list[int] = []
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=length):
        ordered = np.sort(np.array(logprobs.astype(mx.float32)))
        if ordered[-1] - ordered[-2] < NEAR_TIE * ordered.std():
            break
        answer.append(int(token))
    return answer


@needs_mlx
@pytest.mark.parametrize(("family", "weights"), [("llama", BF16), ("qwen3", BF16), ("qwen3_moe", INT4), ("qwen2", INT4)])
def test_greedy_tokens_of_several_at_once_are_those_that_mlx_lm_generates(family: str, weights: WeightsFormat) -> None:
    spec = SPECS[family] if family != "qwen2" else replace(SPECS[family], head_dim=16)
    runner = loaded(spec, weights)
    prompts = [tokens(length, spec.vocab, length) for length in (5, 9, 17, 40, 77, 150)]
    tables, first = list[list[int]](), 0
    for prompt in prompts:
        tables.append(blocks(runner, len(prompt) + 8, first))
        first += len(tables[-1])
    answers = [[int(run(runner, Rows(ids, 0, at))[0].logits_TV[-1].argmax())] for ids, at in zip(prompts, tables, strict=True)]
    for step in range(3):
        batch = [Rows(own[-1:], len(ids) + step, at, Path.GENERATED) for own, ids, at in zip(answers, prompts, tables, strict=True)]
        for own, outcome in zip(answers, run(runner, *batch), strict=True):
            own.append(int(outcome.logits_TV[-1].argmax()))
    runner.close()
    theirs = [their_answer(spec, weights, prompt, 4) for prompt in prompts]
    assert [own[: len(other)] for own, other in zip(answers, theirs, strict=True)] == theirs
    assert sum(map(len, theirs)) >= 6


YARN = RopeSpec(1e4, yarn=YarnSpec(4.0, 64), gain=yarn_gain(4.0))


@needs_mlx
@pytest.mark.parametrize(
    "rope", [RopeSpec(1e4), RopeSpec(1e4, linear_factor=2.0), YARN, LLAMA.rope], ids=["plain", "linear", "yarn", "llama3"]
)
def test_heads_turn_as_they_do_elsewhere_each_row_by_its_own_position(rope: RopeSpec) -> None:
    import mlx.core as mx

    from paceline.backends.mlx.loading import load_model

    spec = replace(LLAMA, rope=rope)
    layer = load_model(SeededWeights(spec), options(spec), None).layers[0]
    positions = [0, 1, 77, 400]
    x_TD = np.random.default_rng(0).standard_normal((4, spec.head_dim), np.float32)
    turned = np.array(layer.self_attn.rope(mx.array(x_TD)[:, None, None], offset=mx.array(positions)))[:, 0, 0]
    cos, sin = (np.concatenate([table[positions]] * 2, 1) for table in rope_tables(rope, spec.head_dim, 512))
    half = spec.head_dim // 2
    wanted = x_TD * cos + np.concatenate([-x_TD[:, half:], x_TD[:, :half]], 1) * sin
    assert float(np.abs(turned - wanted).max()) < 1e-3


@needs_mlx
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(LLAMA, model_type="gemma3_text"), "gemma3_text was not brought here"),
        (replace(LLAMA, activation=Activation.GELU_TANH), "the activation gelu_tanh has no code"),
        (replace(LLAMA, rope=RopeSpec(1e4, divisors=(1.0,) * 16)), "rope with divisors"),
        (replace(LLAMA, rope=replace(YARN, gain=1.5)), "a gain of its own"),
        (replace(LLAMA, model_type="mixtral"), "mlx-lm's mixtral knows no rope scaling"),
    ],
)
def test_what_mlx_does_not_run_is_refused_by_name(spec: ModelSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--device mlx can't run this model here: .*{reason}"):
        choose(spec, BF16, asked=Kernels.MLX)
    with pytest.raises(UnsupportedModel, match=reason):
        loaded(spec)
    assert choose(spec, BF16, device=DeviceKind.MLX) is not Kernels.MLX


@needs_mlx
def test_a_model_with_other_shapes_than_mlx_lm_has_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"mlx-lm's qwen2 has .*k_proj\.bias of \(32,\), and this model of \(64,\)"):
        loaded(SPECS["qwen2"])


@needs_mlx
@pytest.mark.parametrize("changes", [{"hidden": 100}, {"ffn": 200}])
def test_rows_of_no_whole_groups_are_in_bf16_or_refused(changes: Any) -> None:
    spec = replace(LLAMA, **changes)
    loaded(spec).close()
    with pytest.raises(
        UnsupportedModel, match=r"MLX in 8 bits takes rows of whole groups of 32, unlike .*_proj\.weight's|embed_tokens"
    ) as refused:
        loaded(spec, WeightsFormat.INT8)
    assert refused.value.hint == "Ask for --weights bf16."


@needs_mlx
def test_experts_in_bf16_are_refused_where_mlx_has_no_gpu() -> None:
    from paceline.backends.mlx.loading import on_gpu

    if on_gpu():
        pytest.skip("MLX has a GPU here")
    with pytest.raises(UnsupportedModel, match="experts in bf16 on a GPU alone"):
        loaded(SPECS["qwen3_moe"])


@needs_mlx
def test_a_stage_that_holds_layers_alone_takes_no_memory_for_edges() -> None:
    import mlx.core as mx

    spec = replace(LLAMA, vocab=200_000)
    before = mx.get_active_memory()
    stage = mlx.load(SeededWeights(spec), LoadOptions(LayerRange(1, 2), BF16, 1, edges=False))
    assert mx.get_active_memory() - before < 2 * spec.vocab * spec.hidden
    with pytest.raises(RuntimeError, match="edges=False"):
        stage.embed(np.array([1], np.int32))


@needs_mlx
def test_a_macs_gpu_takes_bf16_and_the_processors_the_rest() -> None:
    assert choose(LLAMA, BF16, device=DeviceKind.MLX) is Kernels.MLX
    assert choose(LLAMA, WeightsFormat.STORED, device=DeviceKind.MLX) is not Kernels.MLX
    assert choose(LLAMA, WeightsFormat.STORED, asked=Kernels.MLX) is Kernels.MLX


def test_without_mlx_lm_asking_for_it_is_a_mistake_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="mlx and mlx-lm are not both installed"):
        choose(LLAMA, BF16, asked=Kernels.MLX)
