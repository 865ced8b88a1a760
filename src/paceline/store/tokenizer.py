"""Text to ids and back, over the `tokenizers` library (transformers takes seconds to import).

Three kinds of vocabulary are known: byte-level BPE, whose tokens spell bytes in GPT-2's alphabet, SentencePiece BPE with byte fallback, whose
tokens spell text with a mark for the space, and encoders' WordPiece, with a mark for no space. Anything else is refused when a model is opened.

A tokenizer travels as bytes: a text is tokenized where it arrives, on whichever node the model runs. What another machine sent is checked as a
downloaded file is: the template runs in the sandbox, and what can't be read is damaged.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from paceline.core.generation import model_sampling
from paceline.core.text import NOTHING_GIVEN, Given
from paceline.store.chats import ChatPrefixes, ChatTemplate, ControlTokens, join_parts
from paceline.store.control_marks import end_ids
from paceline.store.faults import damaged, unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder


SPACE_MARK: Final = "\u2581"
"""What SentencePiece writes for a space."""
_PROBE: Final = "a word"
_BEFORE: Final = "\x02"
"""Takes the space that a vocabulary puts before a text. No vocabulary joins it with what follows."""


class ModelTokenizer:
    """A `core.text.Tokenizer`. Safe to call from several threads."""

    def __init__(
        self,
        path: Path,
        encoder: Encoder,
        eos_ids: frozenset[int],
        template: ChatTemplate | None,
        rows: int | None = None,
        sampling_defaults: Mapping[str, object] | None = None,
        infill_tokens: Sequence[object] = (),
    ) -> None:
        """Wrap an encoder.

        Args:
            encoder: of the `tokenizers` library; becomes this object's own.
            eos_ids: tokens the model's files name as ends; `end_ids` adds those that the vocabulary has.
            template: None for a model without one.
            rows: of the model's embedding; tokens beyond them (some files add a padding token that was never trained) can't be run.
            sampling_defaults: what the model's files say of how its tokens are drawn.
            infill_tokens: those before the text before a gap, behind it and within it, as the model's files name them; no three tokens: they name none.

        Raises:
            UnsupportedModel: the vocabulary is of a kind whose bytes are not known.
            ModelFileError: it can't encode a word.
        """
        self._encoder = encoder
        self.template = template
        self.sampling_defaults: Mapping[str, float] = model_sampling(sampling_defaults or {})
        self._lock = threading.Lock()
        self._added: Final = encoder.get_added_tokens_decoder()
        self._known: Final = max(encoder.get_vocab_size(with_added_tokens=True), 1 + max(self._added, default=-1))
        self.size: Final = self._known if rows is None else min(self._known, rows)
        self._control: Final = ControlTokens(encoder, [token for token in self._added.values() if token.special])
        special = {token.content: i for i, token in self._added.items() if token.special}
        self.eos_ids: Final = frozenset(i for i in end_ids(special, eos_ids) if 0 <= i < self.size)
        self._kind: Final = _kind_of(path, encoder)
        marks = [i for i in infill_tokens if isinstance(i, int) and 0 <= i < self.size]
        self.infill_tokens: Final = (marks[0], marks[1], marks[2]) if len(infill_tokens) == len(set(marks)) == 3 else None
        self.special_tokens: Final = {name: i for name, i in special.items() if i < self.size}
        self._bytes: dict[int, bytes] = {}
        self._chats = ChatPrefixes(self._added, lambda text: self._ids(text, add_special=False))
        self._chats_lock = threading.Lock()
        try:
            bare, whole = (self._ids(_PROBE, add_special=flag) for flag in (False, True))
        except InvalidRequest as error:
            raise damaged(path, error.message) from error
        self._first: Final = whole[0] if whole[:1] != bare[:1] else None
        has_prefix = self._spelled(bare) == f" {_PROBE}"
        self.strips_space: Final = has_prefix and encoder.decode(bare) == _PROBE
        self._before: Final = _BEFORE if has_prefix else ""
        self._n_before: Final = len(self._ids(self._before, add_special=False))
        self._repeats_space: Final = self.strips_space and self._has_prefix_inside()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`. Special tokens spelled in it are those tokens.

        With `add_special`, what the model wants around a text (usually a first token) is added, unless the text begins with it.

        Raises:
            InvalidRequest: the text holds lone surrogates, which are no characters, or the model's tokenizer fails on it.
        """
        ids = self._ids(text, add_special=add_special)
        return ids[1:] if add_special and len(ids) > 1 and ids[0] == ids[1] == self._first else ids

    def encode_inside(self, text: str) -> list[int]:
        """See `Tokenizer.encode_inside`.

        Raises:
            InvalidRequest: as `encode`.
        """
        return self._ids(self._before + text, add_special=False, parse_special=False)[self._n_before :]

    def text_of(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.text_of`."""
        spelled, is_prefix = bytearray(), self.strips_space
        for token_id in ids:
            added = self._added.get(token_id)
            piece = self.token_bytes(token_id) if added is None else added.content.encode()
            spelled += piece.removeprefix(b" ") if is_prefix and added is None else piece
            # The token that begins a text is no part of it.
            again = self._repeats_space or (self.strips_space and token_id == self._first)
            is_prefix = again if added is not None else is_prefix and not piece
        return spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; empty for special tokens and for ids beyond the vocabulary (padding of the head)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    @property
    def chat_template(self) -> str | None:
        return None if self.template is None else self.template.source

    @property
    def tool_template(self) -> str | None:
        return None if self.template is None else self.template.tool_source

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        return None if self.template is None else self.template.response

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        """See `Tokenizer.render_chat`. A model without a template refuses all chats."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template", "Use /v1/completions, or a model made for chats", field="messages")
        chat = [join_parts(message) for message in messages]
        now = datetime.now().astimezone() if now is None else now
        broken = self._control.broken([*chat, *given.tools, given.switches])
        if broken is None:
            text = self._rendered(self.template, chat, now, given)
            with self._chats_lock:
                return self._chats.ids(text, given.salt)
        given = replace(given, tools=broken[len(chat) : -1], switches=broken[-1])
        text = self._control.marked(self._rendered(self.template, broken[: len(chat)], now, given))
        return self._control.real_ids(self._ids(text, add_special=False, parse_special=False))

    def _rendered(self, template: ChatTemplate, chat: list[dict[str, Any]], now: datetime, given: Given) -> str:
        """The text of a chat; of one to go on with, up to the end of its last message's content, which a mark shows."""
        if not given.continues:
            return template.render(chat, now, given)
        end = str(secrets.randbits(96))
        text, found, _ = template.render([*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + end}], now, given).partition(end)
        if not found:
            raise InvalidRequest(
                "the model's chat template does not show the last message", "Send continue_final_message: false", field="messages"
            )
        return text

    def to_json(self) -> str:
        """The encoder as a tokenizer.json."""
        with self._lock:
            return self._control.without_doubles(self._encoder.to_str())

    def _ids(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode ({error.reason})", "Send UTF-8 without lone surrogates") from error
        # The switch belongs to the encoder, not to the call.
        with self._lock:
            self._encoder.encode_special_tokens = not parse_special
            try:
                return self._encoder.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
            except BaseException as error:
                if not is_library_failure(error):
                    raise
                raise InvalidRequest(f"the model's tokenizer fails on this text ({error})", "Get the model's files again") from error

    def _spelled(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _has_prefix_inside(self) -> bool:
        """Return whether the vocabulary puts its space behind special tokens too."""
        names = [token.content for token in self._added.values() if token.special and not token.rstrip]
        return bool(names) and self._spelled(self._ids(names[0] + _PROBE, add_special=False)) == f" {_PROBE}"

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        token = self._encoder.id_to_token(token_id) if 0 <= token_id < self._known else None
        if token is None:
            return b""
        if self._kind is _Kind.WORD_PIECE:
            return (token[2:] if token.startswith("##") else f" {token}").encode()
        if self._kind is _Kind.BYTE_LEVEL:
            alphabet = byte_alphabet()
            # A character outside the alphabet stands for itself: a plain word someone appended to the vocabulary.
            return b"".join(bytes([alphabet[char]]) if char in alphabet else char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE_MARK, " ").encode()


def is_library_failure(error: BaseException) -> bool:
    """Whether the `tokenizers` library gave up: it raises nothing narrower than Exception, and its panics are not even that."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@cache
def byte_alphabet() -> Mapping[str, int]:
    """GPT-2's printable stand-in for each byte. Source: `bytes_to_unicode` in its encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}


class _Kind(Enum):
    BYTE_LEVEL = auto()
    BYTE_FALLBACK = auto()
    WORD_PIECE = auto()


def _kind_of(path: Path, encoder: Encoder) -> _Kind:
    decoder = encoder.decoder
    described = b"{}" if decoder is None else decoder.__getstate__()
    outer: dict[str, Any] = json.loads(described)
    kinds = {outer.get("type"), *(part.get("type") for part in outer.get("decoders", []))}
    if "ByteLevel" in kinds:
        return _Kind.BYTE_LEVEL
    if "ByteFallback" in kinds:
        return _Kind.BYTE_FALLBACK
    if "WordPiece" in kinds:
        return _Kind.WORD_PIECE
    raise unsupported(path, f"its tokenizer decodes by {sorted(map(str, kinds))}, not byte-level or byte-fallback BPE, nor WordPiece")


MAX_PACKED_BYTES: Final = 16 << 20
"""More than the tokenizers of the families that run here take (those of 150,000 tokens: some 9 MiB); what is longer is not fetched."""


def pack_tokenizer(tokenizer: ModelTokenizer) -> bytes:
    """Everything that decides what a tokenizer does. Equal ones pack alike. Takes some 10 ms a megabyte: not for an event loop."""
    template = tokenizer.template
    parts: dict[str, Any] = {
        "encoder": tokenizer.to_json(),
        "eos_ids": sorted(tokenizer.eos_ids),
        "template": None if template is None else template.source,
        "special_tokens": {} if template is None else dict(template.special_tokens),
    }
    if template is not None and template.response is not None:  # else it packs as ever: its digest is what machines know it by
        parts["response_template"] = template.response
    if tokenizer.tool_template is not None:
        parts["tool_template"] = tokenizer.tool_template
    if tokenizer.sampling_defaults:
        parts["sampling_defaults"] = dict(tokenizer.sampling_defaults)
    if tokenizer.infill_tokens:
        parts["infill_tokens"] = tokenizer.infill_tokens
    return json.dumps(parts, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def tokenizer_digest(packed: bytes) -> str:
    """What a card says of a tokenizer and its template: SHA-256 of them packed, hex."""
    return hashlib.sha256(packed).hexdigest()


def unpack_tokenizer(data: bytes, origin: Path) -> ModelTokenizer:
    """The tokenizer that `pack_tokenizer` packed.

    Args:
        origin: for errors: where the bytes lie, or whom they came from.

    Raises:
        ModelFileError: the bytes are damaged.
        UnsupportedModel: a kind of tokenizer Paceline does not know.
    """
    from tokenizers import Tokenizer

    try:
        parts: dict[str, Any] = json.loads(data)
        encoder = Tokenizer.from_str(parts["encoder"])
        ends = frozenset(int(token) for token in parts["eos_ids"])
        source = parts["template"]
        special = {str(name): str(token) for name, token in parts["special_tokens"].items()}
        response = parts.get("response_template")
        response, with_tools = response if isinstance(response, dict) else None, parts.get("tool_template")
        tool_source = with_tools if isinstance(with_tools, str) else None
        template = None if source is None else ChatTemplate(origin, str(source), special, response, tool_source)
        encoder.no_truncation()
        encoder.no_padding()
        defaults, marks = parts.get("sampling_defaults"), parts.get("infill_tokens")
        return ModelTokenizer(
            origin,
            encoder,
            ends,
            template,
            sampling_defaults=defaults if isinstance(defaults, dict) else None,
            infill_tokens=marks if isinstance(marks, list) else (),
        )
    except (ModelFileError, UnsupportedModel):
        raise
    except BaseException as error:
        if not is_library_failure(error):
            raise
        raise damaged(origin, f"it is not a packed tokenizer ({error})") from error
