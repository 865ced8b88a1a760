"""What the torch kernels make of a file's types: its quality is kept matrix by matrix, and what they take is what was planned."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.quants import dequantize, quantize

from paceline.backends.holding import part_bytes, torch_bytes, torch_formats
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions, PromptWeights
from paceline.backends.quantize import to_grouped
from paceline.backends.torch import load
from paceline.backends.torch.linear import PackedMatrix, make_linear
from paceline.core.model import LayerRange, ModelSpec, RopeSpec, WeightsFormat
from paceline.core.weights import BlockTensor, StoredTensor
from paceline.engine.executor import Path
from paceline.engine.local import LayerRunner, row_plan

SPEC = ModelSpec("llama", 3, 256, 4, 2, 64, 512, 300, 512, 1e-5, RopeSpec(10000.0), tied_head=False)
CPU = torch.device("cpu")
Float32 = npt.NDArray[np.float32]


def q6_k(weights_NK: Float32) -> npt.NDArray[np.uint8]:
    """Blocks of Q6_K: a scale for each 16 weights, an eighth of a byte of it at a time."""
    halves = weights_NK.reshape(-1, 16, 16)
    largest = np.abs(halves).max(2) / 31
    d = (largest.max(1) / 127).astype(np.float16)
    subs = np.maximum(1, np.rint(largest / d[:, None].astype(np.float32))).astype(np.int8)
    steps = d[:, None].astype(np.float32) * subs
    codes = (np.clip(np.rint(halves / steps[..., None]), -32, 31).astype(np.int16) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([codes[:, :, 0] & 15 | (codes[:, :, 2] & 15) << 4, codes[:, :, 1] & 15 | (codes[:, :, 3] & 15) << 4], 2)
    high = sum((codes[:, :, i] >> 4) << 2 * i for i in range(4))
    blocks = np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), subs.view(np.uint8), d[:, None].view(np.uint8)], 1, dtype=np.uint8)  # type: ignore[union-attr]
    return blocks.reshape(len(weights_NK), -1)


def stored(kind: str, weights_NK: Float32) -> BlockTensor:
    rows = q6_k(weights_NK) if kind == "Q6_K" else quantize(weights_NK, gguf.GGMLQuantizationType[kind])
    return BlockTensor(kind, weights_NK.shape, rows)


def error(found: Float32, weights: Float32) -> float:
    return float(np.linalg.norm(found - weights) / np.linalg.norm(weights))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q6_K", "Q8_0"])
def test_the_file_s_quality_is_kept(kind: str) -> None:
    rng = np.random.default_rng(5)
    weights_NK = rng.standard_normal((128, 1024), np.float32)
    weights_NK[rng.random(weights_NK.shape) < 0.002] *= 6  # as models have
    tensor = stored(kind, weights_NK)
    own = error(dequantize(tensor.rows_NB, gguf.GGMLQuantizationType[kind]).reshape(weights_NK.shape), weights_NK)
    held = torch_formats(SPEC, WeightsFormat.STORED, lambda _: kind)["model.layers.0.mlp.down_proj.weight"]
    assert held is WeightsFormat.INT8
    matrix = PackedMatrix([to_grouped(tensor, 8)])
    prompt = matrix.dequantise(torch.empty(matrix.padded, matrix.k, dtype=torch.bfloat16))[:128].float().numpy()
    # The other path's scales are bf16, and its codes are the same.
    grouped = to_grouped(tensor, 8)
    scales_NG = torch.from_numpy(grouped.scale_NG.astype(np.float32)).bfloat16().float().numpy()
    generated = grouped.codes_NK.astype(np.float32) * scales_NG.repeat(32, 1)
    assert error(prompt, weights_NK) <= 1.05 * own
    assert error(generated, weights_NK) <= 1.05 * own
    assert own < 0.06, "the blocks are what their type allows"
    assert torch.equal(matrix.rows(torch.arange(128)).float(), torch.from_numpy(prompt))


def test_matrices_of_several_formats_are_fused() -> None:
    rng = np.random.default_rng(7)
    parts = [stored(kind, rng.standard_normal((rows, 256), np.float32)) for kind, rows in (("Q4_0", 96), ("Q4_0", 32), ("Q6_K", 40))]
    formats = [WeightsFormat.INT4, WeightsFormat.INT4, WeightsFormat.INT8]
    bias_N, x_TK = torch.randn(168).bfloat16(), torch.randn(5, 256).bfloat16()
    fused = make_linear(list(zip(parts, formats, strict=True)), bias_N, None, CPU)
    alone = [make_linear([(part, weights)], None, None, CPU) for part, weights in zip(parts, formats, strict=True)]
    for path in Path:
        assert torch.equal(fused(x_TK, path), torch.cat([one(x_TK, path) for one in alone], 1) + bias_N)


class Mixed(SeededWeights):
    """Weights of the types that a file of llama.cpp's `Q4_K_M` kind has; those of four bits under a name that gguf-py can quantise to."""

    def __init__(self, spec: ModelSpec, type_of: Callable[[str], str]) -> None:
        super().__init__(spec)
        self._type_of = type_of

    def type_of(self, name: str) -> str:
        return self._type_of(name) if len(self.shape_of(name)) == 2 else "F32"

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        plain = super().read(name, rows, columns)
        assert not isinstance(plain, BlockTensor)
        return plain if self.type_of(name) == "F32" else stored(self.type_of(name), np.asarray(plain.data, np.float32))


