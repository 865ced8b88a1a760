"""Files of formats that Paceline doesn't read: the error says what they are and what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import ModelFileError, ModelNotFound, PacelineError, UnsupportedModel
from paceline.store.catalog import MANIFEST, locations, resolve
from paceline.store.digests import DigestCache
from paceline.store.gguf_file import check_beginning, open_gguf, spec_from_gguf
from paceline.store.gguf_header import ArrayRef, read_header
from paceline.store.hf_folder import load_object, read_head, spec_from_config
from paceline.store.home import Home
from paceline.store.selection import model_stem

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "compressed-tensors"}, "COMPRESSED-TENSORS"),
        ({"group_size": 64, "bits": 4}, "MLX"),
    ],
)
def test_weights_that_others_quantised_are_named(tmp_path: Path, scheme: dict[str, Any], named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "quantization_config": scheme}))
    with pytest.raises(PacelineError, match=named) as raised:
        spec_from_config(load_object(path))
    assert "GGUF" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "read"), [("m.gguf", read_header), ("model.safetensors", lambda path: list(read_head(path))), ("config.json", load_object)]
)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str, read: Any) -> None:
    path = tmp_path / name
    path.write_bytes(POINTER)
    with pytest.raises(PacelineError, match="git-lfs") as raised:
        read(path)
    assert "git lfs pull" in raised.value.hint


@pytest.mark.parametrize(
    ("kind", "quantised"), [("I32", True), ("U32", True), ("I8", True), ("F8_E4M3", True), ("F64", False), ("I64", False)]
)
def test_a_tensor_type_that_is_not_read_is_named_with_what_to_use_instead(tmp_path: Path, kind: str, quantised: bool) -> None:
    head = json.dumps({"model.layers.0.mlp.up_proj.qweight": {"dtype": kind, "shape": [0], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(UnsupportedModel, match=kind) as raised:
        list(read_head(path))
    assert "qweight" in str(raised.value)
    assert ("quantised" in str(raised.value)) is quantised
    assert "GGUF" in raised.value.hint


@pytest.mark.parametrize("beside", [(), ("config.json", "tokenizer.json")])
def test_a_folder_of_an_adapter_is_named(tmp_path: Path, beside: tuple[str, ...]) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", *beside):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(PacelineError, match="LoRA"):
        resolve(str(tmp_path), Home(tmp_path / "home"))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("m-00001-of-00003.gguf", "m"),
        ("m.Q4_1.gguf", "m.Q4_1"),
        ("m-00001.gguf", "m-00001"),
        ("M-00001-OF-00002.GGUF", "M"),
        ("plain", "plain"),
    ],
)
def test_the_name_of_a_split_model_has_no_part(file: str, name: str) -> None:
    assert model_stem(file) == name


def numbered(model: Any, folder: Path, stem: str, parts: int) -> None:
    for part in range(parts):
        model.general = {"split.count": parts, "split.no": part}
        model.write(folder / f"{stem}-{part + 1:05d}-of-{parts:05d}.gguf", set(model.stored) if part == 0 else set())


@pytest.mark.parametrize(
    ("change", "opened", "says", "hint"),
    [
        (("m-00001-of-00003.gguf", "first.gguf"), "first.gguf", "part 1 of 3", "-00001-of-00003.gguf"),
        (None, "m-00002-of-00003.gguf", "part 2 of 3", "first file"),
        (("m-00002-of-00003.gguf", None), "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "one folder"),
        (("m-00003-of-00003.gguf", "m-3.gguf"), "m-00001-of-00003.gguf", "m-00003-of-00003.gguf", "one folder"),
    ],
)
def test_a_split_model_with_a_wrong_or_missing_part(
    gguf_model: Any, tmp_path: Path, change: tuple[str, str | None] | None, opened: str, says: str, hint: str
) -> None:
    numbered(gguf_model(), tmp_path, "m", 3)
    if change is not None and change[1] is not None:
        (tmp_path / change[0]).rename(tmp_path / change[1])
    elif change is not None:
        (tmp_path / change[0]).unlink()
    with pytest.raises(ModelFileError, match=says) as raised:
        open_gguf(tmp_path / opened, DigestCache(Home(tmp_path / "home")))
    assert hint in raised.value.hint


@pytest.mark.parametrize(("values", "n_kv_heads"), [([2, 2], 2), ([4, 4, 4], 4), ([2, 4], None), ([0.5, 0.5], None), ([], None)])
def test_heads_that_are_listed_by_layer(gguf_model: Any, tmp_path: Path, values: list[float], n_kv_heads: int | None) -> None:
    header = read_header(gguf_model().write(tmp_path / "m.gguf"))
    data = np.array(values, np.float32 if 0.5 in values else np.int32)
    (tmp_path / "array").write_bytes(data.tobytes())
    array = ArrayRef(6 if 0.5 in values else 5, len(values), 0, data.nbytes)
    key = "llama.attention.head_count_kv"
    listed = replace(header, path=tmp_path / "array", fields={**header.fields, key: array})
    if n_kv_heads is None:
        with pytest.raises(PacelineError, match="head_count_kv"):
            spec_from_gguf(listed, {})
    else:
        assert spec_from_gguf(listed, {}).n_kv_heads == n_kv_heads


def test_an_adapter_in_a_gguf_file_is_named(gguf_model: Any, tmp_path: Path) -> None:
    model = gguf_model()
    model.general = {"general.type": "adapter", "adapter.type": "lora"}
    path = model.write(tmp_path / "lora.gguf", {"blk.0.attn_q.weight"})
    with pytest.raises(UnsupportedModel, match="LoRA") as raised:
        open_gguf(path, DigestCache(Home(tmp_path / "home")))
    assert "Merge" in raised.value.hint
    with pytest.raises(UnsupportedModel, match="LoRA"):
        check_beginning(path, path.stat().st_size)


def test_two_files_in_a_folder_are_named_by_their_paths(gguf_model: Any, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="2 GGUF files") as raised:
        resolve(str(tmp_path), Home(tmp_path / "home"))
    assert f"{tmp_path}/a.gguf" in raised.value.hint


def test_split_models_of_a_pulled_folder_have_no_part_in_their_names(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    files = [f"q/{kind}-{part:05d}-of-00002.gguf" for kind in ("m-Q4", "m-Q8") for part in (1, 2)]
    folder = home.models / "org/two"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"files": {file: {} for file in files}}))
    assert {place.name for place in locations(home)} >= {"org/two:m-Q4.gguf", "org/two:m-Q8.gguf"}
    for name in ("org/two:m-Q8.gguf", "org/two:m-Q8-00001-of-00002.gguf", "org/two:q8"):
        place = resolve(name, home)
        assert (place.name, place.path) == ("org/two:m-Q8.gguf", folder / files[2])
