"""Tokenizers from a model's files: a folder's tokenizer.json or vocab.txt, or a GGUF file's metadata.

Building one from metadata takes a second, so it is kept as a tokenizer.json for the next start. `gpt2` vocabularies (byte-level BPE) differ in how
text is cut before merging: the field `tokenizer.ggml.pre` names the rule. `llama` vocabularies (SentencePiece BPE) hold scores in place of merges.
An unknown rule is refused, because a wrong one gives other ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from paceline.core.errors import ModelFileError
from paceline.store.chats import ChatTemplate
from paceline.store.control_marks import with_control_marks
from paceline.store.cuts import CUTS, IGNORE_MERGES, NORMALIZED, STARTS
from paceline.store.faults import damaged, reading, unsupported
from paceline.store.gguf_header import GgufHeader, read_header
from paceline.store.hf_folder import MAX_JSON_BYTES, JsonObject, load_object
from paceline.store.home import Home, identity_key, write_cache
from paceline.store.tokenizer import SPACE_MARK, ModelTokenizer, is_library_failure
from paceline.store.turn_marks import turn_marks

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Encoder


VOCABULARY: Final = "vocab.txt"
PREFIX: Final = "##"
"""Beginning of a token that continues a word."""
_UNKNOWN, _FIRST, _LAST, _REST = "[UNK]", "[CLS]", "[SEP]", ("[PAD]", "[MASK]")


def wordpiece(path: Path, tokens: Sequence[str], *, lowercase: bool) -> Encoder:
    """Return a WordPiece encoder over these tokens, set up like BERT's.

    Args:
        lowercase: texts are changed to lower case first.

    Raises:
        ModelFileError: a token that it needs is missing.
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
    """Return the tokenizer of an old encoder's folder, which has a vocab.txt and no tokenizer.json.

    Args:
        rows: rows of the model's embedding; None: they are not known.

    Raises:
        ModelFileError: the vocabulary is damaged.
    """
    path = folder / VOCABULARY
    with reading(path):
        if path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, "it is longer than any vocabulary")
    tokens = _text(path).removesuffix("\n").split("\n")
    beside = folder / "tokenizer_config.json"
    settings = load_object(beside) if beside.is_file() else JsonObject(beside, {})
    encoder = wordpiece(path, tokens, lowercase=settings.flag("do_lower_case") is not False)
    return ModelTokenizer(path, encoder, frozenset(), None, rows)