def q4_k_m(name: str) -> str:
    return "Q6_K" if ("v_proj" in name and "layers.1." not in name) or "embed" in name else "Q4_0"


def loaded(source: SeededWeights, layers: LayerRange | None = None, **changes: Any) -> LayerRunner[Any]:
    options = LoadOptions(layers or source.spec.all_layers, WeightsFormat.STORED, 8, edges=layers is None)
    return load(source, replace(options, **changes))


def answer(runner: LayerRunner[Any], path: Path) -> bytes:
    ids, table = np.arange(40, dtype=np.int32), np.arange(3, dtype=np.int32).reshape(1, -1)
    out = runner.run_layers(runner.embed(ids), row_plan([40], [0], [int(path)], table))
    return runner.logits(out, np.arange(40, dtype=np.int32)).tobytes()


def test_a_mixed_file_s_id_is_its_own_and_the_same_for_all_of_its_stages() -> None:
    mixed, alike = Mixed(SPEC, q4_k_m), Mixed(SPEC, lambda _: "Q4_0")
    whole, stage, uniform = loaded(mixed), loaded(mixed, LayerRange(1, 2)), loaded(alike)
    assert whole.numerics_id == stage.numerics_id != uniform.numerics_id
    assert uniform.numerics_id == loaded(alike, weights=WeightsFormat.INT4).numerics_id
    assert whole.holds_identity
    four = loaded(mixed, weights=WeightsFormat.INT4)
    for path in Path:
        assert answer(whole, path) != answer(four, path)
        assert answer(whole, path) == answer(loaded(mixed, prompt_weights=PromptWeights.STREAMED), path)


def test_what_is_planned_is_what_is_held() -> None:
    mixed = Mixed(SPEC, q4_k_m)
    runner: Any = loaded(mixed, prompt_weights=PromptWeights.STREAMED)
    held = 0
    seen: set[int] = set()

    def count(value: Any) -> None:
        nonlocal held
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            held += value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for each in value:  # pyright: ignore[reportUnknownVariableType]
                count(each)
        elif (
            hasattr(value, "__dict__")
            and type(value).__module__.startswith("paceline.backends.torch")
            and type(value).__name__ != "Scratch"
        ):
            for each in vars(value).values():
                count(each)

    model = runner._model
    count(model.layers)
    for edge in (model.edges.embedding, model.edges.norm, model.edges.head):
        count(edge)
    planned = part_bytes(torch_bytes(SPEC, torch_formats(SPEC, WeightsFormat.STORED, mixed.type_of)), SPEC.all_layers, edges=True)
    assert held == planned
