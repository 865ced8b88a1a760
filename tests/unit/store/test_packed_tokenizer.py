"""A packed tokenizer is the same tokenizer again; bytes that are none are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ModelFileError
from paceline.store.catalog import open_model
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


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"encoder": "{}", "eos_ids": [], "template": null, "special_tokens": {}}', b"\xff"]
)
def test_other_bytes_are_damaged(data: bytes) -> None:
    with pytest.raises(ModelFileError, match="from-b"):
        unpack_tokenizer(data, ORIGIN)
