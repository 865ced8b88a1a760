"""The tools of a chat: which the model is shown, which it may call, and how its answer is read for calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import InvalidRequest
from paceline.core.text import Given, Tokenizer
from paceline.server.formats.format import Format, find_format
from paceline.server.inference import ServedModel
from paceline.server.messages import (
    AllowedToolChoice,
    NamedTool,
    Tool,
    check_messages,
    messages_for_template,
    messages_without_tools,
    tool_for_template,
)
from paceline.server.reading import Reading
from paceline.server.requests import ChatCompletionRequest

OWN_SWITCHES: Final = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "continue_final_message", "documents"})
"""What templates are given here already."""
TAIL_TOKENS: Final = 64
"""Of a prompt's end, in which it is looked for whether the model is to reason first: longer than any template's."""
KEPT: Final = 16
"""Models whose formats are known. Raising it: a few kilobytes each."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request."""

    shown: Sequence[Mapping[str, Any]]
    """As templates take them. None where the model may call none: it would write calls all the same."""
    callable: Mapping[str, Tool]
    """Those that may be called, by name."""
    required: bool
    """The answer has to be a call."""
    parallel: bool

    @classmethod
    def of(cls, asked: ChatCompletionRequest) -> Tools:
        """The tools that a request has.

        Raises:
            InvalidRequest: the choice is of none of them, or two have one name.
        """
        tools = {tool.function.name: tool for tool in asked.tools or ()}
        if len(tools) < len(asked.tools or ()):
            raise InvalidRequest("tools: two have the same name", "Give each its own.", field="tools")
        names, required = set(tools), False
        match asked.tool_choice:
            case None | "auto":
                pass
            case "none":
                names = set[str]()
            case "required":
                required = True
            case NamedTool(function=named):
                names, required = {named.name}, True
            case AllowedToolChoice(allowed_tools=allowed):
                names, required = {tool.function.name for tool in allowed.tools}, allowed.mode == "required"
        if unknown := names - set(tools):
            raise InvalidRequest(f"tool_choice: there is no tool {min(unknown)!r} among tools", "Name one of them.", field="tool_choice")
        if required and not names:
            raise InvalidRequest("tool_choice: a call is required, and there are no tools", "Send tools.", field="tool_choice")
        may = {name: tool for name, tool in tools.items() if name in names}
        shown = [tool_for_template(tool) for tool in tools.values()] if may else []
        return cls(shown, may, required, asked.parallel_tool_calls is not False)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Of the parameters of those that may be called."""
        return {name: tool.function.parameters or {} for name, tool in self.callable.items()}


@dataclass(frozen=True, slots=True)
class WrittenChat:
    """A chat as a model's template takes it."""

    messages: list[dict[str, Any]]
    given: Given


def write_chat(asked: ChatCompletionRequest, tools: Tools, template: str) -> WrittenChat:
    """The chat of a request.

    Args:
        template: the text of the model's.

    Raises:
        InvalidRequest: the messages don't belong together, or a switch is none.
    """
    if wrong := check_messages(asked.messages):
        raise InvalidRequest(wrong, field=wrong.partition(":")[0])
    switches = dict(asked.chat_template_kwargs or {})
    if taken := OWN_SWITCHES & set(switches):
        raise InvalidRequest(
            f"chat_template_kwargs.{min(taken)}: is no switch", "Send the field itself where there is one.", field="chat_template_kwargs"
        )
    if asked.reasoning_effort is not None:
        for name, value in (("reasoning_effort", asked.reasoning_effort), ("enable_thinking", asked.reasoning_effort != "none")):
            if name in template:
                switches.setdefault(name, value)
    if knows_tools(template):
        return WrittenChat(messages_for_template(asked.messages, template), Given(tools.shown, switches))
    return WrittenChat(messages_without_tools(asked.messages, tools.shown), Given((), switches))


def knows_tools(template: str) -> bool:
    """Whether a template writes the tools it is given."""
    return "tools" in template


class Readings:
    """How models' answers are read. Safe to call from several threads."""

    def __init__(self) -> None:
        self._formats: OrderedDict[str, tuple[Format, Mapping[int, bytes]]] = OrderedDict()
        """By fingerprint: what a name means may change."""

    def of(self, model: ServedModel, tools: Tools, prompt: Sequence[int]) -> Reading | None:
        """How the answer to a prompt is read; None where it is all content."""
        found = self._formats.get(model.fingerprint)
        if found is None:
            tokenizer = model.tokenizer
            described = find_format(tokenizer.chat_template, tokenizer.response_template)
            found = self._formats[model.fingerprint] = described, special_tokens(described, tokenizer)
            while len(self._formats) > KEPT:
                self._formats.popitem(last=False)
        described, spelled = found
        if not tools.callable and not described.reasons:
            return None
        tail = b"".join(spelled.get(token) or model.tokenizer.token_bytes(token) for token in prompt[-TAIL_TOKENS:])
        in_reasoning = described.begins_in_reasoning(tail.decode("utf-8", "replace"))
        return Reading(described, tools.schemas, in_reasoning, tools.parallel, spelled)


def special_tokens(described: Format, tokenizer: Tokenizer) -> dict[int, bytes]:
    """A format's markers that are special tokens of a vocabulary, which spell nothing in a text."""
    found: dict[int, bytes] = {}
    for marker in described.markers:
        ids = tokenizer.encode(marker, add_special=False)
        if len(ids) == 1 and not tokenizer.token_bytes(ids[0]) and ids[0] not in tokenizer.eos_ids:
            found[ids[0]] = marker.encode()
    return found
