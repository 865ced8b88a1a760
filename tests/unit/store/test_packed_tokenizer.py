"""A packed tokenizer is the same tokenizer again; bytes that are none are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ModelFileError
from paceline.store.catalog import open_model
from paceline.store.folder_tokenizer import tokenizer_from_folder
from paceline.store.tokenizer import ModelTokenizer, pack_tokenizer, unpack_tokenizer

ORIGIN = Path("from-b")


@pytest.fixture(scope="module")
def bundled() -> ModelTokenizer:
    tokenizer = open_model("smollm2-135m").tokenizer
    assert isinstance(tokenizer, ModelTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def unpacked(bundled: ModelTokenizer) -> ModelTokenizer:
    return unpack_tokenizer(pack_tokenizer(bundled), ORIGIN)


def test_ends_size_and_bytes_are_the_same(bundled: ModelTokenizer, unpacked: ModelTokenizer) -> None:
    assert unpacked.eos_ids == bundled.eos_ids
    assert unpacked.size == bundled.size
    assert [unpacked.token_bytes(i) for i in range(bundled.size)] == [bundled.token_bytes(i) for i in range(bundled.size)]
    assert pack_tokenizer(unpacked) == pack_tokenizer(bundled)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200), special=st.booleans())
def test_texts_and_chats_become_the_same_ids(bundled: ModelTokenizer, unpacked: ModelTokenizer, text: str, special: bool) -> None:
    one, other = bundled, unpacked
    assert other.encode(text, add_special=special) == one.encode(text, add_special=special)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert other.render_chat(chat) == one.render_chat(chat)


def test_sampling_s_defaults_travel_and_what_is_out_of_range_does_not(bundled: ModelTokenizer) -> None:
    parts = json.loads(pack_tokenizer(bundled))
    assert "sampling_defaults" not in parts  # this model names none
    said = {"temperature": 0.6, "top_k": 20, "top_p": 1.5, "min_p": "0.1", "repetition_penalty": True, "other": 1}
    again = unpack_tokenizer(json.dumps(parts | {"sampling_defaults": said}).encode(), ORIGIN)
    assert again.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert unpack_tokenizer(pack_tokenizer(again), ORIGIN).sampling_defaults == again.sampling_defaults
    for absurd in ([1], {"temperature": float("nan"), "top_k": 1.5e300}):
        assert unpack_tokenizer(json.dumps(parts | {"sampling_defaults": absurd}).encode(), ORIGIN).sampling_defaults == {}


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_folder_s_generation_config_names_them(bundled: ModelTokenizer, tmp_path: Path, do_sample: bool) -> None:
    (tmp_path / "tokenizer.json").write_text(bundled.to_json())
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": do_sample, "temperature": 0.7, "top_k": 20, "top_p": 0.8}))
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8} if do_sample else {}
    assert tokenizer_from_folder(tmp_path).sampling_defaults == expected


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"encoder": "{}", "eos_ids": [], "template": null, "special_tokens": {}}', b"\xff"]
)
def test_other_bytes_are_damaged(data: bytes) -> None:
    with pytest.raises(ModelFileError, match="from-b"):
        unpack_tokenizer(data, ORIGIN)
