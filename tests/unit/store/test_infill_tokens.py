"""Tokens that a gap is filled in with: by their names, and as a model's files name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.test_tokenizer import Vocabulary, byte_bpe

from paceline.server.infill import infill_ids
from paceline.store.tokenizer import ModelTokenizer, pack_tokenizer, unpack_tokenizer
from paceline.store.tokenizer_files import build_encoder

FIM_NAMES = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"), ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("[PREFIX]", "[SUFFIX]"),
]  # fmt: skip


@pytest.mark.parametrize("kind", [3.0, 4.0], ids=["control", "user defined"])
@pytest.mark.parametrize("names", FIM_NAMES)
def test_a_gap_is_filled_in_with_special_tokens_of_known_names(tmp_path: Path, names: Any, kind: float) -> None:
    fields = byte_bpe()
    added = [*reversed(names)]  # as in no family
    fields |= {"tokens": [*fields["tokens"], *added], "token_type": [*fields["token_type"], *[kind] * len(added)], "eos_token_id": 258}
    encoder = build_encoder(Vocabulary(tmp_path / "m.gguf", fields))
    tokenizer = ModelTokenizer(tmp_path / "m.gguf", encoder, frozenset({258}), None)
    ids = {name: 259 + place for place, name in enumerate(added)}
    before, behind = (tokenizer.encode(text, add_special=False) for text in ("12x", "y"))
    prefix, suffix, *middle = (ids[name] for name in names)
    expected = [prefix, *before, suffix, *behind, *middle] if middle else [suffix, *behind, prefix, *before]
    assert infill_ids(tokenizer, [before, before], "y") == [expected, expected]
    begun = ModelTokenizer(
        tmp_path / "m.gguf", build_encoder(Vocabulary(tmp_path / "m.gguf", fields | {"add_bos_token": True})), frozenset(), None
    )
    assert infill_ids(begun, [begun.encode("12x")], "y") == [[258, *expected]]
    # What the files name stands above names.
    chosen = ModelTokenizer(tmp_path / "m.gguf", encoder, frozenset({258}), None, infill_tokens=(1, 2, 3))
    assert infill_ids(chosen, [before], "y") == [[1, *before, 2, *behind, 3]]
    again = unpack_tokenizer(pack_tokenizer(chosen), tmp_path)
    assert again.infill_tokens == (1, 2, 3)
    for absurd in ((1, 2), (1, 2, 2), (1, 2, 10_000), (1, 2, None), (1, 2, "3")):
        assert ModelTokenizer(tmp_path / "m.gguf", encoder, frozenset({258}), None, infill_tokens=absurd).infill_tokens is None
