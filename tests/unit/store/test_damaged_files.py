"""Whatever a file holds, opening and reading it ends in the model or in a typed error, within the memory its size explains."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from paceline.core.errors import ModelFileError, UnsupportedModel
from paceline.store.catalog import open_model
from paceline.store.home import Home

BOUND = 24 << 20
"""The first read of a header is 4 MiB, at most; the rest are copies of a file of 60 KB, and libraries being imported."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Any:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def gguf_bytes(gguf_model: Any, place: Any) -> Any:
    return gguf_model("llama", "Q4_1").write(place / "whole.gguf").read_bytes()


def opened(ref: Path, home: Home) -> bool:
    """Open a model and read all of it; whether that went well."""
    tracemalloc.start()
    try:
        model = open_model(str(ref), home)
        for name in model.weights.names():
            model.weights.read(name)
        model.tokenizer.encode("the hat")
    except (ModelFileError, UnsupportedModel):
        return False
    else:
        return True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < BOUND


def damaged(data: bytes, edits: list[tuple[int, bytes]], cut: int | None) -> bytes:
    changed = bytearray(data)
    for at, new in edits:
        changed[at : at + len(new)] = new
    return bytes(changed[:cut])


def numbers() -> Any:
    """Bytes that make bad counts, sizes and offsets."""
    bad = [0, 1, 7, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1]
    return st.one_of(
        st.sampled_from([struct.pack("<Q", n) for n in bad] + [struct.pack("<I", n & 0xFFFFFFFF) for n in bad]), st.binary(max_size=9)
    )


def test_the_whole_file_opens(gguf_bytes: Any, place: Any) -> None:
    path = place / "same.gguf"
    path.write_bytes(gguf_bytes)
    assert opened(path, Home(place / "home"))


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_damaged_gguf_heads(gguf_bytes: Any, place: Any, data: Any) -> None:
    head = gguf_bytes.index(b"token_embd.weight") + 4000
    edits = data.draw(st.lists(st.tuples(st.integers(0, head), numbers()), max_size=3))
    cut = data.draw(st.none() | st.integers(0, len(gguf_bytes)))
    path = place / "damaged.gguf"
    path.write_bytes(damaged(gguf_bytes, edits, cut))
    whole = opened(path, Home(place / "home"))
    assert cut is None or cut == len(gguf_bytes) or not whole


@settings(max_examples=examples(100), deadline=None)
@given(noise=st.binary(max_size=400))
def test_noise_after_the_magic_number(place: Any, noise: Any) -> None:
    path = place / "noise.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + noise)
    assert not opened(path, Home(place / "home"))


def field_values() -> Any:
    return st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.just(10**30), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=2)
    )


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_damaged_safetensors(make_folder: Any, place: Any, data: Any) -> None:
    folder = place / "folder"
    if not folder.exists():
        make_folder(folder)
        (place / "pristine").write_bytes((folder / "model.safetensors").read_bytes())
    whole = (place / "pristine").read_bytes()
    n = struct.unpack("<Q", whole[:8])[0]
    edits = data.draw(st.lists(st.tuples(st.integers(0, n + 8), numbers()), max_size=3))
    cut = data.draw(st.none() | st.integers(0, len(whole)))
    (folder / "model.safetensors").write_bytes(damaged(whole, edits, cut))
    opened(folder, Home(place / "home"))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_damaged_configurations(make_folder: Any, place: Any, data: Any) -> None:
    folder = place / "configured"
    if not folder.exists():
        make_folder(folder)
        (place / "config").write_bytes((folder / "config.json").read_bytes())
    config = json.loads((place / "config").read_text())
    extra = ["head_dim", "rope_scaling", "rope_parameters", "sliding_window", "tie_word_embeddings", "num_experts", "layer_types"]
    changes = data.draw(st.dictionaries(st.sampled_from([*config, *extra]), field_values(), max_size=3))
    (folder / "config.json").write_text(json.dumps(config | changes))
    opened(folder, Home(place / "home"))
