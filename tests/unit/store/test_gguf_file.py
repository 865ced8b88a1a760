from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from paceline.core.errors import ModelFileError, UnsupportedModel
from paceline.core.model import Activation, LowRank, MoeSpec, Multipliers, Norms, RopeSpec, WindowSpec, YarnSpec
from paceline.core.weights import TENSOR_TYPES, BlockTensor, DenseTensor, StoredTensor, inverse_frequencies
from paceline.store.digests import DigestCache
from paceline.store.gguf_file import check_beginning, open_gguf
from paceline.store.gguf_header import read_header
from paceline.store.home import Home
from paceline.store.tensor_files import StoredAt


def as_float32(tensor: StoredTensor) -> np.ndarray:
    if isinstance(tensor, BlockTensor):
        return dequantize(tensor.rows_NB, gguf.GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
    if tensor.dtype == "bf16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return tensor.data.astype(np.float32)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "olmo2", "phi3", "granite", "glm4", "minicpm3"])
@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_every_tensor_comes_back_under_its_own_name(gguf_model: Any, tmp_path: Path, digests: DigestCache, arch: Any, quant: Any) -> None:
    model = gguf_model(arch, quant, head=arch == "qwen3")
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    assert set(source.names()) == set(model.tensors)
    for name, expected in model.tensors.items():
        np.testing.assert_array_equal(as_float32(source.read(name)), expected, err_msg=name)
    assert source.spec.tied_head == (arch != "qwen3")
    assert source.spec.qkv_bias == (arch in {"qwen2", "glm4"})
    assert source.spec.qk_norm == (arch.startswith("qwen3") or arch in {"gemma3", "olmo2"})
    assert source.spec.rope.dims == (8 if arch in {"glm4", "minicpm3"} else None)
    assert source.spec.low == (LowRank(96, 32, 16) if arch == "minicpm3" else None)
    for name, part in (("self_attn.q_proj", slice(5, 43)), ("self_attn.k_proj", slice(30, None)), ("mlp.up_proj", slice(1, 2))):
        if (arch == "qwen3moe" and name.startswith("mlp")) or (arch == "minicpm3" and name.startswith("self_attn")):
            continue
        np.testing.assert_array_equal(
            as_float32(source.read(f"model.layers.1.{name}.weight", part)), model.tensors[f"model.layers.1.{name}.weight"][part]
        )
    assert source.spec.moe == (MoeSpec(3, 2, 96, norm_topk=True) if arch == "qwen3moe" else None)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "as old files have them"])
@pytest.mark.parametrize("quant", ["F32", "Q4_0"])
def test_a_mixture_of_llamas_is_mixtral(gguf_model: Any, tmp_path: Path, digests: DigestCache, quant: Any, stacked: bool) -> None:
    model = gguf_model("llama", quant, mixture=True, stacked=stacked)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    assert (source.spec.model_type, source.spec.moe) == ("mixtral", MoeSpec(3, 2, 96, norm_topk=True))
    assert set(source.names()) == set(model.tensors)
    for name, expected in model.tensors.items():
        np.testing.assert_array_equal(as_float32(source.read(name)), expected, err_msg=name)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("arch", ["gpt-oss", "qwen3moe"])
def test_experts_come_apart_with_their_biases(gguf_model: Any, tmp_path: Path, digests: DigestCache, arch: Any, fused: bool) -> None:
    model = gguf_model(arch, "MXFP4", fused=fused, head=True)
    path = model.write(tmp_path / "m.gguf")
    source = open_gguf(path, digests)
    assert set(source.names()) == set(model.tensors)
    for name, expected in model.tensors.items():
        np.testing.assert_array_equal(as_float32(source.read(name)), expected, err_msg=name)
    assert check_beginning(path, path.stat().st_size)


def test_gpt_oss_is_what_its_family_leaves_unsaid(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("gpt-oss", "MXFP4", head=True)
    scaling = {"type": "yarn", "factor": 32.0, "original_context_length": 32}
    model.metadata |= {f"rope.scaling.{key}": value for key, value in scaling.items()} | {"attention.sliding_window": 16}
    spec = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec
    assert (spec.qkv_bias, spec.out_bias, spec.sinks, spec.activation) == (True, True, True, Activation.CLAMPED)
    assert spec.moe == MoeSpec(3, 2, 96, norm_topk=True, biased=True)
    assert spec.window == WindowSpec(16, (True, False))
    assert spec.rope.yarn == YarnSpec(32.0, 32, whole=False)


@pytest.mark.parametrize(
    ("arch", "key", "value", "words"),
    [
        ("qwen2", "expert_count", 8, "8 experts in the qwen2 architecture"),
        ("llama", "expert_shared_count", 1, "shared experts"),
        ("qwen3moe", "expert_gating_func", 2, "no softmax"),
        ("qwen3moe", "leading_dense_block_count", 1, "leading_dense_block_count"),
    ],
)
def test_other_mixtures_are_refused(
    gguf_model: Any, tmp_path: Path, digests: DigestCache, arch: Any, key: Any, value: Any, words: str
) -> None:
    model = gguf_model(arch, mixture=True)
    model.metadata[key] = value
    with pytest.raises(UnsupportedModel, match=words):
        open_gguf(model.write(tmp_path / "m.gguf"), digests)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "attention.logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"])
