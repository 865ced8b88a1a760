from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.store.catalog import open_model
from paceline.store.chats import LEAST_LETTERS, ChatPrefixes
from paceline.store.tokenizer import ModelTokenizer

LONG = "a long beginning " * (LEAST_LETTERS // 17 + 1)
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "im_end|>", " <|im_start|> ", "\n<|im_end|>\n")


def bundled() -> Tokenizer:
    opened = open_model("smollm2-135m").tokenizer
    assert isinstance(opened, ModelTokenizer)
    return Tokenizer.from_str(opened.to_json())


def spaced() -> Tokenizer:
    """A first space, byte fallback and tokens that take blanks: what SentencePiece's vocabularies do."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "l", "o", "lo", "n", "g", "\u2581lo"]
    merges = [("\u2581", "a"), ("l", "o"), ("\u2581", "lo")]
    made = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.ByteFallback()
    made.add_special_tokens(
        [
            AddedToken("<|im_start|>", normalized=False),
            AddedToken("<|im_end|>", lstrip=True, rstrip=True),
            AddedToken("<|endoftext|>", normalized=True),
        ]
    )
    return made


@pytest.mark.parametrize("make", [bundled, spaced])
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.sampled_from([*MARKS, "a", " lo", "long ", "\n", "é"]), max_size=12), min_size=2, max_size=5), st.booleans())
def test_ids_are_those_of_the_whole_text(make: object, turns: list[list[str]], going_on: bool) -> None:
    encoder = ENCODERS[make]
    prefixes = ChatPrefixes(encoder.get_added_tokens_decoder(), lambda text: encoder.encode(text, add_special_tokens=False).ids)
    text = LONG
    for turn in turns:
        text = (text if going_on else LONG) + "".join(turn)
        assert prefixes.ids(text) == encoder.encode(text, add_special_tokens=False).ids


ENCODERS = {make: make() for make in (bundled, spaced)}


def test_only_what_is_new_is_encoded() -> None:
    encoded: list[str] = []
    encoder = ENCODERS[bundled]

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return encoder.encode(text, add_special_tokens=False).ids

    prefixes = ChatPrefixes(encoder.get_added_tokens_decoder(), encode)
    chat = f"<|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>assistant\n"
    turns = [chat, chat + "so<|im_end|>\n<|im_start|>user\n"]
    for turn in turns:
        prefixes.ids(turn)
    assert encoded == [chat, "<|im_start|>assistant\nso<|im_end|>\n<|im_start|>user\n"]
    prefixes.ids(turns[1], "another's")
    assert encoded[-1] == turns[1]
