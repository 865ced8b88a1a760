"""How one family of models writes reasoning and calls of tools: a description, read from data; and the parts that an answer is read into by it.

`families/*.toml` has a description for each family, and `find_format` says which one a model follows: by what its chat template spells, or by the
`response_template` that it brings. No family has code of its own: `reader` and `grammar` read descriptions.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, cast


class Body(StrEnum):
    """In what form a call's arguments are written."""

    OBJECT = "object"
    """One JSON object has both name and arguments."""
    JSON = "json"
    """A JSON object behind the name."""
    LAX = "lax"
    """The same with bare keys, and strings between delimiters of their own."""
    PARAMETERS = "parameters"
    """Each argument between tags of its own, strings as they are."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How an argument is written between tags."""

    open: tuple[str, ...]
    key_end: tuple[str, ...]
    """What stands between key and value."""
    close: tuple[str, ...]
    pad: str = ""
    """What stands around a value and is no part of it, once on each side."""
    string: str = ""
    """Where the tag has it behind the key, the value is a string."""
    json: str = ""
    """Where the tag has it behind the key, the value is JSON."""


@dataclass(frozen=True, slots=True)
class Written:
    """How calls are written, for a grammar: `{name}`, `{arguments}`, `{key}` and `{value}` stand for themselves."""

    call: str
    begin: str = ""
    """Before the first call."""
    between: str | None = None
    """Between two; None: there is but one."""
    end: str = ""
    """Behind the last one."""
    parameter: str = ""
    trigger: str = ""
    """What of `begin` and `call` only calls have, where that is not their mark: from there on a text is a call."""


@dataclass(frozen=True, slots=True)
class Calls:
    """One way to write calls: [begin] (open name head_end arguments close)... [end]. Blanks may stand between these."""

    body: Body
    written: Written | None = None
    begin: tuple[str, ...] = ()
    """Opens a section of calls."""
    end: tuple[str, ...] = ()
    """Closes it, where the model remembers to."""
    open: tuple[str, ...] = ()
    """Opens a call."""
    bare: bool = False
    """A call may stand without a section."""
    at_start: tuple[str, ...] = ()
    """Opens a call where nothing but blanks stands before it in the answer."""
    between: str = ""
    """Characters that may stand between calls."""
    head_end: tuple[str, ...] = ()
    """What stands between name and arguments."""
    name_prefix: tuple[str, ...] = ()
    """What may stand before the name."""
    name_cut: tuple[str, ...] = ()
    """Where the name ends, if anything stands behind it and before `head_end`."""
    close: tuple[str, ...] = ()
    """Closes a call."""
    name_keys: tuple[str, ...] = ("name",)
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    delimiter: str = ""
    """Around strings in `Body.LAX`."""
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True)
class Thinking:
    """Between what a model thinks before it answers."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    anywhere: bool = False
    """Also behind the answer's start."""
    ended_by_calls: bool = False
    """A call ends it too."""
    behind: str = ""
    """What stands between it and a call, for a grammar."""


@dataclass(frozen=True, slots=True)
class Format:
    """How one model writes its answers."""

    name: str
    calls: tuple[Calls, ...] = ()
    """A grammar writes the first one, which has `written`."""
    thinking: Thinking | None = None
    skipped: tuple[str, ...] = ()
    """Marks that are no part of the content."""
    knows_tools: bool = False
    """The model's chat template renders `tools`."""

    @property
    def in_words(self) -> Format:
        """The same for a chat whose tools are described in words, as `PLAIN` writes them."""
        plain = _families()[PLAIN].format
        return replace(self, calls=plain.calls if self.name == PLAIN else (*plain.calls, *self.calls), knows_tools=False)

    def begins_in_reasoning(self, prompt_tail: str) -> bool:
        """Whether the answer to this prompt begins inside an open reasoning block."""
        tail = prompt_tail.rstrip()
        return self.thinking is not None and any(tail.endswith(mark.rstrip()) for mark in self.thinking.open)


def _says_as_much(found: Format, own: Format) -> bool:
    """Whether a bundled description has the calls and thoughts of a model's own: it has been tried, and knows what models get wrong."""
    ways = {(way.body, mark) for way in found.calls for mark in (*way.begin, *way.open)}
    thoughts = found.thinking.open if found.thinking else ()
    return all((way.body, mark) in ways for way in own.calls for mark in (*way.begin, *way.open)) and (
        own.thinking is None or {mark.rstrip() for mark in own.thinking.open} <= {mark.rstrip() for mark in thoughts}
    )


PLAIN = "hermes"
"""What a model is asked to write whose template knows no tools."""


def find_format(template: str | None, response_template: Mapping[str, Any] | None = None) -> Format:
    """The format of a model.

    Args:
        template: the text of its chat template.
        response_template: what it says itself of its answers, as transformers reads that.
    """
    from paceline.server.formats.response_template import from_response_template  # which makes formats

    families = _families()
    plain = families[PLAIN].format
    found = next((family.format for family in families.values() if template and family.fits(template)), plain)
    if response_template is not None and (own := from_response_template(response_template)) and not _says_as_much(found, own):
        found = replace(own, calls=own.calls or found.calls)
    return replace(found, knows_tools=True) if template and _renders_tools(template) else found.in_words


@dataclass(frozen=True, slots=True)
class _Family:
    """A description and how to know its models."""

    format: Format
    templates: tuple[tuple[str, ...], ...]
    """A model is of the family where its chat template has all texts of one of these. None may begin with `!`: what the template must not have."""
    rank: int
    """Families are tried in this order."""

    def fits(self, template: str) -> bool:
        return any(
            all((text[1:] not in template) if text.startswith("!") else (text in template) for text in texts) for texts in self.templates
        )


@cache
def _families() -> Mapping[str, _Family]:
    folder = Path(__file__).parent / "families"
    families = (_family(path.stem, tomllib.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.toml")))
    return {family.format.name: family for family in sorted(families, key=lambda family: family.rank)}


def _family(name: str, data: dict[str, Any]) -> _Family:
    calls = tuple(_calls(each) for each in data.get("calls", ()))
    thinking = data.get("thinking")
    format_ = Format(
        name,
        calls,
        Thinking(**_frozen(thinking)) if thinking else None,
        tuple(data.get("skipped", ())),
    )
    return _Family(format_, tuple(tuple(texts) for texts in data["templates"]), data.get("rank", 0))


def _calls(data: dict[str, Any]) -> Calls:
    fields = _frozen(data)
    fields["body"] = Body(data["body"])
    if "written" in data:
        fields["written"] = Written(**data["written"])
    if "parameters" in data:
        fields["parameters"] = Parameters(**_frozen(data["parameters"]))
    return Calls(**fields)


def _frozen(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(cast("Iterable[str]", value)) if isinstance(value, list) else value for key, value in data.items()}


_WORD = re.compile(r"\{[%{#]|[%}#]\}|\\.|['\"]|\btools\b", re.DOTALL)


def _renders_tools(template: str) -> bool:
    """Whether a template's code names `tools` outside its texts."""
    inside = quote = ""
    for match in _WORD.finditer(template):
        word = match.group()
        if quote:
            quote = "" if word == quote else quote
        elif inside:
            if inside != "{#" and word in {"'", '"'}:
                quote = word
            elif word == {"{%": "%}", "{{": "}}", "{#": "#}"}[inside]:
                inside = ""
            elif inside != "{#" and word == "tools":
                return True
        elif word in {"{%", "{{", "{#"}:
            inside = word
    return False


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. Its arguments follow in `CallArguments` of the same index."""

    index: int
    """Of the calls of this answer, from 0 on."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON text, whole once all pieces are joined."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments
