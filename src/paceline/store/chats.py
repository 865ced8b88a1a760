"""How a chat becomes text and ids: the model's chat template, a program of its maker, the special
tokens that it alone may write, and the ids of chats that were encoded lately.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `{% generation %}`), so a template renders the same text here as there. The sandbox bounds neither a template's
time nor its memory: those are the process's that `bounded_tokenizer` starts.

Law of remembered ids: they are those of the whole text. An encoder cuts a text at its special tokens before it does anything else, and encodes
what lies between them piece by piece. So where a special token begins, the ids before it and those from it on are the ids of two texts; unless the
token takes in blanks before it, or stands in a word: texts are not cut at those.
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
"""The longest templates have some ten thousand."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template. It is compiled when it is first rendered."""

    path: Path
    """The file it came from, for errors."""
    source: str
    """Jinja text."""
    special_tokens: Mapping[str, str]
    """What templates call `bos_token`, `eos_token` and so on."""
    response: Mapping[str, Any] | None = None
    """How answers are to be read, as the model's files say it."""
    tool_source: str | None = None
    """Jinja text for chats with tools, where the model has another one for them."""

    def __post_init__(self) -> None:
        """Raise ModelFileError where it is too long."""
        for source in (self.source, self.tool_source or ""):
            if len(source) > MAX_TEMPLATE_CHARS:
                raise damaged(self.path, f"its chat template has {len(source)} characters")

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime, given: Given = NOTHING_GIVEN) -> str:
        """The text of a chat, up to where the assistant's answer begins.

        Args:
            messages: each with its content as one string.
            now: what `strftime_now` shows, however often the template asks.
            given: tools, and switches of the template's own.

        Raises:
            InvalidRequest: the template does not compile.
            TemplateRefused: it refuses the messages, or trips over them.
        """
        try:
            template = self._compiled_for_tools if given.tools and self.tool_source else self._compiled
        except Exception as error:  # a template is a stranger's program: it may raise anything
            raise InvalidRequest(
                f"the model's chat template does not compile ({_words(error)})",
                "Use /v1/completions, or get the model's files again (`paceline pull`)",
                field="messages",
            ) from error
        try:
            own = {"messages": messages, "add_generation_prompt": given.begins_turn and not given.continues, "strftime_now": now.strftime}
            fields = {**self.special_tokens, **given.switches, **own}
            try:
                return template.render({**fields, "tools": list(given.tools) or None})
            except Exception:
                if given.tools:
                    raise
                with suppress(Exception):  # some go over the tools of a chat that has none
                    return template.render({**fields, "tools": []})
                raise
        except Exception as error:  # likewise
            raise TemplateRefused(
                f"the model's chat template refuses these messages: {_words(error)}", "Send messages that it takes.", field="messages"
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
    """What an error says; a lack of memory says nothing."""
    return str(error) or type(error).__name__


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text parts joined by line breaks: most templates know only strings."""
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
    """Jinja's own `tojson` escapes HTML, which a model should not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here the body is just rendered."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


KEPT: Final = 8
"""Chats. Raising it: more of them go on quickly side by side, for their text and five times that for their ids."""
LEAST_LETTERS: Final = 2000
"""Of a text that is kept: shorter ones take no time."""


@dataclass(frozen=True, slots=True)
class _Known:
    ids: Sequence[int]
    cuts: Sequence[tuple[int, int]]
    """Where special tokens stand: letters before them, and ids before them."""


class ChatPrefixes:
    """Remembers some texts and their ids. For one thread at a time."""

    def __init__(self, added: dict[int, AddedToken], encode: Callable[[str], list[int]]) -> None:
        """Remember nothing yet.

        Args:
            added: the encoder's own tokens beside its vocabulary, by id.
            encode: gives the ids of any text.
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
        """Ids of a text; raises as `encode` does.

        Args:
            salt: only what was encoded with the same one is used: how long it takes tells no other client what was asked.
        """
        if len(text) < LEAST_LETTERS:
            return self._encode(text)
        letters, head = self._longest(text, salt)
        ids = [*head, *self._encode(text[letters:])]
        places = [place for place, token in enumerate(ids) if token in self._added]
        starts = [match.start() for match in self._spelled.finditer(text)]
        if len(starts) == len(places):  # else tokens were found otherwise than they are spelled
            cuts = [(start, place) for start, place in zip(starts, places, strict=True) if ids[place] in self._cuts]
            self._known[salt, text] = _Known(ids, cuts)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return ids

    def _longest(self, text: str, salt: str) -> tuple[int, Sequence[int]]:
        """The most letters that a known text has in common with this one, up to a cut, and their ids."""
        best, ids, found = 0, list[int](), ""
        for (salted, other), known in self._known.items():
            same = common_length(text, other) if salted == salt else 0
            # A token that is not in both to its end is no cut: `<|im` may go on otherwise.
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
    """The special tokens of one encoder, and their doubles: those that a chat's template writes are tokens, those spelled inside a message are text.

    Law: no message ends its own turn or begins another's, whatever it spells. A template sees messages whose spelled tokens are broken by a
    mark, so that what is whole in the rendered text is the template's own. There each is written as its *double*, an added token of the same
    kind with a name that cannot be guessed, and the marks are taken out; the encoder then reads doubles as tokens and everything else as text.
    A chat that spells no special token, which is nearly every one, is encoded as it is.
    """

    def __init__(self, encoder: Encoder, special: Sequence[AddedToken]) -> None:
        """Add the doubles.

        Args:
            encoder: gains a token for each of `special`; they stand behind all its others.
        """
        from tokenizers import AddedToken

        # Digits, since neither letter case nor JSON nor Unicode's normal forms change them.
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
                    special=False,  # as the switch that makes text of special tokens leaves others alone
                )
                for token in special
            ]
        )
        normalized = [token.content for token in special if token.normalized]
        self._normalizer: Final = encoder.normalizer if normalized else None
        spelled = [] if self._normalizer is None else [*normalized, *map(self._normalizer.normalize_str, normalized)]
        self._spelled_normalized: Final = re.compile("|".join(map(re.escape, filter(None, spelled))) or r"(?!)")
        """Found in a normalized text, which may spell a token that the text itself does not."""
        pairs = ((encoder.token_to_id(self._double + name), encoder.token_to_id(name)) for name in names)
        self._real: Final = {double: real for double, real in pairs if double is not None and real is not None}

    def broken(self, chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Return the messages with every special token they spell broken by a mark; None if they spell none, also once they are normalized."""
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
                    # Names too: those of a tool's parameters are its maker's.
                    return {cast("str", walk(name)): walk(item) for name, item in cast("dict[str, object]", value).items()}
                case _:
                    return value

        result = [{name: walk(value) for name, value in message.items()} for message in chat]
        return result if found else None

    def marked(self, rendered: str) -> str:
        """A rendered chat of broken messages, with the template's special tokens as doubles and no mark left."""
        return self._spelled.sub(lambda match: self._double + match[0], rendered).replace(self._mark, "")

    def real_ids(self, ids: list[int]) -> list[int]:
        """Ids with special tokens in place of their doubles."""
        return [self._real.get(i, i) for i in ids]

    def without_doubles(self, encoder_json: str) -> str:
        """A tokenizer.json as it was before the doubles."""
        parts: dict[str, Any] = orjson.loads(encoder_json)  # megabytes, at each start
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] not in self._real]
        return json.dumps(parts, ensure_ascii=False)
