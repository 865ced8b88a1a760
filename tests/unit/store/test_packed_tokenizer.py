"""A packed tokenizer is the same tokenizer again; bytes that are none are refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paceline.core.errors import ModelFileError
from paceline.core.text import Given
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import open_model
from paceline.store.chats import ChatTemplate
from paceline.store.tokenizer import ModelTokenizer, pack_tokenizer, unpack_tokenizer
from paceline.store.tokenizer_files import tokenizer_from_folder

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
    assert parts["sampling_defaults"] == {"temperature": 0.2}  # as the bundled model's card draws
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


TURN = {"role": "user", "content": "Capital of France?"}


@pytest.mark.parametrize("content", ["The capital is", "a", "\n", "It is <|im_end|> not over", " two  blanks "])
def test_a_chat_to_go_on_with_ends_behind_its_last_content(bundled: ModelTokenizer, content: str) -> None:
    given = Given(continues=True)
    ids = bundled.render_chat([TURN, {"role": "assistant", "content": content}], given=given)
    begun = bundled.render_chat([TURN])
    text = lambda tokens: b"".join(map(bundled.token_bytes, tokens)).decode()  # noqa: E731
    # What is special in a message is text, and its tokens are spelled.
    assert text(ids) == text(begun) + content
    with closing(BoundedTokenizer(bundled)) as bounded:
        assert bounded.render_chat([TURN, {"role": "assistant", "content": content}], given=given) == ids


def test_a_chat_without_the_beginning_of_an_answer(bundled: ModelTokenizer) -> None:
    whole, alone = (bundled.render_chat([TURN], given=Given(begins_turn=begins)) for begins in (True, False))
    begun = b"".join(map(bundled.token_bytes, whole[len(alone) :])).decode()
    assert whole[: len(alone)] == alone
    assert "assistant" in begun
    with closing(BoundedTokenizer(bundled)) as bounded:
        assert bounded.render_chat([TURN], given=Given(begins_turn=False)) == alone
        assert bounded.render_chat([TURN]) == whole


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "data" / "templates").glob("*.jinja")), ids=lambda path: path.stem)
def test_families_templates_show_the_end_of_the_last_message(bundled: ModelTokenizer, path: Path) -> None:
    template = ChatTemplate(path, path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = ModelTokenizer(path, Tokenizer.from_str(bundled.to_json()), frozenset(), template)
    ids = tokenizer.render_chat([TURN, {"role": "assistant", "content": "The capital is"}], given=Given(continues=True))
    assert b"".join(map(tokenizer.token_bytes, ids)).endswith(b"The capital is")
