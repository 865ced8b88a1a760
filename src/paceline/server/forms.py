"""The form that an answer must have: JSON of a schema, an expression, a grammar, or calls of tools that are valid by construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.server.call import Reading
from paceline.server.formats.grammar import BranchChoice, calls_grammar, content_grammar
from paceline.server.formats.lax_grammar import as_followed
from paceline.server.messages import json_bytes, json_object
from paceline.server.requests import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat, Sampling
from paceline.server.tools import Tools

ANY_OBJECT = '{"type":"object"}'


def grammar_of(asked: Sampling) -> Grammar | None:
    """The form that a request asks for.

    Raises:
        InvalidRequest: more than one is asked for.
    """
    forms: dict[str, Grammar] = {}
    if asked.grammar is not None:
        forms["grammar"] = Grammar(GrammarKind.LARK, asked.grammar)
    if asked.regex is not None:
        forms["regex"] = Grammar(GrammarKind.REGEX, asked.regex)
    match asked.response_format:
        case JsonObjectFormat():
            forms["response_format"] = Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case JsonSchemaFormat(json_schema=described):
            schema = ANY_OBJECT if described.schema_ is None else json_bytes(_followed(described.schema_)).decode()
            forms["response_format"] = Grammar(GrammarKind.JSON_SCHEMA, schema)
        case _:
            pass
    if len(forms) > 1:
        raise InvalidRequest(f"{' and '.join(forms)}: an answer has one form", "Send one of them.", field=next(iter(forms)))
    return next(iter(forms.values()), None)


def _followed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return as_followed(schema)
    except RecursionError as error:
        raise InvalidRequest(
            "response_format: the schema is nested too deep", "Send a form that can be followed.", field="response_format"
        ) from error


def answer_grammar(asked: ChatCompletionRequest, tools: Tools, reading: Reading | None, special: Mapping[str, int]) -> Grammar | None:
    """The form of a chat's answer: that asked for, behind the model's reasoning, and beside calls where it may call tools.

    Args:
        reading: how the answer is read; None where it is all content.
        special: the model's special tokens, by what they spell.

    Raises:
        InvalidRequest: more than one form is asked for.
    """
    form = grammar_of(asked)
    binding = tools.required or any(tool.function.strict for tool in tools.callable.values())
    if form is not None and form.kind is not GrammarKind.JSON_SCHEMA:
        if binding:
            field = "regex" if form.kind is GrammarKind.REGEX else "grammar"
            raise InvalidRequest(f"{field} and tools: an answer has one form", "Send one of them, or tools without strict.", field=field)
        return form
    if reading is None or (form is None and not binding):
        return form
    content: Mapping[str, Any] = {} if form is None else json_object(form.text) or {}
    if not tools.callable:
        thinking = reading.format.thinking
        if form is None or thinking is None:
            return form
        return content_grammar(thinking, content, token_id=special.get, in_reasoning=reading.in_reasoning)
    choice = BranchChoice.REQUIRED if tools.required else BranchChoice.AUTO if form is None else BranchChoice.OR_CONTENT
    try:
        made = calls_grammar(
            reading.format,
            {
                name: tool.function.parameters or {} if tool.function.strict or choice is not BranchChoice.AUTO else {}
                for name, tool in tools.callable.items()
            },
            choice,
            parallel=tools.parallel,
            token_id=special.get,
            in_reasoning=reading.in_reasoning,
            content=content,
        )
    except (
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        RecursionError,
    ) as error:  # a schema is a client's: anything may stand anywhere in it
        raise InvalidRequest(f"tools: a schema can't be read ({error})", "Send JSON schemas.", field="tools") from error
    if made is None:
        raise InvalidRequest("tools: calls in this model's format can't be forced", "Send tool_choice auto, without strict.", field="tools")
    return made