def test_what_would_change_the_numbers_is_refused_by_name(
    gguf_model: Any, tmp_path: Path, digests: DigestCache, arch: Any, key: Any
) -> None:
    model = gguf_model(arch)
    model.metadata[key] = 0.0
    open_gguf(model.write(tmp_path / "m.gguf"), digests)
    model.metadata[key] = 30.0
    path = model.write(tmp_path / "n.gguf")
    with pytest.raises(UnsupportedModel, match=rf"{arch}\.{key} is set"):
        open_gguf(path, digests)
    with pytest.raises(UnsupportedModel, match=key):
        check_beginning(path, path.stat().st_size)


@pytest.mark.parametrize(("quant", "row_bytes"), [("Q4_0", 36), ("Q5_1", 48), ("Q8_0", 68)])
def test_quantised_tensors_come_as_they_lie(gguf_model: Any, tmp_path: Path, digests: DigestCache, quant: Any, row_bytes: int) -> None:
    model = gguf_model("qwen2", quant)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    tensor = source.read("model.layers.0.self_attn.o_proj.weight")
    assert isinstance(tensor, BlockTensor)
    assert (tensor.type, tensor.shape, tensor.rows_NB.shape) == (quant, (64, 64), (64, row_bytes))
    np.testing.assert_array_equal(tensor.rows_NB, model.stored["blk.0.attn_output.weight"][0])
    assert source.tensor_type == source.type_of("model.layers.0.self_attn.o_proj.weight") == quant


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
@pytest.mark.parametrize("rows", [slice(0, 16), slice(5, 43), slice(63, None), slice(63, 99)])
def test_rows_can_be_read_alone(gguf_model: Any, tmp_path: Path, digests: DigestCache, quant: Any, rows: slice) -> None:
    model = gguf_model("llama", quant)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "input_layernorm"):
        whole = model.tensors[f"model.layers.1.{name}.weight"]
        np.testing.assert_array_equal(as_float32(source.read(f"model.layers.1.{name}.weight", rows)), whole[rows])


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
@pytest.mark.parametrize("columns", [slice(0, 32), slice(32, 64)])
def test_of_columns_that_are_read_alone_nothing_else_is(
    gguf_model: Any, tmp_path: Path, digests: DigestCache, quant: Any, columns: slice
) -> None:
    model, read = gguf_model("llama", quant), list[StoredAt]()
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)

    def counted(at: StoredAt) -> np.ndarray:
        read.append(at)
        return at.read()

    source.reads = counted
    for name in ("self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj"):
        whole = model.tensors[f"model.layers.1.{name}.weight"]
        part = source.read(f"model.layers.1.{name}.weight", slice(3, 19), columns)
        np.testing.assert_array_equal(as_float32(part), whole[3:19, columns])
    for at in read[:2]:
        whole_row = source.places[f"model.layers.1.{'self_attn.o_proj' if at is read[0] else 'mlp.down_proj'}.weight"]
        width = columns.stop - columns.start
        assert at.nbytes == 16 * width * whole_row.nbytes // (whole_row.shape[0] * whole_row.shape[1])


def test_k_quants_come_as_they_lie(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model()
    kind = gguf.GGMLQuantizationType.Q6_K
    raw = model.random.integers(0, 256, (64, 210), np.uint8)
    raw[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    model.stored["blk.0.ffn_down.weight"] = (raw, kind)
    model.stored["blk.1.ffn_down.weight"] = (raw, kind)
    model.metadata["feed_forward_length"] = 256
    for i in range(2):
        for name in ("gate", "up"):
            model.matrix(f"blk.{i}.ffn_{name}", f"model.layers.{i}.mlp.{name}_proj", 256, 64)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    np.testing.assert_array_equal(as_float32(source.read("model.layers.0.mlp.down_proj.weight")), dequantize(raw, kind))


def test_tensor_sizes_are_those_of_ggml() -> None:
    for name, kind in TENSOR_TYPES.items():
        assert GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.code)] == (kind.block, kind.nbytes)
        assert gguf.GGMLQuantizationType(kind.code).name == kind.name == name


def test_the_bundled_model(bundled_gguf: Path, digests: DigestCache) -> None:
    path = bundled_gguf
    source = open_gguf(path, digests)
    spec = source.spec
    assert (spec.model_type, spec.n_layers, spec.hidden, spec.vocab, spec.max_context) == ("llama", 30, 576, 49152, 8192)
    info = read_header(path).tensors["blk.3.attn_k.weight"]
    raw = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset).reshape(192, -1)
    values = dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
    expected = values.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    np.testing.assert_array_equal(as_float32(source.read("model.layers.3.self_attn.k_proj.weight")), expected)
    assert source.nbytes("model.layers.3.self_attn.k_proj.weight") == info.nbytes
    head = source.read("model.embed_tokens.weight")
    assert isinstance(head, BlockTensor)
    assert head.type == "Q8_0"


def test_arrays_are_the_callers_own_and_nothing_stays_mapped(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    path = gguf_model("llama", "F32").write(tmp_path / "m.gguf")
    source = open_gguf(path, digests)
    tensor = source.read("model.norm.weight")
    assert isinstance(tensor, DenseTensor)
    tensor.data[:] = 7  # type: ignore[index]
    again = source.read("model.norm.weight")
    assert isinstance(again, DenseTensor)
    assert not np.array_equal(tensor.data, again.data)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) not in maps.read_text()


def test_digest_is_sha256_of_the_file_and_is_remembered(gguf_model: Any, tmp_path: Path, home: Home, digests: DigestCache) -> None:
    import hashlib

    path = gguf_model().write(tmp_path / "m.gguf")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digests.known(path) is None
    assert open_gguf(path, digests).digest == expected
    assert digests.known(path) == expected
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert digests.known(path) is None
    assert open_gguf(path, digests).digest != expected


