"""Seeded models: every type opens and has the spread asked for, answers go on, and a seed gives the same bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tests.fakes.seeded_blocks import BLOCK_TYPES, DENSE, random_tensor
from tests.fakes.seeded_models import PRESETS, TINY, shape, stored_type, tensors, write_folder, write_gguf

from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import ModelSpec
from paceline.engine.engine import Engine
from paceline.machine.build import build_engine
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import open_model

FAMILIES = {
    "llama": TINY,
    "tied": shape("tiny", tied_head=True),
    "llama3": shape("llama-1b", n_layers=2, hidden=256, n_heads=4, n_kv_heads=2, ffn=512, vocab=1024),
    "qwen2": shape("tiny", model_type="qwen2", qkv_bias=True),
    "qwen3": shape("qwen3-8b", n_layers=2, hidden=256, n_heads=4, n_kv_heads=2, head_dim=64, ffn=512, vocab=1024),
}


def read_back(path: Path) -> ModelSpec:
    """GGUF holds the norms' epsilon in float32."""
    found = open_model(str(path)).spec
    return replace(found, rms_eps=float(f"{found.rms_eps:.6g}"))


def greedy(engine: Engine, prompt: tuple[int, ...], length: int) -> Iterator[int]:
    engine.add(GenerationRequest(RequestId("greedy"), prompt, length, SamplingParams(temperature=0.0), draft="off"))
    while engine.has_work:
        for chunk in engine.step():
            yield from chunk.token_ids


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *sorted(DENSE)])
def test_weights_of_every_type_have_the_spread_asked_for(kind: str) -> None:
    raw = np.concatenate(list(random_tensor(kind, (512, 1024), 1 / 64, (0, 1), quiet_rows=64)))
    weights = dequantize(raw.reshape(512, -1), gguf.GGMLQuantizationType[kind]) * 64
    assert np.isfinite(weights).all()
    assert 0.8 < weights[64:].std() < 1.25
    assert abs(weights[64:].mean()) < 0.03
    assert weights[:64].std() < 0.2


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES.keys())
def test_greedy_answers_go_on(spec: ModelSpec, tmp_path: Path) -> None:
    """They neither end nor fall into one token, and depend on the prompt."""
    path = write_gguf(tmp_path / "model.gguf", spec, "Q8_0")
    assert read_back(path) == spec
    built = build_engine(NodeSettings(str(path), kv_tokens=1024, context=256, threads=1))
    try:
        answers = [tuple(greedy(built.engine, (17, 20, end), 96)) for end in (30, 31)]
    finally:
        built.executor.close()
    assert [len(answer) for answer in answers] == [96, 96]
    assert all(Counter(answer).most_common(1)[0][1] < 24 for answer in answers)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("types", ["Q4_K_M", "Q5_K_M", "IQ4_XS", "BF16"])
def test_a_seed_gives_the_same_bytes(types: str, tmp_path: Path) -> None:
    written = [write_gguf(tmp_path / f"{name}.gguf", TINY, types, seed).read_bytes() for name, seed in (("a", 1), ("a", 1), ("a", 2))]
    first, again, other = (hashlib.sha256(each).hexdigest() for each in written)
    assert first == again != other


def test_a_folder_holds_what_a_file_does(tmp_path: Path) -> None:
    spec = FAMILIES["qwen3"]
    folder, file = (
        open_model(str(path)) for path in (write_folder(tmp_path / "folder", spec), write_gguf(tmp_path / "file.gguf", spec, "BF16"))
    )
    assert folder.spec == spec
    assert folder.tokenizer.encode("A file 12.") == file.tokenizer.encode("A file 12.")
    assert set(folder.weights.names()) == set(file.weights.names())
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(folder.weights.read(name).data, file.weights.read(name).data)


@pytest.mark.parametrize(("preset", "gigabytes"), [("llama-8b", 4.9), ("qwen3-8b", 5.0), ("qwen3-30b-a3b", 18.6), ("llama-1b", 0.8)])
def test_presets_are_as_large_as_the_real_files(preset: str, gigabytes: float) -> None:
    spec = PRESETS[preset]
    kinds = {tensor: stored_type(tensor, spec, "Q4_K_M") for tensor in tensors(spec)}
    bits = sum(
        np.prod(tensor.shape, dtype=float) / (of := gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]])[0] * of[1]
        for tensor, kind in kinds.items()
    )
    assert bits / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_the_mix_is_that_of_llama_cpp() -> None:
    spec = PRESETS["llama-8b"]
    generous = [tensor.name for tensor in tensors(spec) if stored_type(tensor, spec, "Q4_K_M") == "Q6_K"]
    layers = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert generous == [*(f"blk.{layer}.{part}.weight" for layer in layers for part in ("attn_v", "ffn_down")), "output.weight"]
