"""A tokenizer from a Hugging Face folder: tokenizer.json, and what the files beside it say of templates and ends.

WordPiece, the tokenizer of BERTs, from a plain list of its tokens: a vocab.txt, or a GGUF file's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from paceline.core.errors import ModelFileError
from paceline.store.chat_template import ChatTemplate
from paceline.store.faults import damaged, unreadable
from paceline.store.hf_config import MAX_JSON_BYTES, JsonObject, load_object
from paceline.store.tokenizer import ModelTokenizer, is_library_failure

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


TOKENIZER: Final = "tokenizer.json"
_TEMPLATE: Final = "chat_template.jinja"
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(folder: Path, rows: int | None = None) -> ModelTokenizer:
    """The tokenizer of a model folder, whose embedding has so many rows.

    Raises:
        ModelFileError: there is none, or it is damaged.
        UnsupportedModel: it is of a kind Paceline does not know.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelFileError(f"{folder} has no {TOKENIZER}", "Put the model's tokenizer.json beside its weights")
    try:
        encoder = Tokenizer.from_file(str(path))
    except BaseException as error:
        if not is_library_failure(error):
            raise
        raise damaged(path, f"it is not a tokenizer ({error})") from error
    encoder.no_truncation()
    encoder.no_padding()
    if getattr(encoder.model, "dropout", None):
        encoder.model.dropout = None  # a file as it was trained with: the same text would give other tokens each time
    settings = _optional(folder / "tokenizer_config.json")
    special = {name: token for name in _NAMED if (token := _content(settings, name)) is not None}
    generation = _optional(folder / "generation_config.json")
    ends = generation.integers("eos_token_id")
    ends = ends or _optional(folder / "config.json").integers("eos_token_id")
    named_end = encoder.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = frozenset(ends if named_end is None else [*ends, named_end])
    source = _template_source(folder, settings)
    template = None if source is None else ChatTemplate(folder, source, special, _object(settings, "response_template"))
    drawn = {} if generation.fields.get("do_sample") is False else generation.fields  # what it says is of no use to a greedy model
    return ModelTokenizer(path, encoder, ids, template, rows, drawn)


def _optional(path: Path) -> JsonObject:
    return load_object(path) if path.is_file() else JsonObject(path, {})


def _content(settings: JsonObject, name: str) -> str | None:
    """A special token is written as a string, or as an object with a `content`."""
    value = settings.fields.get(name)
    found: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _object(settings: JsonObject, name: str) -> dict[str, Any] | None:
    value = settings.fields.get(name)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _template_source(folder: Path, settings: JsonObject) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, where a list of named templates means the one called default."""
    path = folder / _TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise damaged(path, "it is not UTF-8") from error
        except OSError as error:
            raise unreadable(path, error) from error
    value = settings.fields.get("chat_template")
    if isinstance(value, list):
        named = [cast("dict[str, Any]", entry) for entry in cast("list[Any]", value) if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    raise damaged(settings.path, "its chat_template is not text")
