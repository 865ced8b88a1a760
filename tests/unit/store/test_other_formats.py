"""Files of formats that Paceline doesn't read: the error says what they are and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline.store.catalog import resolve
from paceline.store.gguf_header import read_header
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


def test_a_folder_of_an_adapter_is_named(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
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
