from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.core.errors import ModelFileError, UnsupportedModel
from paceline.core.model import Activation, LowRank, MoeSpec, Multipliers, Norms, RopeSpec, WindowSpec, YarnSpec
from paceline.core.weights import DenseTensor
from paceline.store.digests import DigestCache
from paceline.store.hf_folder import JsonObject, SafetensorsWeights, spec_from_config

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
MIXTURES = {"qwen3_moe": MoeSpec(4, 2, 32, norm_topk=False), "mixtral": MoeSpec(4, 2, 96, norm_topk=True)}


def transformers_model(family: Any, **changes: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 80, "max_position_embeddings": 128,
    }  # fmt: skip
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family in {"mixtral", "gpt_oss"}:
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **changes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_what_transformers_saves_is_read_back(family: Any, sharded: Any, tmp_path: Path, digests: DigestCache) -> None:
    torch = pytest.importorskip("torch")
    model = transformers_model(family).to(torch.bfloat16 if sharded else torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="40KB" if sharded else "1GB")
    source = SafetensorsWeights(tmp_path, digests)
    assert len(source.files) > 1 if sharded else len(source.files) == 1
    assert source.tensor_type == ("BF16" if sharded else "F32")
    spec = source.spec
    assert (spec.model_type, spec.n_layers, spec.hidden, spec.head_dim, spec.vocab) == (family, 2, 64, 16, 80)
    assert spec.moe == MIXTURES.get(family)
    assert spec.qkv_bias == (family == "qwen2")
    compared = 0
    for name, tensor in model.state_dict().items():
        if name in source.names():
            read = source.read(name)
            assert isinstance(read, DenseTensor)
            stored = tensor.view(torch.int16).numpy().view(np.uint16) if sharded else tensor.numpy()
            np.testing.assert_array_equal(read.data, stored)
            compared += 1
    # transformers holds a mixture's experts stacked, and saves them one by one.
    assert compared == len(model.state_dict()) - (4 if family in MIXTURES else 0)
    if family in MIXTURES:
        down = source.read("model.layers.1.mlp.experts.3.down_proj.weight")
        assert isinstance(down, DenseTensor)
        assert down.data.shape == (64, MIXTURES[family].ffn)


