"""The format of a model: how its answers are written, found by its chat template."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from paceline.server.formats.format import Body, Calls, Format, Header, Parameters, Thinking, Written
from paceline.server.formats.response_template import from_response_template


def _says_as_much(found: Format, own: Format) -> bool:
    """Return whether a bundled description covers the calls and thoughts of a model's own. The bundled one is tested, and knows what models get wrong."""
    ways = {(way.body, mark) for way in found.calls for mark in (*way.begin, *way.open)}
    thoughts = found.thinking.open if found.thinking else ()
    return all((way.body, mark) in ways for way in own.calls for mark in (*way.begin, *way.open)) and (
        own.thinking is None or {mark.rstrip() for mark in own.thinking.open} <= {mark.rstrip() for mark in thoughts}
    )


PLAIN = "hermes"
"""Format to ask a model for if its template can't render tools."""


def find_format(template: str | None, response_template: Mapping[str, Any] | None = None) -> Format:
    """Return the format of a model.

    Args:
        template: the text of its chat template.
        response_template: the model's own description of its answers, as transformers reads it.
    """
    families = _families()
    plain = families[PLAIN].format
    family = next((family.format for family in families.values() if template and family.fits(template)), None)
    found, is_read = family or plain, family is not None
    if response_template is not None and (own := from_response_template(response_template)) and not _says_as_much(found, own):
        found, is_read = replace(own, calls=own.calls or found.calls), is_read or bool(own.calls)
    if not template or not _renders_tools(template):
        return in_words(found)
    if not is_read:
        return replace(found, knows_tools=False, unread=_call_mark(template))
    return replace(found, knows_tools=True)


def in_words(found: Format) -> Format:
    """Return the format for a chat that describes its tools in words, as `PLAIN` writes them."""
    plain = _families()[PLAIN].format
    return replace(found, calls=plain.calls if found.name == PLAIN else (*plain.calls, *found.calls), knows_tools=False)


_MARK = re.compile(r"<[|｜/]?[\w▁:|｜ -]{2,40}[|｜]?>|\[[A-Z_]{3,30}\]|<[\w:]{2,30}=")
"""Expression for a mark in a template."""


def _call_mark(template: str) -> str:
    """Return the first mark that a template writes where it writes calls; empty if it writes none there."""
    _, found, rest = template.partition("tool_calls")
    match = _MARK.search(rest if found else template)
    return match.group() if match else ""


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
    if "header" in data:
        return _Family(Header(**_frozen(data["header"])).format(name), tuple(map(tuple, data["templates"])), data.get("rank", 0))
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
        fields["written"] = Written(**_frozen(data["written"]))
    if "parameters" in data:
        fields["parameters"] = Parameters(**_frozen(data["parameters"]))
    return Calls(**fields)


def _frozen(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(cast("Iterable[str]", value)) if isinstance(value, list) else value for key, value in data.items()}


_WORD = re.compile(r"\{[%{#]|[%}#]\}|\\.|['\"]|\btools\b", re.DOTALL)


def _renders_tools(template: str) -> bool:
    """Return whether a template's code names `tools` outside its texts."""
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
