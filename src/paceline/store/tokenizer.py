"""Text to ids and back, over the `tokenizers` library (transformers takes seconds to import).

Three kinds of vocabulary are known. In byte-level BPE, tokens spell bytes in GPT-2's alphabet. In SentencePiece BPE with byte fallback, they
spell text with a mark for the space. In WordPiece, of encoders, a mark stands for no space. Any other kind is refused when a model is opened.

Nodes send tokenizers to each other as bytes, because a text is tokenized on the node where it arrives, wherever the model runs. Such bytes are checked
like a downloaded file: the template runs in the sandbox, and a tokenizer that can't be read is an error.
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
"""Character that SentencePiece writes for a space."""
_PROBE: Final = "a word"
_BEFORE: Final = "\x02"
"""Character that is put before a part of a text, to take the space that a vocabulary puts first. No vocabulary joins it with the text behind it."""


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
            path: the file that the tokenizer came from, for errors.
            encoder: of the `tokenizers` library. The new object owns and changes it.
            eos_ids: tokens that the model's files name as ends; `end_ids` adds others of the vocabulary.
            template: None for a model without one.
            rows: rows of the model's embedding. Tokens beyond them (some files add a padding token that was never trained) can't be run.
            sampling_defaults: the sampling parameters that the model's files recommend.
            infill_tokens: the tokens before the text before a gap, before the text behind it, and before the gap's own text, as the model's files
                name them. Anything but three different tokens: the model fills no gaps.

        Raises:
            UnsupportedModel: the bytes of this kind of vocabulary's tokens are not known.
            ModelFileError: the tokenizer can't encode a word.
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
        """Return the ids of a text. A special token that it spells becomes that token.

        With `add_special`, the tokens that the model expects around a text (usually a first one) are added, unless the text begins with that token.

        Raises:
            InvalidRequest: the text holds lone surrogates, which are not characters, or the model's tokenizer fails on it.
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
            # The token that begins a text is not part of it, so the vocabulary's space follows it.
            again = self._repeats_space or (self.strips_space and token_id == self._first)
            is_prefix = again if added is not None else is_prefix and not piece
        return spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for special tokens and for ids beyond the vocabulary (padding of the head)."""
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

    def compile_template(self) -> None:
        """Compile the chat template, if the model has one. Raises InvalidRequest if it does not compile."""
        if self.template is not None:
            self.template.compile()

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
        """Render a chat. A chat to be continued ends with the content of its last message; a random mark finds that place."""
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
        """Return the encoder as the text of a tokenizer.json."""
        with self._lock:
            return self._control.without_doubles(self._encoder.to_str())

    def _ids(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode ({error.reason})", "Send UTF-8 without lone surrogates") from error
        # The switch is an attribute of the encoder, so it is set under the lock.
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
        """Return whether the vocabulary also puts its space behind special tokens."""
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
            # A character outside the alphabet stands for itself: plain words are sometimes appended to a vocabulary.
            return b"".join(bytes([alphabet[char]]) if char in alphabet else char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE_MARK, " ").encode()


def is_library_failure(error: BaseException) -> bool:
    """Return whether an error may come from the `tokenizers` library: it raises plain Exceptions, and panics that are not even that."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Return GPT-2's alphabet: the byte that each printable character stands for. Source: `bytes_to_unicode` in its encoder.py."""
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
"""Largest packed tokenizer that is fetched from a node. One of 150,000 tokens takes about 9 MiB. Raising it: a faulty node may send more bytes."""


def pack_tokenizer(tokenizer: ModelTokenizer) -> bytes:
    """Return everything that determines what a tokenizer does, as bytes. Equal tokenizers give equal bytes.

    Takes about 10 ms for each megabyte, so it must not run on an event loop.
    """
    template = tokenizer.template
    parts: dict[str, Any] = {
        "encoder": tokenizer.to_json(),
        "eos_ids": sorted(tokenizer.eos_ids),
        "template": None if template is None else template.source,
        "special_tokens": {} if template is None else dict(template.special_tokens),
    }
    if template is not None and template.response is not None:  # an absent field keeps the digest that machines know
        parts["response_template"] = template.response
    if tokenizer.tool_template is not None:
        parts["tool_template"] = tokenizer.tool_template
    if tokenizer.sampling_defaults:
        parts["sampling_defaults"] = dict(tokenizer.sampling_defaults)
    if tokenizer.infill_tokens:
        parts["infill_tokens"] = tokenizer.infill_tokens
    return json.dumps(parts, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def tokenizer_digest(packed: bytes) -> str:
    """Return the hex SHA-256 of a packed tokenizer, by which a node's card names it."""
    return hashlib.sha256(packed).hexdigest()


def unpack_tokenizer(data: bytes, origin: Path) -> ModelTokenizer:
    """Return the tokenizer in bytes that `pack_tokenizer` made.

    Args:
        origin: the file or node that the bytes came from, for errors.

    Raises:
        ModelFileError: the bytes are damaged.
        UnsupportedModel: Paceline does not know this kind of tokenizer.
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
