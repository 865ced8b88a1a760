"""Every kind of vocabulary under the one suite: what a text, a piece of one and an answer are in tokens, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.spaced_model import Header
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.core.generation import Grammar, GrammarKind
from paceline.core.text import Tokenizer as AnyTokenizer
from paceline.engine.grammar import Grammars
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import open_model
from paceline.store.tokenizer import ModelTokenizer, byte_alphabet
from paceline.store.tokenizer_files import build_encoder


def spaced(**fields: Any) -> ModelTokenizer:
    return ModelTokenizer(Path("spaced"), build_encoder(Header(**fields)), frozenset({2}), None)  # pyright: ignore[reportArgumentType]


shared = cache(spaced)


def metaspace(scheme: str) -> ModelTokenizer:
    """The same vocabulary as newer tokenizer.json files write it."""
    parts = json.loads(build_encoder(Header()).to_str())  # pyright: ignore[reportArgumentType]
    parts["normalizer"] = None
    parts["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    if scheme == "never":
        parts["decoder"]["decoders"].pop()
    return ModelTokenizer(Path("metaspace"), Tokenizer.from_str(json.dumps(parts)), frozenset({2}), None)


def byte_level(*, space: bool) -> ModelTokenizer:
    encoder = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(byte_alphabet())}, merges=[]))
    encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.ByteLevel(add_prefix_space=space), decoders.ByteLevel()
    encoder.add_special_tokens(["</s>"])
    return ModelTokenizer(Path("bytes"), encoder, frozenset({256}), None)


def bundled() -> ModelTokenizer:
    found = open_model("smollm2-135m").tokenizer
    assert isinstance(found, ModelTokenizer)
    return found


KINDS: dict[str, Callable[[], AnyTokenizer]] = {
    "spaced": spaced,
    "spaced, bounded": lambda: BoundedTokenizer(spaced()),
    "not spaced": lambda: spaced(add_space_prefix=False),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "bytes": lambda: byte_level(space=False),
    "bytes, spaced": lambda: byte_level(space=True),
    "bundled": bundled,
}
STRIPPED = {"spaced", "spaced, bounded", "metaspace first", "metaspace always"}
TEXTS = ("Hello there", "", "\nreturn x", " yes", "  two", "the</s>", "é", "[PREFIX]", "\x02")


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Any:
    made = KINDS[request.param]()
    yield request.param, made
    if isinstance(made, BoundedTokenizer):
        made.close()


def spelled(tokenizer: AnyTokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


@pytest.mark.parametrize("text", TEXTS)
def test_a_piece_of_a_text_is_spelled_by_its_tokens(kind: Any, text: str) -> None:
    _, tokenizer = kind
    ids = tokenizer.encode_inside(text)
    assert spelled(tokenizer, ids) == text
    assert not set(ids) & set(tokenizer.special_tokens.values()), "a text never makes a special token"


@pytest.mark.parametrize("text", ["Hello there", "\nreturn x", "the</s>", "</s>the", "<s>yes"])
def test_a_text_comes_back(kind: Any, text: str) -> None:
    name, tokenizer = kind
    if name == "bytes, spaced":
        return  # such a vocabulary shows the space that it adds, in transformers too
    assert tokenizer.text_of(tokenizer.encode(text, add_special=False)) == text
    first = "<s>" if "<s>" in tokenizer.special_tokens and not text.startswith("<s>") else ""
    assert tokenizer.text_of(tokenizer.encode(text)) == first + text


def test_only_vocabularies_that_strip_their_space_say_so(kind: Any) -> None:
    name, tokenizer = kind
    assert tokenizer.strips_space == (name in STRIPPED)


@pytest.mark.parametrize("text", ["yes", " yes", "</s>"])
def test_forced_text_is_written_as_it_is(kind: Any, text: str) -> None:
    _, tokenizer = kind
    matcher = Grammars(tokenizer).matcher(Grammar(GrammarKind.LARK, f"start: {json.dumps(text)}"))
    ids = list[int]()
    while forced := matcher.forced():
        ids += forced
        for token in forced:
            matcher.take(token)
    assert spelled(tokenizer, ids) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="Helo thrnx\n{}\u00e9", max_size=20))
def test_pieces_of_any_text(text: str) -> None:
    tokenizer = shared()
    assert spelled(tokenizer, tokenizer.encode_inside(text)) == text
    assert tokenizer.text_of(tokenizer.encode(text, add_special=False)) == text
