"""Every backend of this repository under the one suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from tests.conformance.suites.layer_runner import LayerRunnerSuite, Load, RunnerCase

from paceline.backends import cpu, mlx, torch
from paceline.backends.options import DeviceKind, LoadOptions, LoadProgress
from paceline.core.model import ModelSpec, MoeSpec, RopeSpec, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner
from paceline.store.home import Home

LLAMA = ModelSpec(
    model_type="llama", n_layers=3, hidden=96, n_heads=6, n_kv_heads=2, head_dim=32, ffn=160, vocab=307, max_context=512,
    rms_eps=1e-5, rope=RopeSpec(10_000.0, llama3=(8.0, 1.0, 4.0, 64)), tied_head=True,
)  # fmt: skip
SPECS = {
    "llama": LLAMA,
    "one head a KV head": replace(LLAMA, n_heads=3, n_kv_heads=3, tied_head=False),
    "qwen2": replace(LLAMA, model_type="qwen2", qkv_bias=True, rope=RopeSpec(1e6), tied_head=False),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=64),
    "qwen3_moe": replace(LLAMA, model_type="qwen3_moe", qk_norm=True, moe=MoeSpec(n_experts=6, top_k=2, ffn=64, norm_topk=True)),
}
INT4, INT8, BF16 = WeightsFormat.INT4, WeightsFormat.INT8, WeightsFormat.BF16


def _case(kind: str, load: Load, family: str, weights: WeightsFormat, *marks: pytest.MarkDecorator) -> Any:
    name = f"{kind}-{family.replace(' ', '_')}-{weights}"
    return pytest.param(RunnerCase(name, load, SPECS[family], weights), id=name, marks=marks)


TORCH = [_case("torch", torch.load, family, BF16) for family in ("llama", "qwen2", "qwen3_moe")]
_NO_KERNELS = pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")


def _compiled(source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None) -> LayerRunner[Any]:
    return cpu.load(source, replace(options, kernel_cache=Home.from_environment().kernels), progress)


CPU = [
    _case("cpu", _compiled, family, weights, _NO_KERNELS)
    for family, weights in [
        ("llama", INT4),
        ("llama", INT8),
        ("llama", BF16),
        ("one head a KV head", INT8),
        ("qwen2", INT4),
        ("qwen3", INT4),
        ("qwen3_moe", INT4),
    ]
]
MLX = [
    _case("mlx", mlx.load, family, weights, pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed"))
    for family, weights in [("llama", BF16), ("qwen3", BF16), ("qwen3_moe", INT4)]
]
CUDA = [
    _case("cuda", partial(torch.load, device=DeviceKind.CUDA), family, BF16, pytest.mark.gpu)
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe")
]


@pytest.fixture(scope="module", params=[*TORCH, *CPU, *MLX, *CUDA])
def case(request: pytest.FixtureRequest) -> RunnerCase:
    return request.param


@pytest.fixture(scope="module")
def runner(case: RunnerCase) -> Iterator[LayerRunner[Any]]:
    loaded = case.runner()
    yield loaded
    loaded.close()


@pytest.mark.sampled(5, by="case")
class TestLayerRunners(LayerRunnerSuite):
    """The suite, for each case."""