def config(**changes: Any) -> Any:
    fields = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "vocab_size": 80, "max_position_embeddings": 8192, **changes,
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value is not ...}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeSpec(10000.0)),
        ({"rope_theta": 5e5}, RopeSpec(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(1e6)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(1e4, linear_factor=2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, RopeSpec(5e5, llama3=(8.0, 1.0, 4.0, 8192))),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, RopeSpec(5e5, llama3=(8.0, 1.0, 4.0, 8192))),
        ({"partial_rotary_factor": 0.5}, RopeSpec(1e4, dims=8)),
        ({"model_type": "glm4"}, RopeSpec(1e4, dims=8)),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 2048,
                    "attention_factor": 1.5,
                    "truncate": False,
                }
            },
            RopeSpec(1e4, yarn=YarnSpec(4.0, 2048, whole=False), gain=1.5),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}},
            RopeSpec(1e4, yarn=YarnSpec(4.0, 8192, fast=16.0), gain=0.1 * math.log(4) + 1),
        ),
        (
            {"model_type": "phi3", "original_max_position_embeddings": 2048, "rope_scaling": {"type": "su", "short_factor": [1.0] * 8}},
            RopeSpec(1e4, divisors=(1.0,) * 8, gain=math.sqrt(1 + math.log(4) / math.log(2048))),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_configurations(tmp_path: Path, changes: Any, expected: Any) -> None:
    assert spec_from_config(JsonObject(tmp_path, config(**changes))).rope == expected


def test_a_rope_for_longer_contexts_is_kept_beside(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    changes = {"model_type": "phi3", "original_max_position_embeddings": 2048, "rope_scaling": scaling}
    spec = spec_from_config(JsonObject(tmp_path, config(**changes, sliding_window=4096)))
    assert (spec.max_context, spec.of_context(2048), spec.window) == (2048, spec, WindowSpec(4096, (True, True)))
    longer = spec.of_context(4000)
    assert (longer.max_context, longer.rope.divisors, longer.rope.gain) == (8192, (4.0,) * 8, spec.rope.gain)
    assert longer.of_context(10**6) is longer


def test_gemma_of_texts_and_images_is_read_for_its_texts(tmp_path: Path, digests: DigestCache) -> None:
    torch = pytest.importorskip("torch")
    model = transformers_model("gemma3_text", sliding_window=16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(0, 0.5)
    tensors = {f"language_model.{name}": tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file({**tensors, "vision_tower.patch.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    texts = {
        key: value for key, value in model.config.to_dict().items() if key not in {"layer_types", "tie_word_embeddings", "rope_parameters"}
    }
    written = {"model_type": "gemma3", "text_config": {**texts, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    source = SafetensorsWeights(tmp_path, digests)
    spec = source.spec
    assert (spec.model_type, spec.tied_head, spec.scales) == ("gemma3_text", True, Multipliers(8.0, 1 / 16))
    assert (spec.norms, spec.activation, spec.rope) == (Norms.AROUND, Activation.GELU_TANH, RopeSpec(1e6, linear_factor=8.0))
    assert spec.window == WindowSpec(16, (True, True), RopeSpec(1e4))
    norm = source.read("model.layers.1.pre_feedforward_layernorm.weight")
    assert isinstance(norm, DenseTensor)
    np.testing.assert_array_equal(norm.data, tensors["language_model.model.layers.1.pre_feedforward_layernorm.weight"] + np.float32(1))


@pytest.mark.parametrize(("whole", "texts", "words"), [("mistral3", "mistral", ""), ("qwen3_vl", "qwen3_vl_text", "model.")])
def test_what_sees_images_too_is_read_for_its_texts(whole: Any, texts: Any, words: str, tmp_path: Path, digests: DigestCache) -> None:
    pytest.importorskip("torch")
    model = transformers_model("qwen3" if texts == "qwen3_vl_text" else texts)
    stored = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    inner = {
        f"{words}language_model.{name.removeprefix('model.') if words else name}": tensor
        for name, tensor in stored.items()
        if name != "lm_head.weight"
    }
    inner["lm_head.weight" if words else "language_model.lm_head.weight"] = stored["lm_head.weight"]
    images = {f"{words or 'vision_tower.'}visual.patch.weight": np.ones((2, 2), np.float32)}
    save_file(inner | images, tmp_path / "model.safetensors")
    fields = {key: value for key, value in model.config.to_dict().items() if key != "tie_word_embeddings"} | {"model_type": texts}
    written = {"model_type": whole, "text_config": fields, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(written))
    source = SafetensorsWeights(tmp_path, digests)
    assert (source.spec.model_type, source.spec.tied_head, source.spec.qk_norm) == (texts, False, texts == "qwen3_vl_text")
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        read = source.read(name)
        assert isinstance(read, DenseTensor)
        np.testing.assert_array_equal(read.data, stored[name])


@pytest.mark.parametrize(
    ("family", "theirs"),
    [("phi3", {"q": ("qkv_proj", 0), "v": ("qkv_proj", 96), "up": ("gate_up_proj", 96)}), ("glm4", {"gate": ("gate_up_proj", 0)})],
)
def test_fused_matrices_come_apart(family: Any, theirs: Any, tmp_path: Path, digests: DigestCache) -> None:
    pytest.importorskip("torch")
    model = transformers_model(family, pad_token_id=0)
    model.save_pretrained(tmp_path)
    source = SafetensorsWeights(tmp_path, digests)
    stored = {name.rpartition("layers.1.")[2]: tensor.numpy() for name, tensor in model.state_dict().items()}
    for name, (fused, start) in theirs.items():
        where = "self_attn" if name in "qkv" else "mlp"
        part = source.read(f"model.layers.1.{where}.{name}_proj.weight")
        assert isinstance(part, DenseTensor)
        np.testing.assert_array_equal(part.data, stored[f"{where}.{fused}.weight"][start : start + len(part.data)])


ALL, LAST = (True, True), (False, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, WindowSpec(4096, ALL)),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 8192}, None),
        ({"model_type": "mistral"}, WindowSpec(4096, ALL)),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1}, WindowSpec(4096, LAST)),
        ({"model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, WindowSpec(64, LAST)),
    ],
)
def test_windows_are_those_of_the_configuration(tmp_path: Path, changes: Any, expected: Any) -> None:
    spec = spec_from_config(JsonObject(tmp_path, config(**changes)))
    assert (spec.window, spec.max_context) == (expected, 8192)


def test_smollm3_has_its_embedding_for_a_head_where_its_file_does_not_say(tmp_path: Path) -> None:
    assert spec_from_config(JsonObject(tmp_path, config(model_type="smollm3", tie_word_embeddings=...))).tied_head


MINICPM3 = {
    "model_type": "minicpm3",
    "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 16, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, Multipliers(12, None, 1.4 / math.sqrt(2), 256 / 64)),
        ({"scale_emb": 1, "scale_depth": None, "dim_model_base": None}, Multipliers()),
        ({"scale_depth": 2.0, "dim_model_base": 32, "head_dim": 32}, Multipliers(12, None, math.sqrt(2), 0.5)),
    ],
)
def test_minicpm_is_read_as_transformers_has_it(tmp_path: Path, changes: Any, scales: Multipliers) -> None:
    spec = spec_from_config(JsonObject(tmp_path, config(**MINICPM3, **changes)))
    assert (spec.low, spec.head_dim, spec.value_dim) == (LowRank(768, 256, 16, 1e-6), 96, 16)
    assert (spec.rope, spec.max_context) == (RopeSpec(10000.0, dims=32, divisors=(1.5,) * 16), 8192)
    assert spec.scales.residual == pytest.approx(scales.residual)
    assert replace(spec.scales, residual=scales.residual) == scales


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "minicpm3", "q_lora_rank": None}, UnsupportedModel, "its queries are one product"),
        ({"model_type": "minicpm3", "num_key_value_heads": 2}, ModelFileError, "4 heads and 2 KV heads"),
        ({"model_type": "minicpm3", "qk_nope_head_dim": 0}, ModelFileError, "32 of 32 turn"),
        ({"model_type": "minicpm3", "kv_lora_rank": -1}, ModelFileError, "rank of keys and values = -1"),
        ({"model_type": "minicpm3", "scale_depth": 0}, ModelFileError, "scale_depth is 0"),
        ({"model_type": "minicpm3", "attention_bias": True}, UnsupportedModel, "attention_bias"),
        (
            {"model_type": "minicpm3", "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}},
            UnsupportedModel,
            "mscale_all_dim",
        ),
        ({"model_type": "gemma2"}, UnsupportedModel, "'gemma2'"),
        ({"model_type": ...}, ModelFileError, "model_type is missing"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantization_config"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, UnsupportedModel, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, ModelFileError, "contradict"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 64.0}}, ModelFileError, "contradict"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ModelFileError, "original_max"),
        ({"model_type": "granite", "logits_scaling": -1.0}, ModelFileError, "logits_scaling"),
        ({"rope_scaling": {"rope_type": "llama3"}}, ModelFileError, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelFileError, "factor"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, ModelFileError, "2 layers and 3 no_rope_layers"),
        ({"model_type": "seed_oss", "attention_out_bias": True}, UnsupportedModel, "attention_out_bias"),
        ({"model_type": "mistral3", "text_config": {"rope_parameters": {"llama_4_scaling_beta": 0.1}}}, ModelFileError, "missing"),
        ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}, UnsupportedModel, "'ministral3'"),
        (
            {"model_type": "qwen3_vl", "text_config": {}, "quantization_config": {"quant_method": "fp8"}},
            UnsupportedModel,
            "quantization_config",
        ),
        ({"partial_rotary_factor": 1.5}, ModelFileError, "1.5"),
        ({"partial_rotary_factor": 0.45}, ModelFileError, "rope turns 7 of 16"),
        ({"model_type": "glm4", "rope_parameters": {"llama_4_scaling_beta": 0.1}}, UnsupportedModel, "llama_4"),
        ({"model_type": "qwen3", "sliding_window": 64, "layer_types": ["sliding_attention"]}, ModelFileError, "2 layers and 1 layer_types"),
        ({"hidden_size": "64"}, ModelFileError, "hidden_size is '64'"),
        ({"vocab_size": ...}, ModelFileError, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, ModelFileError, "layers = 0"),
        ({"num_hidden_layers": 10**30}, ModelFileError, "layers = 1000"),
        ({"rms_norm_eps": 10**400}, ModelFileError, "rms_norm_eps"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 10**700}, ModelFileError, "its numbers"),
        ({"rope_theta": float("nan")}, ModelFileError, "rope base is nan"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 8}, ModelFileError, "8 of 4"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, UnsupportedModel, "some of its layers"),
    ],
)
def test_configurations_that_can_not_be_run_are_refused(tmp_path: Path, changes: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        spec_from_config(JsonObject(tmp_path / "config.json", config(**changes)))
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


def test_damage_is_named(make_folder: Any, tmp_path: Path, digests: DigestCache) -> None:
    folder = make_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    n = struct.unpack("<Q", whole[:8])[0]
    cases = {
        b"": "truncated",
        whole[:-4]: "truncated: tensor",
        struct.pack("<Q", 1 << 62) + whole[8:]: "truncated: its table should have",
        struct.pack("<Q", n) + b"x" * n + whole[8 + n :]: "not valid JSON",
        struct.pack("<Q", n) + b"[" * n + whole[8 + n :]: "not valid JSON",
        struct.pack("<Q", 2) + b"[]": "not a JSON object",
        struct.pack("<Q", 2) + b"{}": "missing",
    }
    for data, words in cases.items():
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=words) as caught:
            SafetensorsWeights(folder, digests)
        assert str(path) in caught.value.message
    path.unlink()
    with pytest.raises(ModelFileError, match="no safetensors file"):
        SafetensorsWeights(folder, digests)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json can't be read"):
        SafetensorsWeights(folder, digests)