def test_rope_factors_of_llama_31_become_its_spec(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model()
    model.metadata["rope.freq_base"] = 500000.0
    scaled = RopeSpec(500000.0, llama3=(32.0, 1.0, 4.0, 8192))
    factors = (inverse_frequencies(RopeSpec(500000.0), 16) / inverse_frequencies(scaled, 16)).astype(np.float32)
    model.stored["rope_freqs.weight"] = (factors, gguf.GGMLQuantizationType.F32)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    assert source.spec.rope.llama3 == (32.0, 1.0, 4.0, 8192)
    model.stored["rope_freqs.weight"] = (factors * np.linspace(1, 2, 8, dtype=np.float32), gguf.GGMLQuantizationType.F32)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        open_gguf(model.write(tmp_path / "n.gguf"), digests)


def test_rope_factors_of_a_part_of_a_head(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model()
    model.metadata["rope.dimension_count"] = 8
    model.metadata["rope.freq_base"] = 500000.0
    plain, scaled = RopeSpec(500000.0, dims=8), RopeSpec(500000.0, llama3=(32.0, 1.0, 4.0, 8192), dims=8)
    factors = (inverse_frequencies(plain, 16) / inverse_frequencies(scaled, 16)).astype(np.float32)
    model.stored["rope_freqs.weight"] = (factors, gguf.GGMLQuantizationType.F32)
    assert open_gguf(model.write(tmp_path / "m.gguf"), digests).spec.rope == scaled
    for other in (16, 7, 0):
        model.metadata["rope.dimension_count"] = other
        with pytest.raises(ModelFileError, match="turn"):
            open_gguf(model.write(tmp_path / f"{other}.gguf"), digests)
    model.metadata |= {"rope.dimension_count": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight.*beside rope scaling 'yarn'"):
        open_gguf(model.write(tmp_path / "yarn.gguf"), digests)


def test_a_split_model_reads_as_one(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("llama", "Q4_1")
    names = sorted(model.stored)
    halves = set(names[: len(names) // 2]), set(names[len(names) // 2 :])
    embedding = {"token_embd.weight"}
    for part, half in enumerate((halves[0] | embedding, halves[1] - embedding)):
        model.general = {"split.count": 2, "split.no": part}
        model.write(tmp_path / f"m-{part + 1:05d}-of-00002.gguf", half)
    first = tmp_path / "m-00001-of-00002.gguf"
    source = open_gguf(first, digests)
    for name, expected in model.tensors.items():
        np.testing.assert_array_equal(as_float32(source.read(name)), expected)
    with pytest.raises(ModelFileError, match="part 2 of 2 of a split model"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf", digests)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelFileError, match="00002-of-00002"):
        open_gguf(first, digests)


def test_a_window_is_read(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model()
    model.metadata["attention.sliding_window"] = 48
    spec = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec
    assert (spec.window, spec.max_context) == (WindowSpec(48, (True, True)), 128)


def test_an_olmo_with_windows_is_another_family(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("olmo2")
    model.metadata["attention.sliding_window"] = 48
    spec = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec
    assert (spec.model_type, spec.window) == ("olmo3", WindowSpec(48, (True, True), RopeSpec(1e4)))


def test_each_fourth_layer_of_smollm3_has_no_rope(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    spec = open_gguf(gguf_model("smollm3").write(tmp_path / "m.gguf"), digests).spec
    assert (spec.model_type, spec.unturned) == ("smollm3", (False, False))


def test_gemma_is_read_as_llama_cpp_has_it(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("gemma3")
    model.metadata |= {"attention.sliding_window": 48, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    spec = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec
    assert (spec.norms, spec.activation, spec.rope) == (Norms.AROUND, Activation.GELU_TANH, RopeSpec(1e6, linear_factor=8.0))
    assert (spec.window, spec.scales) == (WindowSpec(48, (True, True), RopeSpec(1e4)), Multipliers(embedding=8.0))
    model.metadata |= {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 5e3}
    spec = open_gguf(model.write(tmp_path / "n.gguf"), digests).spec
    assert spec.window == WindowSpec(48, (True, False), RopeSpec(5e3))


def test_yarn_is_read(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("qwen3")
    model.metadata |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    rope = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec.rope
    assert rope == RopeSpec(10000.0, yarn=YarnSpec(4.0, 32), gain=0.1 * math.log(4) + 1)


def test_the_gain_in_a_file_of_olmo3_is_all_that_there_is(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("olmo2")
    model.metadata |= {"attention.sliding_window": 48, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
    model.metadata |= {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.2079}
    spec = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec
    assert spec.rope.gain == pytest.approx(1.2079)
    del model.metadata["rope.scaling.attn_factor"]
    assert open_gguf(model.write(tmp_path / "n.gguf"), digests).spec.rope.gain == 0.1 * math.log(8) + 1


def test_long_rope_serves_the_context_that_its_first_divisors_are_for(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("phi3")
    model.metadata |= {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    for name, factors in (("short", np.linspace(1, 2, 8)), ("long", np.full(8, 8))):
        model.stored[f"rope_factors_{name}.weight"] = (factors.astype(np.float32), gguf.GGMLQuantizationType.F32)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    assert (source.spec.max_context, source.spec.rope.gain) == (64, 1.25)
    np.testing.assert_allclose(source.spec.rope.divisors, np.linspace(1, 2, 8), rtol=1e-6)
    longer = source.spec.of_context(65)
    assert (longer.max_context, longer.rope) == (128, RopeSpec(10000.0, divisors=(8.0,) * 8, gain=1.25))
    assert source.spec.of_context(64) is source.spec is source.spec.of_context(None)
    assert check_beginning(tmp_path / "m.gguf", (tmp_path / "m.gguf").stat().st_size)
    model.stored["rope_factors_short.weight"] = (np.ones(7, np.float32), gguf.GGMLQuantizationType.F32)
    with pytest.raises(ModelFileError, match="7 divisors"):
        open_gguf(model.write(tmp_path / "n.gguf"), digests)
    model.stored["rope_factors_short.weight"] = model.stored["rope_factors_long.weight"]
    model.stored["rope_factors_long.weight"] = (np.zeros(8, np.float32), gguf.GGMLQuantizationType.F32)
    with pytest.raises(ModelFileError, match="8 divisors"):
        open_gguf(model.write(tmp_path / "n.gguf"), digests)


def test_multipliers_are_read(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("granite")
    model.metadata |= {"embedding_scale": 12.0, "attention.scale": 0.125, "residual_scale": 0.25, "logit_scale": 8.0}
    assert open_gguf(model.write(tmp_path / "m.gguf"), digests).spec.scales == Multipliers(12.0, 0.125, 0.25, 0.125)


def test_what_files_of_minicpm_leave_out_is_known(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model("minicpm3")
    spec = open_gguf(model.write(tmp_path / "m.gguf"), digests).spec
    assert (spec.head_dim, spec.value_dim, spec.own_dims) == (24, 16, 16)
    assert spec.scales == Multipliers(12, None, 1.4 / math.sqrt(2), 256 / 64)
    assert spec.kv_bytes_per_token(spec.all_layers) == 2 * 2 * 4 * (24 + 16)
    del model.metadata["rope.dimension_count"]
    with pytest.raises(ModelFileError, match="24 of 24 turn"):
        open_gguf(model.write(tmp_path / "n.gguf"), digests)


@pytest.mark.parametrize(("arch", "near"), [("gemma2", "The nearest that runs is Gemma 3"), ("mamba", ""), ("foo", "")])
def test_the_nearest_family_is_named_where_one_is_near(gguf_model: Any, tmp_path: Path, digests: DigestCache, arch: str, near: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{arch}'") as caught:
        open_gguf(gguf_model(arch).write(tmp_path / "m.gguf"), digests)
    assert caught.value.hint.startswith(near or "`paceline models")
    assert "paceline models --supported" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("block_count", 3, ModelFileError, "model.layers.2"),
        ("embedding_length", 32, ModelFileError, "shape"),
        ("attention.head_count", 0, ModelFileError, "0 heads"),
        ("attention.head_count_kv", 3, ModelFileError, "go together"),
        ("context_length", "many", ModelFileError, "context_length is not an integer"),
        ("rope.freq_base", -1.0, ModelFileError, "rope base"),
        ("rope.scaling.type", "dynamic", UnsupportedModel, "dynamic"),
        ("rope.dimension_count", 0, ModelFileError, "llama.rope.dimension_count is 0"),
        ("residual_scale", 0.5, UnsupportedModel, "llama.residual_scale is 0.5"),
        ("rope.dimension_count", 7, ModelFileError, "rope turns 7 of 16"),
        ("rope.dimension_count", 32, ModelFileError, "rope turns 32 of 16"),
        ("logit_scale", -1.0, ModelFileError, "logit_scale"),
        ("expert_count", 8, ModelFileError, "expert_used_count"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(
    gguf_model: Any, tmp_path: Path, digests: DigestCache, key: Any, value: Any, error: Any, words: str
) -> None:
    model = gguf_model()
    model.metadata[key] = value
    path = model.write(tmp_path / "m.gguf")
    with pytest.raises(error, match=words) as caught:
        open_gguf(path, digests)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_missing_metadata_is_named(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model()
    del model.metadata["context_length"]
    with pytest.raises(ModelFileError, match=r"llama\.context_length is missing"):
        open_gguf(model.write(tmp_path / "m.gguf"), digests)


def test_an_unknown_architecture_is_refused_by_name(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        open_gguf(gguf_model("mamba").write(tmp_path / "m.gguf"), digests)


def test_a_tensor_the_family_does_not_have_is_refused(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    model = gguf_model()
    model.vector("blk.0.attn_sub_norm", "unused", 64)
    with pytest.raises(UnsupportedModel, match="attn_sub_norm"):
        open_gguf(model.write(tmp_path / "m.gguf"), digests)


def test_damage_is_named(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    path = gguf_model().write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    cases = {
        b"": "too few",
        b"GGML" + whole[4:]: "starts with b'GGML'",
        whole[: len(whole) // 2]: "truncated",
        whole[:200]: "ends inside|more than its",
        whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:]: "claims 1152921504606846976 tensors",
        whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:]: "metadata keys",
        whole[:24] + struct.pack("<Q", 1 << 62) + whole[32:]: "ends inside a metadata key",
    }
    for data, words in cases.items():
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=words):
            open_gguf(path, digests)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(UnsupportedModel, match="version 1"):
        open_gguf(path, digests)
    with pytest.raises(ModelFileError, match="can't be read"):
        open_gguf(tmp_path / "none.gguf", digests)


def test_a_file_cut_after_opening_is_found_when_read(gguf_model: Any, tmp_path: Path, digests: DigestCache) -> None:
    path = gguf_model().write(tmp_path / "m.gguf")
    source = open_gguf(path, digests)
    os.truncate(path, 4096)
    with pytest.raises(ModelFileError, match="cut short"):
        source.read("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(ModelFileError, match="is missing"):
        source.read("model.layers.99.mlp.up_proj.weight")


@pytest.mark.parametrize(("quant", "bad"), [("Q8_0", np.float16(np.nan).tobytes()), ("MXFP4", b"\xff")])
def test_a_scale_that_is_no_number_is_damage(gguf_model: Any, tmp_path: Path, digests: DigestCache, quant: Any, bad: bytes) -> None:
    model = gguf_model("llama", quant)
    raw, kind = model.stored["blk.0.attn_v.weight"]
    raw = raw.copy()
    raw[0, : len(bad)] = np.frombuffer(bad, np.uint8)
    model.stored["blk.0.attn_v.weight"] = (raw, kind)
    source = open_gguf(model.write(tmp_path / "m.gguf"), digests)
    with pytest.raises(ModelFileError, match="not a finite number"):
        source.read("model.layers.0.self_attn.v_proj.weight")
