"""The tools of a chat: which the model is shown, which it may call, and how its answer is read for calls; and the form that an answer must have: JSON
of a schema, an expression, a grammar, or calls of tools that are valid by construction.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cachetools import LRUCache

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.core.inference import ServedModel
from paceline.core.text import Given, Tokenizer
from paceline.server.call import Reading
from paceline.server.fitting import Chat
from paceline.server.formats.find import find_format, in_words
from paceline.server.formats.format import Format
from paceline.server.formats.gbnf import gbnf_as_lark, is_gbnf
from paceline.server.formats.grammar import BranchChoice, calls_grammar, content_grammar
from paceline.server.formats.patterns import with_ascii_classes
from paceline.server.formats.schema import followed_schema
from paceline.server.messages import (
    AllowedToolChoice,
    NamedTool,
    Tool,
    json_bytes,
    json_object,
    parameters_of,
    tool_for_template,
)
from paceline.server.requests import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat, Sampling

_LOG = logging.getLogger(__name__)
OWN_SWITCHES: Final = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "continue_final_message", "documents"})
"""Switches of a template that the server itself sets."""
TAIL_TOKENS: Final = 64
"""Tokens at a prompt's end that are searched for the beginning of reasoning: longer than any template's mark."""
KEPT: Final = 16
"""Number of models with a known format to keep. Raising it: a few kilobytes each."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request."""

    shown: Sequence[Mapping[str, Any]]
    """Tools as templates take them. Empty if the model may not call any, because a model that sees tools calls them all the same."""
    callable: Mapping[str, Tool]
    """Tools that may be called, by name."""
    required: bool
    """The answer has to be a call."""
    parallel: bool

    @classmethod
    def of(cls, asked: ChatCompletionRequest) -> Tools:
        """Return the tools of a request.

        Raises:
            InvalidRequest: the choice names none of them, or two have one name.
        """
        tools = {tool.function.name: tool for tool in asked.tools or ()}
        if len(tools) < len(asked.tools or ()):
            raise InvalidRequest("tools: two have the same name", "Give each its own.", field="tools")
        names, required, parallel = set(tools), False, asked.parallel_tool_calls is not False
        match asked.tool_choice:
            case None | "auto":
                pass
            case "none":
                names = set[str]()
            case "required":
                required = True
            case NamedTool(function=named):
                names, required, parallel = {named.name}, True, False
            case AllowedToolChoice(allowed_tools=allowed):
                names, required = {tool.function.name for tool in allowed.tools}, allowed.mode == "required"
        if unknown := names - set(tools):
            raise InvalidRequest(f"tool_choice: there is no tool {min(unknown)!r} among tools", "Name one of them.", field="tool_choice")
        if required and not names:
            raise InvalidRequest("tool_choice: a call is required, and there are no tools", "Send tools.", field="tool_choice")
        may = {name: tool for name, tool in tools.items() if name in names}
        shown = [tool_for_template(tool) for tool in tools.values()] if may else []
        return cls(shown, may, required, parallel)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Schemas of the parameters of the tools that may be called, by name."""
        return {name: parameters_of(tool.function) for name, tool in self.callable.items()}


def chat_of(asked: ChatCompletionRequest, tools: Tools, template: str, *, knows_tools: bool) -> Chat:
    """Return the chat of a request, to be fitted to the model's template.

    Args:
        template: its text.
        knows_tools: it writes the tools it is given.

    Raises:
        InvalidRequest: a switch is not one of the template's.
    """
    switches, salt = dict(asked.chat_template_kwargs or {}), asked.cache_salt or ""
    if taken := OWN_SWITCHES & set(switches):
        raise InvalidRequest(
            f"chat_template_kwargs.{min(taken)}: is no switch", "Send the field itself where there is one.", field="chat_template_kwargs"
        )
    for name, value in (("reasoning_effort", asked.reasoning_effort), ("enable_thinking", asked.thinks)):
        if value is not None and name in template:
            switches.setdefault(name, value)
    return Chat(asked.messages, Given(tools.shown, switches, salt, _continues(asked)), knows_tools)


def _continues(asked: ChatCompletionRequest) -> bool:
    """Return whether the answer goes on with the last message.

    Raises:
        InvalidRequest: it can't, or the fields contradict one another.
    """
    if not asked.continue_final_message:
        if asked.add_generation_prompt is False:
            why = "add_generation_prompt: an answer is a new turn, or goes on with the last message"
            raise InvalidRequest(why, "Send continue_final_message: true with it.", field="add_generation_prompt")
        return False
    if asked.add_generation_prompt:
        why = "continue_final_message: what goes on with a message begins no turn, as add_generation_prompt asks"
        raise InvalidRequest(why, "Send one of them.", field="continue_final_message")
    last = asked.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.text:
        why = "continue_final_message: the last message is no text of the assistant's"
        raise InvalidRequest(why, "Send one that the answer may go on with.", field="continue_final_message")
    return True


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How one model writes its answers."""

    described: Format
    spelled: Mapping[int, bytes]
    """The special tokens among its markers, which spell nothing in a text."""
    unnamed: Mapping[int, str]
    """The names of the other special tokens."""

    @property
    def in_words(self) -> ModelFormat:
        """Return the format for a chat that describes its tools in words."""
        return replace(self, described=in_words(self.described))

    def reading(self, model: ServedModel, tools: Tools, prompt: Sequence[int]) -> Reading | None:
        """Return how to read the answer to a prompt; None if it is all content."""
        if not tools.callable and self.described.thinking is None and not self.described.skipped:
            return None
        tail = b"".join(self.spelled.get(token) or model.tokenizer.token_bytes(token) for token in prompt[-TAIL_TOKENS:])
        in_reasoning = self.described.begins_in_reasoning(tail.decode("utf-8", "replace"))
        return Reading(self.described, tools.schemas, in_reasoning, tools.parallel, self.spelled, self.unnamed, tools.required)