def test_tensors_are_held_against_the_configuration(make_folder: Any, gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    tensors = gguf_model().tensors
    with pytest.raises(ModelFileError, match=r"model\.layers\.2\.input_layernorm\.weight and 8 more"):
        SafetensorsWeights(make_folder(tmp_path / "a", tensors, num_hidden_layers=3), digests)
    with pytest.raises(ModelFileError, match=r"mlp\.gate_proj\.weight has shape \[96, 64\]"):
        SafetensorsWeights(make_folder(tmp_path / "b", tensors, intermediate_size=100), digests)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.self_attn\.sinks"):
        SafetensorsWeights(make_folder(tmp_path / "c", tensors | {"model.layers.0.self_attn.sinks": np.zeros(4, np.float32)}), digests)
    with pytest.raises(UnsupportedModel, match="type I64"):
        SafetensorsWeights(make_folder(tmp_path / "d", tensors | {"model.norm.weight": np.zeros(64, np.int64)}), digests)
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    assert "model.norm.weight" in SafetensorsWeights(make_folder(tmp_path / "e", tensors | inverse), digests).names()


def test_an_index_may_not_lead_elsewhere(make_folder: Any, gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    folder = make_folder(tmp_path / "m")
    (tmp_path / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for name in ("../outside.safetensors", "absent.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ModelFileError, match="which its index names"):
            SafetensorsWeights(folder, digests)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ModelFileError, match="weight_map"):
        SafetensorsWeights(folder, digests)


def test_the_digest_changes_with_weights_and_configuration(make_folder: Any, gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    a = SafetensorsWeights(make_folder(tmp_path / "a"), digests).digest
    assert SafetensorsWeights(make_folder(tmp_path / "b"), digests).digest == a
    assert SafetensorsWeights(make_folder(tmp_path / "c", gguf_model(seed=1).tensors), digests).digest != a
    assert SafetensorsWeights(make_folder(tmp_path / "d", rope_theta=20000.0), digests).digest != a


def test_only_what_is_asked_for_is_read(gguf_model: Any, make_folder: Any, tmp_path: Path, digests: DigestCache) -> None:
    folder = make_folder(tmp_path / "m")
    tensors = gguf_model().tensors
    first = {name: value for name, value in tensors.items() if ".layers.1." not in name}
    save_file(first, folder / "a.safetensors")
    save_file({name: value for name, value in tensors.items() if name not in first}, folder / "b.safetensors")
    files = {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    source = SafetensorsWeights(folder, digests)
    os.truncate(folder / "b.safetensors", 0)
    for name, value in first.items():
        read = source.read(name)
        assert isinstance(read, DenseTensor)
        np.testing.assert_array_equal(read.data, value)
    with pytest.raises(ModelFileError, match="cut short"):
        source.read("model.layers.1.mlp.up_proj.weight")
