"""WordPiece, the tokenizer of BERTs, from a plain list of its tokens: a vocab.txt, or a GGUF file's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.store.faults import damaged, unreadable
from paceline.store.json_object import MAX_JSON_BYTES, JsonObject, load_object
from paceline.store.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

VOCABULARY: Final = "vocab.txt"
PREFIX: Final = "##"
"""Begins a token that goes on with a word."""
_UNKNOWN, _FIRST, _LAST, _REST = "[UNK]", "[CLS]", "[SEP]", ("[PAD]", "[MASK]")


def wordpiece(path: Path, tokens: Sequence[str], *, lowercase: bool) -> Encoder:
    """An encoder over these tokens, as BERT's.

    Args:
        path: where they came from, for errors.

    Raises:
        ModelFileError: some that it needs are missing.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {token: i for i, token in enumerate(tokens)}
    missing = [token for token in (_UNKNOWN, _FIRST, _LAST) if token not in vocab]
    if missing:
        raise damaged(path, f"its vocabulary has no {missing[0]}")
    encoder = Tokenizer(models.WordPiece(vocab, unk_token=_UNKNOWN, continuing_subword_prefix=PREFIX))
    encoder.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.decoder = decoders.WordPiece(prefix=PREFIX)
    special = [token for token in (_UNKNOWN, _FIRST, _LAST, *_REST) if token in vocab]
    encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ends = [(token, vocab[token]) for token in (_FIRST, _LAST)]
    encoder.post_processor = processors.TemplateProcessing(single=[_FIRST, "$A", _LAST], pair=None, special_tokens=ends)
    return encoder


def tokenizer_from_vocabulary(folder: Path, rows: int | None = None) -> ModelTokenizer:
    """The tokenizer of an old folder, which has a vocab.txt and no tokenizer.json.

    Raises:
        ModelFileError: it is damaged.
    """
    path = folder / VOCABULARY
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, "it is longer than any vocabulary")
        tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not UTF-8") from error
    beside = folder / "tokenizer_config.json"
    settings = load_object(beside) if beside.is_file() else JsonObject(beside, {})
    encoder = wordpiece(path, tokens, lowercase=settings.flag("do_lower_case") is not False)
    return ModelTokenizer(path, encoder, frozenset(), None, rows)