TOKENIZER: Final = "tokenizer.json"
_TEMPLATE, _TEMPLATES, _TEMPLATE_JSON = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_DEFAULT, _TOOL_USE = "default", "tool_use"
"""Names of a model's templates if it has several: for any chat, and for a chat with tools."""
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(folder: Path, rows: int | None = None) -> ModelTokenizer:
    """Return the tokenizer of a model's folder.

    Args:
        rows: rows of the model's embedding; None: they are not known.

    Raises:
        ModelFileError: the folder has no tokenizer, or a damaged one.
        UnsupportedModel: Paceline does not know this kind of tokenizer.
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
        encoder.model.dropout = None  # left from training: the same text would give other tokens each time
    settings = _optional(folder / "tokenizer_config.json")
    special = {name: token for name in _NAMED if (token := _content(settings, name)) is not None}
    generation = _optional(folder / "generation_config.json")
    ends = generation.integers("eos_token_id")
    ends = ends or _optional(folder / "config.json").integers("eos_token_id")
    named_end = encoder.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = frozenset(ends if named_end is None else [*ends, named_end])
    sources = _template_sources(folder, settings)
    template = _template(folder, sources, special, _object(settings, "response_template"))
    encoder = with_control_marks(encoder, _marks(encoder, template), _named(encoder, ids, special), path)
    drawn = {} if generation.fields.get("do_sample") is False else generation.fields  # sampling parameters mean nothing here
    return ModelTokenizer(path, encoder, ids, template, rows, drawn)


def _optional(path: Path) -> JsonObject:
    return load_object(path) if path.is_file() else JsonObject(path, {})


def _content(settings: JsonObject, name: str) -> str | None:
    """Return a special token's text. Files have it as a string, or as an object with a `content`."""
    value = settings.fields.get(name)
    found: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _object(settings: JsonObject, name: str) -> dict[str, Any] | None:
    value = settings.fields.get(name)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _text(path: Path) -> str:
    try:
        with reading(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not UTF-8") from error


def template_text(path: Path) -> str | None:
    """Return the chat template of a model's GGUF file or folder, without its vocabulary; None if it has none.

    Raises:
        ModelFileError: it can't be read.
    """
    if path.is_file():
        return read_header(path).text("tokenizer.chat_template")
    sources = _template_sources(path, _optional(path / "tokenizer_config.json"))
    return sources.get(_DEFAULT, sources.get(_TOOL_USE))


def _template_sources(folder: Path, settings: JsonObject) -> dict[str, str]:
    """Return a model's templates by name: from separate files, or from tokenizer_config.json, or from chat_template.json, in this order."""
    files = {_DEFAULT: folder / _TEMPLATE, _TOOL_USE: folder / _TEMPLATES / f"{_TOOL_USE}.jinja"}
    found = {name: _text(path) for name, path in files.items() if path.is_file()}
    if _DEFAULT in found:
        return found
    return (_named_templates(settings) or _named_templates(_optional(folder / _TEMPLATE_JSON))) | found


_MOST_IDS: Final = 1 << 32
"""End of the ids that the library accepts: it raises OverflowError from here on."""


def _named(encoder: Encoder, ends: Iterable[int], special: Mapping[str, str]) -> set[str]:
    """Return the spellings of the tokens that a model's files name as special or as ends."""
    return {*special.values(), *(name for i in ends if 0 <= i < _MOST_IDS and (name := encoder.id_to_token(i)) is not None)}


def _marks(encoder: Encoder, template: ChatTemplate | None) -> set[str]:
    return set() if template is None else turn_marks(encoder, template)


def _named_templates(settings: JsonObject) -> dict[str, str]:
    """Return the templates of a `chat_template` field by name. It holds one template, an object of several, or a list of objects with a name."""
    value = settings.fields.get("chat_template")
    if isinstance(value, list):
        entries = [cast("dict[str, Any]", entry) for entry in cast("list[Any]", value) if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in entries}
    named = cast("dict[str, Any]", value) if isinstance(value, dict) else {_DEFAULT: value}
    found = {name: source for name in (_DEFAULT, _TOOL_USE) if (source := named.get(name)) is not None}
    if not all(isinstance(source, str) for source in found.values()):
        raise damaged(settings.path, "its chat_template is not text")
    return found


def _template(
    path: Path, sources: Mapping[str, str], special: Mapping[str, str], response: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    source, tool_source = sources.get(_DEFAULT), sources.get(_TOOL_USE)
    if source is None:
        source, tool_source = tool_source, None
    return None if source is None else ChatTemplate(path, source, special, response, tool_source)


_BUILD: Final = "tokenizer 1"
"""Part of the cache's key. Change it when the same metadata must give another tokenizer."""

_UNKNOWN_KIND, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SAMPLING: Final = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
"""Fields of a GGUF file, after `general.sampling.`, that hold the sampling parameters."""
_CARDS: Final[Mapping[str, Mapping[str, float]]] = {"smollm2": {"temperature": 0.2}}
"""Sampling parameters that the makers recommend in a model's card but not in its files, by `general.basename`. At temperature 1 so small a model
writes nonsense."""
_INFILL: Final = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
"""llama.cpp's present and former names of the three infill tokens."""
_NAMED_IDS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_from_gguf(header: GgufHeader, home: Home, rows: int | None = None) -> ModelTokenizer:
    """Return the tokenizer in a GGUF file.

    Args:
        rows: rows of the model's embedding; None: they are not known.

    Raises:
        ModelFileError: the file has no tokenizer, or a damaged one.
        UnsupportedModel: Paceline does not know this kind of tokenizer.
    """
    if header.text("tokenizer.ggml.model") is None:
        raise ModelFileError(f"{header.path} has no tokenizer", "Use a GGUF file with its vocabulary in it")
    kept = cached_tokenizer(header.path, home)
    encoder = _load_kept(kept)
    if encoder is None:
        encoder = build_encoder(header)
        write_cache(kept, encoder.to_str().encode())
    special = {name: token for name, key in _NAMED_IDS.items() if (token := _token(header, encoder, key)) is not None}
    named = {_DEFAULT: header.text("tokenizer.chat_template"), _TOOL_USE: header.text(f"tokenizer.chat_template.{_TOOL_USE}")}
    template = _template(header.path, {name: source for name, source in named.items() if source is not None}, special)
    ends = frozenset(i for key in ("eos", "eot", "eom") if (i := header.integer(f"tokenizer.ggml.{key}_token_id")) is not None)
    encoder = with_control_marks(encoder, _marks(encoder, template), _named(encoder, ends, special), header.path)
    said = {name: header.fields.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    usual = _CARDS.get(header.text("general.basename") or "", {})
    drawn = {**usual, **{name: value for name, value in said.items() if value is not None}}
    marks = [next((i for key in keys if (i := header.integer(f"tokenizer.ggml.{key}_token_id")) is not None), None) for keys in _INFILL]
    return ModelTokenizer(header.path, encoder, ends, template, rows, drawn, marks)


def cached_tokenizer(path: Path, home: Home) -> Path:
    """Return the cache file of the tokenizer that was built from a model's file."""
    return home.tokenizers / f"{identity_key(path, _BUILD)}.json"


def build_encoder(header: GgufHeader) -> Encoder:
    """Build an encoder from metadata.

    Raises:
        ModelFileError: the metadata is missing or damaged.
        UnsupportedModel: the kind of vocabulary, or its rule to cut text, is not known.
    """
    path = header.path
    tokens, kinds = header.strings("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
    if not tokens:
        raise damaged(path, "its vocabulary is missing")
    kinds = [1.0] * len(tokens) if kinds is None else kinds
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise damaged(path, f"its vocabulary of {len(tokens)} tokens has {len(kinds)} types and {len(set(tokens))} different tokens")
    match header.text("tokenizer.ggml.model"):
        case "gpt2":
            encoder, bos_by_default = _byte_level(header, tokens)
        case "llama":
            encoder, bos_by_default = _sentencepiece(header, tokens, kinds), True
        case "bert":  # BERT always has the same tokens around a text
            return wordpiece(path, [_as_wordpiece(token) for token in tokens], lowercase=not any(map(_is_cased, tokens)))
        case other:
            raise unsupported(path, f"its tokenizer is of kind {other!r}")
    _add_special(encoder, tokens, kinds)
    _add_ends(header, encoder, bos_by_default)
    return encoder


def _as_wordpiece(token: str) -> str:
    """Return llama.cpp's token as WordPiece spells it. llama.cpp marks tokens that begin a word, WordPiece those that continue one.

    Tokens in brackets are special and stay as they are.
    """
    if token.startswith(SPACE_MARK):
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else PREFIX + token


def _is_cased(token: str) -> bool:
    """Return whether a token has a capital letter, so that it can't come from a text in lower case. False for special tokens."""
    return not token.startswith("[") and token != token.lower()


def _load_kept(path: Path) -> Encoder | None:
    from tokenizers import Tokenizer

    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (the library raises nothing narrower; what can't be read is built again)
        return None


def _byte_level(header: GgufHeader, tokens: list[str]) -> tuple[Encoder, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut = header.text("tokenizer.ggml.pre") or "default"
    if cut not in CUTS:
        raise unsupported(header.path, f"its tokenizer cuts text by {cut!r}, which Paceline does not know")
    lines = header.strings("tokenizer.ggml.merges")
    if lines is None:
        raise damaged(header.path, "its tokenizer has no merges")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise damaged(header.path, f"its tokenizer has the impossible merge {line!r}")
        merges.append((left, right))
    encoder = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut in IGNORE_MERGES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in CUTS[cut]]
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    encoder.decoder = decoders.ByteLevel()
    if cut in NORMALIZED:
        encoder.normalizer = normalizers.NFC()
    return encoder, cut in STARTS


def _sentencepiece(header: GgufHeader, tokens: list[str], kinds: list[float]) -> Encoder:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise damaged(header.path, "its tokenizer has no scores")
    unknown = _id(header, "unknown", len(tokens))
    fallback = all(f"<0x{byte:02X}>" in tokens for byte in (0, 255)) and _BYTE in kinds
    if not fallback:
        raise unsupported(header.path, "its SentencePiece tokenizer has no byte fallback")
    vocab = {token: i for i, token in enumerate(tokens)}
    ordinary = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    unk_token = None if unknown is None else tokens[unknown]
    merges = merges_from_scores(ordinary, vocab)
    encoder = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    prefix = header.flag("tokenizer.ggml.add_space_prefix")
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    strip: list[decoders.Decoder] = []
    if prefix is None or prefix:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        strip.append(decoders.Strip(" ", 1, 0))
    encoder.normalizer = normalizers.Sequence(steps)
    encoder.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return encoder


def merges_from_scores(scores: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return BPE merges with the effect of SentencePiece's scores: the pair with the best joined token is always merged first.

    Source: `generate_merges` in transformers' convert_slow_tokenizer.py.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((score, len(left), len(right), left, right) for left, right in pairs)
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _add_special(encoder: Encoder, tokens: list[str], kinds: list[float]) -> None:
    from tokenizers import AddedToken

    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in {_CONTROL, _UNKNOWN_KIND}:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    encoder.add_special_tokens(special)
    encoder.add_tokens(plain)


def _add_ends(header: GgufHeader, encoder: Encoder, bos_by_default: bool) -> None:
    """Make the encoder put a first and a last token around a text, if the model has them."""
    from tokenizers import processors

    template, used = ["$A"], dict[str, int]()
    for key, default in (("bos", bos_by_default), ("eos", False)):
        wanted = header.flag(f"tokenizer.ggml.add_{key}_token")
        token = _token(header, encoder, key)
        if (default if wanted is None else wanted) and token is not None:
            template = [token, *template] if key == "bos" else [*template, token]
            used[token] = encoder.token_to_id(token) or 0
    if used:
        encoder.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(used.items()))


def _token(header: GgufHeader, encoder: Encoder, key: str) -> str | None:
    token_id = _id(header, key, encoder.get_vocab_size())
    return None if token_id is None else encoder.id_to_token(token_id)


def _id(header: GgufHeader, key: str, n_tokens: int) -> int | None:
    """Return a special token's id, or None. Some files name an id beyond the vocabulary if the model does not have the token."""
    token_id = header.integer(f"tokenizer.ggml.{key}_token_id")
    return token_id if token_id is not None and 0 <= token_id < n_tokens else None
