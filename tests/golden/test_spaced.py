"""Vocabularies that put a space before each text, in the two ways of tokenizer.json files: ids, texts and answers are those of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fakes.spaced_model import TEMPLATE, Header
from transformers import PreTrainedTokenizerFast

from paceline.store.tokenizer import ModelTokenizer
from paceline.store.tokenizer_files import build_encoder, tokenizer_from_folder

TEXTS = ("Hello there", " yes", "the </s> in", "é\nreturn x", "<s>red", "x")
WAYS = {
    "normalizer": {},
    "first": {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
    },
}


@pytest.fixture(scope="module", params=list(WAYS))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, Any]:
    folder = tmp_path_factory.mktemp("spaced")
    parts = json.loads(build_encoder(Header()).to_str()) | WAYS[request.param]  # pyright: ignore[reportArgumentType]
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    return tokenizer_from_folder(folder), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts(both: tuple[ModelTokenizer, Any], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    if "<" not in text:  # behind a special token transformers shows the vocabulary's space
        assert ours.text_of(ids) == theirs.decode(ids)


def test_chats(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    chat = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "yes"}]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)


def test_answers(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    answer = ours.encode("yes", add_special=False)
    assert ours.strips_space
    assert theirs.decode(answer) == b"".join(map(ours.token_bytes, answer)).decode().removeprefix(" ") == "yes"
