"""gpt-oss's experts as safetensors have them, MXFP4 and plain, against transformers' own reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tests.unit.store.test_safetensors_file import transformers_model

from paceline.core.errors import UnsupportedModel
from paceline.core.manifest import PIECE
from paceline.core.model import Activation, MoeSpec
from paceline.core.weights import BlockTensor, DenseTensor
from paceline.store.digests import DigestCache
from paceline.store.hf_folder import SafetensorsWeights
from paceline.store.partial import PartWeights

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - behind what is not everywhere
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

EXPERTS = "model.layers.1.mlp.experts."


def saved(folder: Path, *, packed: bool, shards: int = 1) -> dict[str, Any]:
    """A tiny model's tensors as a folder of it has them."""
    transformers_model("gpt_oss").to(torch.bfloat16).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    random = np.random.default_rng(3)
    for name in list(stored) if packed else []:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            experts, inputs, rows = stored.pop(name).shape
            stored[f"{name}_blocks"] = torch.from_numpy(random.integers(0, 256, (experts, rows, inputs // 32, 16), np.uint8))
            stored[f"{name}_scales"] = torch.from_numpy(random.integers(110, 130, (experts, rows, inputs // 32), np.uint8))
    if packed:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    if shards == 1:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return stored
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in stored}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in stored.items() if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return stored


@pytest.mark.parametrize("shards", [1, 2])
def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path, digests: DigestCache, shards: int) -> None:
    stored = saved(tmp_path, packed=True, shards=shards)
    source = SafetensorsWeights(tmp_path, digests)
    assert (source.spec.moe, source.spec.activation) == (MoeSpec(4, 2, 96, norm_topk=True, biased=True), Activation.CLAMPED)
    fused = convert_moe_packed_tensors(*(stored[f"{EXPERTS}gate_up_proj_{part}"] for part in ("blocks", "scales"))).float().numpy()
    down = convert_moe_packed_tensors(*(stored[f"{EXPERTS}down_proj_{part}"] for part in ("blocks", "scales"))).float().numpy()
    for expert in range(4):
        for name, values in (("gate", fused[expert, :, 0::2]), ("up", fused[expert, :, 1::2]), ("down", down[expert])):
            for rows in (slice(None), slice(5, 40), slice(7, 7)):
                read = source.read(f"{EXPERTS}{expert}.{name}_proj.weight", rows)
                assert isinstance(read, BlockTensor)
                assert read.type == source.type_of(f"{EXPERTS}{expert}.{name}_proj.weight") == "MXFP4"
                if len(read.rows_NB):
                    np.testing.assert_array_equal(dequantize(read.rows_NB, gguf.GGMLQuantizationType.MXFP4), values.T[rows])
    assert {at.path for at in source.places[f"{EXPERTS}0.up_proj.weight"].ranges} == set(source.files)


def test_plain_experts_are_turned_and_their_biases_come_apart(tmp_path: Path, digests: DigestCache) -> None:
    stored = saved(tmp_path, packed=False)
    source = SafetensorsWeights(tmp_path, digests)
    bits = {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in stored.items()}
    for name, first, apart in (("gate", 0, 2), ("up", 1, 2), ("down", 0, 1)):
        fused = "down_proj" if name == "down" else "gate_up_proj"
        weight, bias = (source.read(f"{EXPERTS}2.{name}_proj.{kind}", slice(3, 41)) for kind in ("weight", "bias"))
        assert isinstance(weight, DenseTensor)
        assert isinstance(bias, DenseTensor)
        np.testing.assert_array_equal(weight.data, bits[f"{EXPERTS}{fused}"][2, :, first::apart].T[3:41])
        np.testing.assert_array_equal(bias.data, bits[f"{EXPERTS}{fused}_bias"][2, first::apart][3:41])
    router = source.read("model.layers.1.mlp.gate.bias")
    assert isinstance(router, DenseTensor)
    np.testing.assert_array_equal(router.data, bits["model.layers.1.mlp.router.bias"])


@pytest.mark.parametrize(("field", "value"), [("swiglu_limit", 5.0), ("quantization_config", {"quant_method": "fp8"})])
def test_what_would_change_the_numbers_is_refused(tmp_path: Path, digests: DigestCache, field: str, value: Any) -> None:
    saved(tmp_path, packed=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UnsupportedModel, match=field):
        SafetensorsWeights(tmp_path, digests)


def test_exponents_of_another_shape_are_refused(tmp_path: Path, digests: DigestCache) -> None:
    stored = saved(tmp_path, packed=True)
    stored[f"{EXPERTS}down_proj_scales"] = stored[f"{EXPERTS}down_proj_scales"][:, :, :1].contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match="down_proj"):
        SafetensorsWeights(tmp_path, digests)


def test_a_number_without_a_shape_is_no_part_of_the_model(tmp_path: Path, digests: DigestCache) -> None:
    stored = saved(tmp_path, packed=True)
    save_file(stored | {"scale": torch.tensor(1.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="tensor scale"):
        SafetensorsWeights(tmp_path, digests)


def test_an_expert_is_here_once_its_codes_and_exponents_are(tmp_path: Path, digests: DigestCache) -> None:
    saved(tmp_path, packed=True, shards=2)
    source = SafetensorsWeights(tmp_path, digests)
    codes, exponents = sorted(source.files)
    name = f"{EXPERTS}0.up_proj.weight"
    held = {path: ((0, -(-path.stat().st_size // PIECE)),) for path in source.files}
    assert name in PartWeights(source, "", held).names()
    for lacking in (codes, exponents):
        assert name not in PartWeights(source, "", {path: runs for path, runs in held.items() if path != lacking}).names()
