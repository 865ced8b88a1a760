"""How a chat becomes text and ids: the model's chat template (a program of its maker), the special tokens that only the template may write, and
the ids of recently encoded chats.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `{% generation %}`), so a template renders the same text here as there. The sandbox limits neither the time nor the
memory of a template: the process that `bounded_tokenizer` starts does.

Law of remembered ids: they equal the ids of the whole text. An encoder cuts a text at its special tokens before it does anything else, and encodes
each piece between them separately. So a text can be split where a special token begins: the ids of the two parts are the ids of the whole.
Tokens that take in the blanks before them, or that match only whole words, are the exception: texts are not cut at those.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import orjson

from paceline.core.errors import InvalidRequest, TemplateRefused
from paceline.core.text import NOTHING_GIVEN, Given, common_length
from paceline.store.faults import damaged

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Encoder


MAX_TEMPLATE_CHARS: Final = 1 << 20
"""Longest accepted template; the longest known ones have about ten thousand characters. Raising it: a hostile template costs more to compile."""


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template. It is compiled when it is first rendered."""

    path: Path
    """The file it came from, for errors."""
    source: str
    """Jinja text."""
    special_tokens: Mapping[str, str]
    """Spellings of the tokens that templates call `bos_token`, `eos_token` and so on, by these names."""
    response: Mapping[str, Any] | None = None
    """The model's own description of how to read its answers; None: its files have none."""
    tool_source: str | None = None
    """Jinja text for chats with tools; None: the model uses `source` for them too."""

    def __post_init__(self) -> None:
        """Check the length of the sources. Raises ModelFileError if one exceeds `MAX_TEMPLATE_CHARS`."""
        for source in (self.source, self.tool_source or ""):
            if len(source) > MAX_TEMPLATE_CHARS:
                raise damaged(self.path, f"its chat template has {len(source)} characters")

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime, given: Given = NOTHING_GIVEN) -> str:
        """Render a chat as text, up to where the assistant's answer begins.

        Args:
            messages: each with its content as one string.
            now: the time that `strftime_now` formats, the same one for every call in the template.
            given: tools, and switches that the template defines.

        Raises:
            InvalidRequest: the template does not compile.
            TemplateRefused: the template refuses the messages, or fails on them.
        """
        template = self._for_chat(with_tools=bool(given.tools))
        try:
            own = {"messages": messages, "add_generation_prompt": given.begins_turn and not given.continues, "strftime_now": now.strftime}
            fields = {**self.special_tokens, **given.switches, **own}
            try:
                return template.render({**fields, "tools": list(given.tools) or None})
            except Exception:
                if given.tools:
                    raise
                with suppress(Exception):  # some templates loop over `tools` without a check for None
                    return template.render({**fields, "tools": []})
                raise
        except Exception as error:  # likewise
            raise TemplateRefused(
                f"the model's chat template refuses these messages: {_words(error)}", "Send messages that it takes.", field="messages"
            ) from error

    def compile(self) -> None:
        """Compile the template, for chats with tools too. Raises InvalidRequest if it does not compile."""
        self._for_chat(with_tools=False)
        self._for_chat(with_tools=True)

    def _for_chat(self, *, with_tools: bool) -> jinja2.Template:
        try:
            return self._compiled_for_tools if with_tools and self.tool_source else self._compiled
        except Exception as error:  # a template is an untrusted program: it may raise anything
            raise InvalidRequest(
                f"the model's chat template does not compile ({_words(error)})",
                "Use /v1/completions, or get the model's files again (`paceline pull`)",
                field="messages",
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _compile(self.source)

    @cached_property
    def _compiled_for_tools(self) -> jinja2.Template:
        return _compile(self.tool_source or self.source)


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(source, globals={"raise_exception": _raise_exception})


def _words(error: Exception) -> str:
    """Return an error's text, or the name of its type: a MemoryError has no text."""
    return str(error) or type(error).__name__


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text parts joined by line breaks, because most templates accept only strings.

    Raises:
        InvalidRequest: a part is not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for part in cast("list[Any]", content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise InvalidRequest("a message has a content part that is not text", "Send text parts only", field="messages")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Format a value as JSON for a template. Jinja's own `tojson` escapes HTML, and a model should not see these escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks answers for training. Here its body is only rendered."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


KEPT: Final = 8
"""Number of chats that are remembered. Raising it: more concurrent chats continue quickly; each costs the memory of its text and about five times
that for its ids."""
LEAST_LETTERS: Final = 2000
"""Characters of the shortest text that is remembered. Shorter ones are encoded quickly."""


@dataclass(frozen=True, slots=True)
class _Known:
    ids: Sequence[int]
    cuts: Sequence[tuple[int, int]]
    """Places of the special tokens: the number of characters before each, and the number of ids before it."""


class ChatPrefixes:
    """A memory of recent texts and their ids, so that a chat which continues one encodes only its new part. For one thread at a time."""

    def __init__(self, added: dict[int, AddedToken], encode: Callable[[str], list[int]]) -> None:
        """Start with an empty memory.

        Args:
            added: the tokens that the encoder has in addition to its vocabulary, by id.
            encode: returns the ids of any text.
        """
        self._encode = encode
        self._added: Final = frozenset(added)
        names = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._spelled: Final = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._cuts: Final = frozenset(
            i for i, token in added.items() if token.special and not (token.lstrip or token.single_word or token.normalized)
        )
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    def ids(self, text: str, salt: str = "") -> list[int]:
        """Return the ids of a text, and remember them. Raises what `encode` raises.

        Args:
            salt: only texts with the same salt are reused, so that the time a request takes reveals nothing of another client's chats.
        """
        if len(text) < LEAST_LETTERS:
            return self._encode(text)
        letters, head = self._longest(text, salt)
        ids = [*head, *self._encode(text[letters:])]
        places = [place for place, token in enumerate(ids) if token in self._added]
        starts = [match.start() for match in self._spelled.finditer(text)]
        if len(starts) == len(places):  # otherwise the encoder found tokens that are spelled differently in the text, and no cut is certain
            cuts = [(start, place) for start, place in zip(starts, places, strict=True) if ids[place] in self._cuts]
            self._known[salt, text] = _Known(ids, cuts)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return ids

    def _longest(self, text: str, salt: str) -> tuple[int, Sequence[int]]:
        """Return the longest beginning that a remembered text shares with this one, up to a cut: its characters and its ids."""
        best, ids, found = 0, list[int](), ""
        for (salted, other), known in self._known.items():
            same = common_length(text, other) if salted == salt else 0
            # A token is a cut only if both texts hold all of it: after `<|im` they may differ.
            cut = next(((start, place) for start, place in reversed(known.cuts) if self._spelled_end(other, start) <= same), (0, 0))
            if cut[0] > best:
                best, ids, found = cut[0], list(known.ids[: cut[1]]), other
        if found:
            self._known.move_to_end((salt, found))
        return best, ids

    def _spelled_end(self, text: str, start: int) -> int:
        match = self._spelled.match(text, start)
        return len(text) + 1 if match is None else match.end()


class ControlTokens:
    """The special tokens of one encoder, and their doubles. A special token that the template writes is a token; one spelled in a message is text.

    Law: no message can end its turn or begin another one, whatever it spells. The template sees messages in which each spelled token is broken by a
    mark, so each unbroken token of the rendered text comes from the template. There each is written as its *double*, an added token of the same
    kind with a name that cannot be guessed, and the marks are removed. The encoder then reads doubles as tokens and everything else as text.
    A chat that spells no special token, as nearly every chat, is encoded as it is.
    """

    def __init__(self, encoder: Encoder, special: Sequence[AddedToken]) -> None:
        """Add the doubles to an encoder.

        Args:
            encoder: gains a token for each of `special`, with ids after those of all others.
            special: the tokens that only the template may write.
        """
        from tokenizers import AddedToken

        # Digits: a change of letter case, JSON and Unicode's normal forms leave them as they are.
        self._mark: Final = str(secrets.randbits(96))
        self._double: Final = str(secrets.randbits(96))
        names = sorted((token.content for token in special), key=len, reverse=True)
        self._spelled: Final = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        encoder.add_tokens(
            [
                AddedToken(
                    self._double + token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,  # so that the switch that encodes special tokens as text does not affect doubles
                )
                for token in special
            ]
        )
        normalized = [token.content for token in special if token.normalized]
        self._normalizer: Final = encoder.normalizer if normalized else None
        spelled = [] if self._normalizer is None else [*normalized, *map(self._normalizer.normalize_str, normalized)]
        self._spelled_normalized: Final = re.compile("|".join(map(re.escape, filter(None, spelled))) or r"(?!)")
        """An expression for normalized texts: normalizing may spell a token that the text itself does not."""
        pairs = ((encoder.token_to_id(self._double + name), encoder.token_to_id(name)) for name in names)
        self._real: Final = {double: real for double, real in pairs if double is not None and real is not None}

    def broken(self, chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Return the messages with each special token they spell broken by a mark; None if they spell none, before and after normalization."""
        found = False

        def becomes_special(text: str) -> bool:
            if self._normalizer is None:
                return False
            whole = text.encode("utf-8", "replace").decode()  # lone surrogates are refused later
            return self._spelled_normalized.search(self._normalizer.normalize_str(whole)) is not None

        def split(match: re.Match[str]) -> str:
            nonlocal found
            found = True
            return match[0][0] + self._mark + match[0][1:]

        def walk(value: object) -> object:
            nonlocal found
            match value:
                case str():
                    found = found or becomes_special(value)
                    return self._spelled.sub(split, value)
                case list():
                    return [walk(item) for item in cast("list[object]", value)]
                case dict():
                    # Keys too: the client chooses the names of a tool's parameters.
                    return {cast("str", walk(name)): walk(item) for name, item in cast("dict[str, object]", value).items()}
                case _:
                    return value

        result = [{name: walk(value) for name, value in message.items()} for message in chat]
        return result if found else None

    def marked(self, rendered: str) -> str:
        """Return a rendered chat of broken messages with the template's special tokens as doubles, and without marks."""
        return self._spelled.sub(lambda match: self._double + match[0], rendered).replace(self._mark, "")

    def real_ids(self, ids: list[int]) -> list[int]:
        """Return ids with each double replaced by its special token."""
        return [self._real.get(i, i) for i in ids]

    def without_doubles(self, encoder_json: str) -> str:
        """Return the text of a tokenizer.json without the doubles."""
        parts: dict[str, Any] = orjson.loads(encoder_json)  # megabytes, at each start
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] not in self._real]
        return json.dumps(parts, ensure_ascii=False)
