"""Items of a conversation as a chat's messages, and responses kept in memory, so that a next one can go on from them.

Laws: what the assistant did in one turn (reasoning, text, calls of tools) is one message, so that a model's template writes it as the model wrote it.
What is kept is bounded by bytes, count and age; what was used least recently goes first. An item that several responses of one conversation share is
held, and counted, once. A response that is gone takes no other with it: each has its whole conversation.
"""

from __future__ import annotations

import re
import sys
import threading
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from uuid import uuid4

from pydantic import BaseModel

from paceline.core.clock import Clock
from paceline.core.errors import ContextOverflow, InvalidRequest
from paceline.server.faults import rename_field
from paceline.server.fields import inner_request
from paceline.server.messages import CalledFunction, Function, MediaPart, Message, TextPart, Tool, ToolCall, joined
from paceline.server.requests import ChatCompletionRequest, reasoning_fields
from paceline.server.responses.requests import (
    SAMPLING,
    AllowedChoice,
    AnyItem,
    CallItem,
    InputPart,
    MessageItem,
    NamedChoice,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
    shown_name,
    text_of,
)

RESPONSE_OVERHEAD, PLACE = 1024, 9
"""Bytes of a response without any text, and of an item's place in a list."""
_MADE_HERE = re.compile(r"[a-z]+_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, eq=False)
class KeptItem:
    id: str
    item: AnyItem
    shown: dict[str, object]
    """The item as clients see it."""
    size: int
    """Bytes that it takes, about."""


@dataclass(frozen=True, slots=True)
class Kept:
    id: str
    body: bytes
    """Its JSON."""
    before: Sequence[KeptItem]
    """The conversation before its own items."""
    input: Sequence[KeptItem]
    output: Sequence[KeptItem]

    @property
    def own_size(self) -> int:
        """Bytes that it takes beside its items, about."""
        return RESPONSE_OVERHEAD + len(self.body) + PLACE * (len(self.before) + len(self.input) + len(self.output))

    @property
    def items(self) -> list[KeptItem]:
        """The conversation with it: what a next response goes on from."""
        return [*self.before, *self.input, *self.output]


@dataclass(frozen=True, slots=True)
class KeptBounds:
    """How much is kept; see `ServerSettings`."""

    count: int
    size: int
    """Bytes."""
    age_s: float


class KeptResponses:
    """The responses of one server. Safe to call from several threads."""

    def __init__(self, bounds: KeptBounds, clock: Clock) -> None:
        self._bounds, self._clock = bounds, clock
        self._lock = threading.Lock()
        self._responses: OrderedDict[str, tuple[Kept, float]] = OrderedDict()
        """With when each was last used, the longest ago first."""
        self._held: Counter[KeptItem] = Counter()
        """How many responses have each item."""
        self._by_id: dict[str, KeptItem] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._size

    def __len__(self) -> int:
        with self._lock:
            return len(self._responses)

    def put(self, kept: Kept) -> None:
        """Keep a response, and drop others where that is too much."""
        with self._lock:
            self._drop(kept.id)
            self._responses[kept.id] = kept, self._clock.monotonic()
            self._size += kept.own_size
            for item in kept.items:
                if item not in self._held:
                    if _MADE_HERE.fullmatch(item.id):  # what clients call their own items says nothing to others
                        self._by_id.setdefault(item.id, item)
                    self._size += item.size
                self._held[item] += 1
            self._drop_old()

    def find(self, response_id: str) -> Kept | None:
        """Return a response by its id, and count it as used."""
        with self._lock:
            self._drop_old()
            found = self._responses.get(response_id)
            if found is None:
                return None
            self._responses[response_id] = found[0], self._clock.monotonic()
            self._responses.move_to_end(response_id)
            return found[0]

    def item(self, item_id: str) -> KeptItem | None:
        """Return an item of a kept response."""
        with self._lock:
            self._drop_old()
            return self._by_id.get(item_id)

    def delete(self, response_id: str) -> bool:
        """Forget a response. Returns whether there was one."""
        with self._lock:
            return self._drop(response_id)

    def _drop_old(self) -> None:
        oldest_s = self._clock.monotonic() - self._bounds.age_s
        while self._responses:
            response_id, (_, used_s) = next(iter(self._responses.items()))
            if used_s > oldest_s and len(self._responses) <= self._bounds.count and self._size <= self._bounds.size:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> bool:
        found = self._responses.pop(response_id, None)
        if found is None:
            return False
        kept, _ = found
        self._size -= kept.own_size
        for item in kept.items:
            self._held[item] -= 1
            if not self._held[item]:
                del self._held[item]
                self._size -= item.size
                if self._by_id.get(item.id) is item:
                    del self._by_id[item.id]
        return True


ITEM_OVERHEAD = 600
"""Bytes that an item takes in the tables of those kept."""
PREFIXES: Mapping[str, str] = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


SEAL = "paceline:"
"""Begins what `seal_reasoning` wrote."""


def new_id(kind: str) -> str:
    """Make an id for an item of a type, or for a response."""
    return f"{PREFIXES.get(kind, 'resp')}_{uuid4().hex}"


def seal_reasoning(reasoning: str) -> str:
    """Reasoning as clients carry it that keep nothing here and pass on no text of it. A form of the text, and no secret."""
    return SEAL + b64encode(reasoning.encode("utf-8", "replace")).decode()


def open_reasoning(content: str) -> str:
    """Return the reasoning in an `encrypted_content`; empty if another server wrote it."""
    if not content.startswith(SEAL):
        return ""
    try:
        return b64decode(content.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return ""


def keep_item(item: AnyItem) -> KeptItem:
    """Make an item to keep. It gets an id if it brings none."""
    shown = shown_item(item)
    return KeptItem(str(shown["id"]), item, shown, ITEM_OVERHEAD + _held_bytes((item, shown), set()))


def _held_bytes(value: object, counted: set[int]) -> int:
    """Bytes that a value takes with all that it is made of, but for parts that are counted already."""
    if id(value) in counted:
        return 0
    counted.add(id(value))
    match value:
        case BaseModel():
            inner: Iterable[object] = (value.__dict__, value.model_fields_set, value.model_extra)
        case dict():
            inner = cast("dict[object, object]", value).values()
        case list() | tuple():
            inner = cast("Sequence[object]", value)
        case _:
            inner = ()
    return sys.getsizeof(value) + sum(_held_bytes(part, counted) for part in inner)


def shown_item(item: AnyItem) -> dict[str, object]:
    """Return an item as lists show it."""
    shown: dict[str, object] = {"id": item.id or new_id(item.type), "type": item.type}
    match item:
        case MessageItem(role=role, content=content):
            kind = "output_text" if role == "assistant" else "input_text"
            extra: dict[str, object] = {"annotations": [], "logprobs": []} if role == "assistant" else {}
            shown |= {"role": role, "status": "completed", "content": [{"type": kind, "text": text_of(content), **extra}]}
        case CallItem(call_id=call_id, name=name, namespace=namespace, arguments=arguments):
            shown |= {"call_id": call_id, "name": name, "arguments": arguments, "status": "completed"}
            if namespace is not None:
                shown["namespace"] = namespace
        case OutputItem(call_id=call_id, output=output):
            shown |= {"call_id": call_id, "output": text_of(output), "status": "completed"}
        case ReasoningItem(summary=summary, content=content):
            shown["summary"] = [{"type": "summary_text", "text": part.text} for part in summary or ()]
            shown["content"] = [{"type": "reasoning_text", "text": part.text} for part in content or ()]
    return shown


@dataclass(slots=True)
class _Turn:
    """One message, as far as its items were gone over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    origin: str
    content: list[TextPart | MediaPart] | None = None
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    call_id: str | None = None

    def takes(self, item: AnyItem) -> bool:
        """Return whether an item of the assistant's belongs to the same turn."""
        match item:
            case ReasoningItem():
                return self.content is None and not self.calls
            case MessageItem():
                return self.content is None or bool(self.calls)
            case _:
                return True

    def _content(self) -> str | list[TextPart | MediaPart] | None:
        if self.content is None or any(isinstance(part, MediaPart) for part in self.content):
            return self.content
        return joined([part.text for part in self.content])

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=self._content(),
            reasoning_content=self.reasoning or None,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
        )


@dataclass(frozen=True, slots=True)
class WrittenConversation:
    """Messages, and the field that each came from."""

    messages: Sequence[Message]
    origins: Sequence[str]


def write_messages(
    instructions: str | None, before: Sequence[AnyItem], items: Sequence[AnyItem], *, is_list: bool = True
) -> WrittenConversation:
    """Write a conversation's messages.

    Args:
        instructions: a system message in front.
        before: items of responses before this one.
        items: the request's own.
        is_list: they came as a list of items, not as a text.
    """
    turns: list[_Turn] = []
    if instructions:
        turns.append(_Turn("system", "instructions", _parts_of(instructions)))
    for place, item in enumerate((*before, *items)):
        own = place - len(before)
        origin = "previous_response_id" if own < 0 else f"input[{own}]" if is_list else "input"
        match item:
            case OutputItem(call_id=call_id, output=output):
                turns.append(_Turn("tool", origin, _parts_of(output), call_id=call_id))
                continue
            case MessageItem(role="system" | "developer" | "user" as role, content=content):
                turns.append(_Turn(role, origin, _parts_of(content)))
                continue
            case _:
                pass
        if not turns or turns[-1].role != "assistant" or not turns[-1].takes(item):
            turns.append(_Turn("assistant", origin))
        turn = turns[-1]
        match item:
            case MessageItem(content=content):
                turn.content = [*(turn.content or ()), *_parts_of(content)]
            case ReasoningItem(summary=summary, content=content):
                text = text_of(content or summary or []) or open_reasoning(item.encrypted_content or "")
                turn.reasoning = joined([turn.reasoning, text])
            case CallItem(call_id=call_id, name=name, namespace=namespace, arguments=arguments):
                turn.calls.append(ToolCall(id=call_id, function=CalledFunction(name=shown_name(namespace, name), arguments=arguments)))
    # Reasoning with hidden text and nothing after it says nothing.
    turns = [turn for turn in turns if turn.role != "assistant" or turn.content is not None or turn.calls or turn.reasoning]
    return WrittenConversation([turn.message() for turn in turns], [turn.origin for turn in turns])


def _parts_of(content: str | list[InputPart | MediaPart]) -> list[TextPart | MediaPart]:
    given = [InputPart(type="text", text=content)] if isinstance(content, str) else content
    return [part if isinstance(part, MediaPart) else TextPart(type="text", text=part.text) for part in given]


def chat_request_of(asked: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """Return the inner chat of a request."""
    given: dict[str, Any] = {
        **{name: getattr(asked, name) for name in SAMPLING & asked.model_fields_set},
        "messages": list(messages),
        "max_completion_tokens": asked.max_output_tokens,
        "parallel_tool_calls": asked.parallel_tool_calls,
        **reasoning_fields(None if asked.reasoning is None else asked.reasoning.effort, asked.chat_template_kwargs),
    }
    if asked.wants_logprobs:
        given |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.text is not None and asked.text.format is not None:
        form = asked.text.format.model_dump(by_alias=True, exclude_none=True)
        kind = form.pop("type")
        given["response_format"] = {"type": kind, "json_schema": form} if kind == "json_schema" else {"type": kind, **form}
    if asked.tools:
        given["tools"] = [
            Tool(
                type="function",
                function=Function(
                    name=shown_name(namespace, tool.name), description=tool.description, parameters=tool.parameters, strict=tool.strict
                ),
            )
            for namespace, tool in asked.functions
        ]
    match asked.tool_choice:
        case NamedChoice(name=name):
            given["tool_choice"] = _named(name)
        case AllowedChoice(mode=mode, tools=tools):
            given["tool_choice"] = {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_named(tool.name) for tool in tools]},
            }
        case choice:
            given["tool_choice"] = choice
    return inner_request(ChatCompletionRequest, given)


def _named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


_OF_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")


def translate_error(error: InvalidRequest | ContextOverflow, origins: Sequence[str]) -> InvalidRequest | ContextOverflow:
    """Return an error about one of the chat's messages as an error about what that message was made of. `Fault.body` renames other fields."""
    inner = error.field
    if inner is None:
        return error
    outer = inner
    if found := _OF_MESSAGE.fullmatch(inner):
        rest = found[2].replace(".tool_call_id", ".call_id")
        outer = origins[int(found[1])] + (rest if origins[int(found[1])].startswith("input[") else "")
    return type(error)(rename_field(error.message, inner, outer), error.hint.replace("max_tokens", "max_output_tokens"), field=outer)
