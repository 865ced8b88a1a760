"""Grammars that make calls of tools valid: Lark's, as llguidance reads it.

With `REQUIRED` an answer is calls and nothing else, behind its reasoning if there is any. With `AUTO` it is any text, in which every call that its mark
opens is whole and of its tool's schema. What a grammar allows, `reader` reads as those calls.

Arguments follow all of the schema, in each form of calls. What a form can't follow is refused with the path of its keyword.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from paceline.core.generation import Grammar, GrammarKind
from paceline.server.formats.cursor import json_escaped
from paceline.server.formats.format import Body, Calls, Format, Thinking, Written
from paceline.server.formats.lax_grammar import EMPTY, Lark, lax_value
from paceline.server.formats.leaves import Leaf, free_members, leaves, listed_values, members, place_of
from paceline.server.formats.python_grammar import python_arguments
from paceline.server.formats.schema_types import leaf_types
from paceline.server.formats.text_grammar import ANY, in_regex, text_terminal


class BranchChoice(StrEnum):
    """Rule on calls in an answer."""

    AUTO = "auto"
    REQUIRED = "required"
    OR_CONTENT = "or content"
    """Calls, or content of a form of its own."""


def calls_grammar(
    format: Format,  # noqa: A002  (callers name it so)
    tools: Mapping[str, Mapping[str, Any]],
    choice: BranchChoice,
    *,
    parallel: bool,
    token_id: Callable[[str], int | None],
    in_reasoning: bool = False,
    content: Mapping[str, Any] = {},
) -> Grammar | None:
    """Return the form of answers that call tools; None if there is none to follow.

    Args:
        tools: the JSON schema of the parameters of each tool that may be called; {} where any will do.
        choice: whether the answer has to be calls.
        parallel: it may be several.
        token_id: returns the special token of this name, which has no bytes in the vocabulary; None if the name is not that of a special token.
        in_reasoning: the prompt ended inside a reasoning block.
        content: with `OR_CONTENT` the JSON schema that the content is of.
    """
    way = next((way for way in format.calls if way.written), None)
    if not tools or way is None or way.written is None:
        return None
    calls = _Calls(Lark(token_id), way, way.written, tools, parallel=parallel)
    thinking = _thinking(calls.lark, format.thinking, in_reasoning=in_reasoning, required=choice is not BranchChoice.AUTO)
    match choice:
        case BranchChoice.REQUIRED:
            start = f"{thinking} {calls.all_from(calls.begin)}"
        case BranchChoice.OR_CONTENT:
            text = _content(calls.lark, format.content_begin, content)
            start = f"{thinking} ({calls.all_from(calls.begin)} | {text})"
        case BranchChoice.AUTO:
            thought = (*format.thinking.open, *format.thinking.close) if format.thinking else ()
            start = f"{thinking} {calls.in_text(calls.lark.specials((*format.skipped, *thought, way.written.call, way.written.end)))}"
    return Grammar(GrammarKind.TOOLS, calls.lark.text(start))


def content_grammar(
    format: Format,  # noqa: A002  (callers name it so)
    content: Mapping[str, Any],
    *,
    token_id: Callable[[str], int | None],
    in_reasoning: bool,
) -> Grammar:
    """Return the form of answers that are JSON of a schema after their reasoning. The arguments are those of `calls_grammar`."""
    lark = Lark(token_id)
    thinking = _thinking(lark, format.thinking, in_reasoning=in_reasoning, required=True)
    return Grammar(GrammarKind.FORM, lark.text(f"{thinking} {_content(lark, format.content_begin, content)}"))


def _content(lark: Lark, begin: str, schema: Mapping[str, Any]) -> str:
    """Return an expression for JSON of a schema, behind what a model writes before its content."""
    return f"{lark.literal(begin)} {lark.json(schema)}" if begin else lark.json(schema)


def _thinking(lark: Lark, thinking: Thinking | None, *, in_reasoning: bool, required: bool) -> str:
    if thinking is None:
        return ""
    rest = lark.until(thinking.close[0]) + (" " + lark.literal(thinking.behind) if required else "")
    return rest if in_reasoning else f"({lark.literal(thinking.open[0])} {rest})?"


class _Calls:
    """One way to write calls, as rules."""

    def __init__(self, lark: Lark, way: Calls, written: Written, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> None:
        self.lark = lark
        self._way = way
        self._written = written
        self._tools = tools
        self._between = written.between if parallel else None
        head, _, rest = written.call.partition("{name}")
        self._head = head
        self.begin = written.begin + head
        """Text before the first name."""
        middle, _, tail = rest.partition("{arguments}")
        self._around = (middle, tail)
        """Texts between name and arguments, and behind the arguments."""
        self._heads = (middle, *written.heads)
        """Every text that may stand between name and arguments."""
        self._named = lark.rule(" | ".join(self._call(name, schema) for name, schema in tools.items()))
        """A call behind `head`."""

    def all_from(self, text: str) -> str:
        """Return an expression for all calls. `text` is the part of their beginning that is still to be written, up to the first name."""
        more = "" if self._between is None else f"({self.lark.literal(self._between + self._head)} {self._named})*"
        return f"{self.lark.literal(text)} {self._named} {more} {self.lark.literal(self._written.end)}"

    def in_text(self, specials: Sequence[int]) -> str:
        """Any text, with such calls, and with special tokens that mean something else."""
        written = self._written
        if self._way.at_start and not any(self.begin.startswith(mark) for mark in self._way.begin if mark):
            return self._at_start()
        if written.trigger:
            begun = {written.trigger: self.begin.partition(written.trigger)[1] + self.begin.partition(written.trigger)[2]}
        else:
            begun = {mark: self.begin for mark in (*self._way.begin, *self._way.open) if mark and self.begin.startswith(mark)}
        if self._way.bare:
            begun |= {mark: self._head for mark in self._way.open if self._head.startswith(mark)}
        tokens: dict[int, list[str]] = {}
        marked: list[str] = []
        for mark, whole in begun.items():
            if special := self.lark.first_special(mark):
                tokens.setdefault(special[0], []).append(self._rest(whole, len(mark) - len(special[1])))
            else:
                opened = self.lark.lazy(f"{ANY} {self.lark.quoted(mark)}")
                marked.append(f"{opened} {self._rest(whole, len(mark))}")
        called = [f"<[{token}]> ({' | '.join(rests)})" for token, rests in tokens.items()]
        if not marked:
            return f"(<[^{','.join(map(str, tokens))}]> | {self.lark.rule(' | '.join(called))})*"
        others = [f"<[{token}]>" for token in specials if token not in tokens]
        options = [*marked, *(f"{ANY} {each}" for each in (*called, *others))]
        return f"({self.lark.rule(' | '.join(options))})* {ANY}"

    def _rest(self, whole: str, length: int) -> str:
        """Return an expression for the rest of a section's calls, or of one bare call, after the first `length` characters of its beginning."""
        if whole != self._head or not self._written.begin:
            return self.all_from(whole[length:])
        return f"{self.lark.literal(whole[length:])} {self._named}"

    def _at_start(self) -> str:
        """Calls, or a text that does not begin as one. A call has no mark: it is one from its arguments on."""
        middle, tail = self._around
        first = [
            f"{self.lark.lazy(self.lark.quoted(self.begin + self._named_as(name) + middle))} {self._arguments(schema)} {self.lark.literal(tail)}"
            for name, schema in self._tools.items()
        ]
        more = "" if self._between is None else f"({self.lark.literal(self._between + self._head)} {self._named})*"
        names = "|".join(re.escape(self._named_as(name)) for name in self._tools)
        if self._way.body is Body.OBJECT:
            keys = "|".join(self._way.arguments_keys)
            likeness = rf'\s*\{{\s*"name"\s*:\s*"({names})"\s*(\}}|,\s*"({keys})"\s*:)(.|\n)*'
        else:
            likeness = rf"\s*{re.escape(self.begin)}\s*({names})\s*{re.escape(middle)}(.|\n)*"
        text = self.lark.terminal(f"{ANY} & ~/{in_regex(likeness)}/")
        return f"({self.lark.rule(' | '.join(first))} {more} {self.lark.literal(self._written.end)} | {text})"

    def _named_as(self, name: str) -> str:
        """Return a tool's name as a call has it."""
        return json_escaped(name) if self._way.body is Body.OBJECT else name

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        written = self.lark.quoted(self._named_as(name))
        *heads, tail = (" /[0-9]{1,3}/ ".join(map(self.lark.literal, text.split("{index}"))) for text in (*self._heads, self._around[1]))
        middle = heads[0] if len(heads) == 1 else f"({' | '.join(heads)})"
        return f"{written} {middle} {self._arguments(schema)} {tail}"

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        match self._way.body:
            case Body.OBJECT | Body.JSON:
                return self.lark.json(_object(schema))
            case Body.LAX:
                return lax_value(self.lark, _object(schema), self._way.delimiter)
            case Body.PARAMETERS:
                return self._parameters(schema)
            case Body.PYTHON:
                return python_arguments(self.lark, schema)

    # ------------------------------------------------------------------------------------------------------- between tags

    def _parameters(self, schema: Mapping[str, Any]) -> str:
        return self.lark.rule(" | ".join(self._parameters_of(leaf, schema) for leaf in leaves(_object(schema), schema, place_of(schema))))

    def _parameters_of(self, leaf: Leaf, root: Mapping[str, Any]) -> str:
        named = members(leaf)
        if named:
            return " ".join(self._parameter(root, each.key, each.schema, each.at) + ("" if each.is_required else "?") for each in named)
        free = free_members(leaf)
        return EMPTY if free is False else f"({self._parameter(root, None, free, f'{leaf.at}.additionalProperties')})*"

    def _parameter(self, root: Mapping[str, Any], key: str | None, schema: object, at: str) -> str:
        tags = self._way.parameters
        assert tags
        before, _, after = self._written.parameter.partition("{value}")
        options: list[str] = []
        for leaf in leaves(schema, root, at):
            types = leaf_types(leaf.fields)
            if not types or "string" in types:
                head = self._tag(before, key, string="true")
                options += [f"{head} {each}" for each in self._texts(leaf, after, tags.close[0])]
            if others := types - {"string"}:
                defs = {name: root[name] for name in ("$defs", "definitions") if name in root}
                value = self.lark.json({**defs, **leaf.fields, "type": sorted(others)}, leaf.at)
                options.append(f"{self._tag(before, key, string='false')} {value} {self.lark.literal(after)}")
        return self.lark.rule(" | ".join(options))

    def _tag(self, before: str, key: str | None, *, string: str) -> str:
        """Return an expression for a tag up to the value."""
        text = before.replace("{string}", string)
        head, _, rest = text.partition("{key}")
        name = "/[A-Za-z_][A-Za-z0-9_]{0,63}/" if key is None else self.lark.quoted(key)
        return f"{self.lark.literal(head)} {name} {self.lark.literal(rest)}"

    def _texts(self, leaf: Leaf, after: str, close: str) -> list[str]:
        """Return expressions for a string and what stands behind it."""
        if (values := listed_values(leaf)) is not None:
            rest = self.lark.literal(after)
            return [f"{self.lark.quoted(value)} {rest}" for value in values if isinstance(value, str)]
        body = text_terminal(leaf.fields)
        self.lark.note({**leaf.fields, "type": "string"}, leaf.at)
        if self.lark.first_special(close):
            return [f"{self.lark.terminal(body)} {self.lark.literal(after)}"]
        body += " & ~/(.|\\n)*" + in_regex(re.escape(close)) + "(.|\\n)*/"
        return [self.lark.terminal(f"{self.lark.terminal(body)} {self.lark.quoted(after)}")]


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an object. Some schemas leave out the type."""
    return schema if {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else {"type": "object"} | dict(schema)