class ModelFormats:
    """The formats of the models served. Safe to call from several threads."""

    def __init__(self) -> None:
        self._found: LRUCache[tuple[str, bool], ModelFormat] = LRUCache(KEPT)
        """By fingerprint, as what a name means may change, and for the model's first template or its other one."""

    def of(self, model: ServedModel, template: str | None = None) -> ModelFormat:
        """Return the format of a model's answers.

        Args:
            template: the one that its chat is rendered with, where that is not the model's only one.
        """
        template = model.tokenizer.chat_template if template is None else template
        key = model.fingerprint, template == model.tokenizer.chat_template
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _format_of(model.tokenizer, template or "")
            if (why := found.described.why_unread) is not None:
                _LOG.warning("%s: %s", model.name, why)
        return found


def _format_of(tokenizer: Tokenizer, template: str) -> ModelFormat:
    described = find_format(template, tokenizer.response_template)
    thinking = described.thinking
    if thinking is not None and not any(mark.strip() in template for mark in (*thinking.open, *thinking.close)):
        described = replace(described, thinking=None)  # a model that was never shown the marks means what it says with them
    markers = _markers(described)
    special = {token: name for name, token in tokenizer.special_tokens.items() if token not in tokenizer.eos_ids}
    named = {token for token, name in special.items() if any(name in marker for marker in markers)}
    return ModelFormat(
        described,
        {token: special[token].encode() for token in named},
        {token: name for token, name in special.items() if token not in named},
    )


def _markers(described: Format) -> set[str]:
    """Return every text of a format that may be a special token."""
    found = set(described.skipped)
    if described.thinking is not None:
        found.update(described.thinking.open, described.thinking.close)
    for calls in described.calls:
        found.update(calls.begin, calls.end, calls.open, calls.at_start, calls.head_end, calls.name_prefix, calls.name_cut, calls.close)
        found.update(calls.closed_head)
        found.add(calls.delimiter)
        if calls.parameters is not None:
            found.update(calls.parameters.open, calls.parameters.key_end, calls.parameters.close)
    return found


ANY_OBJECT = '{"type":"object"}'


def grammar_of(asked: Sampling) -> Grammar | None:
    """Return the form that a request asks for.

    Raises:
        InvalidRequest: more than one is asked for.
    """
    forms: dict[str, Grammar] = {}
    if asked.grammar is not None:
        forms["grammar"] = Grammar(GrammarKind.LARK, gbnf_as_lark(asked.grammar) if is_gbnf(asked.grammar) else asked.grammar)
    if asked.regex is not None:
        forms["regex"] = Grammar(GrammarKind.REGEX, with_ascii_classes(asked.regex, ["\\d"]))
    match asked.response_format:
        case JsonObjectFormat(schema_=schema):
            forms["response_format"] = _of_schema(schema, "response_format.schema")
        case JsonSchemaFormat(json_schema=described):
            forms["response_format"] = _of_schema(described.schema_, "response_format.json_schema.schema")
        case _:
            pass
    if len(forms) > 1:
        raise InvalidRequest(f"{' and '.join(forms)}: an answer has one form", "Send one of them.", field=next(iter(forms)))
    return next(iter(forms.values()), None)


def _of_schema(schema: Mapping[str, Any] | None, at: str) -> Grammar:
    """Return the form of JSON of a schema; of any object if the schema is None."""
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT if schema is None else json_bytes(_followed(schema, at)).decode())


def _followed(schema: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return a schema as it is compiled, with its place in the request, which errors of compiling name."""
    return {"$comment": at, **followed_schema(schema, at)}


def answer_grammar(asked: ChatCompletionRequest, tools: Tools, reading: Reading | None, special: Mapping[str, int]) -> Grammar | None:
    """Return the form of a chat's answer: the form asked for, after the model's reasoning, and next to calls if it may call tools.

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
        if form is None or (reading.format.thinking is None and not reading.format.content_begin):
            return form
        return content_grammar(reading.format, content, token_id=special.get, in_reasoning=reading.in_reasoning)
    choice = BranchChoice.REQUIRED if tools.required else BranchChoice.AUTO if form is None else BranchChoice.OR_CONTENT
    made = calls_grammar(
        reading.format,
        {
            name: _followed(parameters_of(tool.function), f"tools[{(asked.tools or []).index(tool)}].function.parameters")
            if tool.function.strict or choice is not BranchChoice.AUTO
            else {}
            for name, tool in tools.callable.items()
        },
        choice,
        parallel=tools.parallel,
        token_id=special.get,
        in_reasoning=reading.in_reasoning,
        content=content,
    )
    if made is None:
        raise InvalidRequest("tools: calls in this model's format can't be forced", "Send tool_choice auto, without strict.", field="tools")
    return made
