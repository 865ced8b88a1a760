"""Fits a chat to a model's template: as it was sent, and where the template refuses that, in the mildest other form that it takes.

Law: only a refusal changes a chat, and every change is named. Nothing here knows a model, a family or a template's words. The assistant's turns, the
results and the user's text all stay, in their order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from paceline.core.errors import TemplateRefused
from paceline.core.text import Given
from paceline.server.formats.format import THOUGHTS
from paceline.server.messages import Arguments, Message, messages_for_template, messages_without_tools

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Given], list[int]]
SHORT_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")
"""Ids of calls that every template takes."""
MEDIA_WORD: Final = "media"
"""Says, in the answer's header, that notes stand for parts that are not text."""
_ARGUMENTS_WORD: Final = "arguments"
SILENCE: Final = "..."


class Change(Enum):
    """A way to write a chat otherwise. The value names it in the answer's header, but for that of arguments."""

    OBJECTS = "objects"
    TEXT = "text"
    IDS = "ids"
    THOUGHTS = "thoughts"
    CALLS = "calls"
    TURNS = "turns"
    GAPS = "gaps"
    SYSTEM = "system"
    EMPTY = "empty"
    TOOLS = "tools"


_MILD: Final = (
    *((change,) for change in (Change.OBJECTS, Change.TEXT, Change.IDS, Change.THOUGHTS, Change.CALLS, Change.TURNS)),
    (Change.TURNS, Change.GAPS),
    (Change.TURNS, Change.SYSTEM),
    (Change.TURNS, Change.GAPS, Change.SYSTEM),
    (Change.EMPTY,),
    (Change.TURNS, Change.GAPS, Change.EMPTY),
)
"""Sets of changes to try first: most templates refuse one thing only."""
_ALL: Final = (Change.IDS, Change.THOUGHTS, Change.CALLS, Change.TURNS, Change.GAPS, Change.SYSTEM, Change.EMPTY)


def _attempts() -> Iterator[Collection[Change]]:
    """Yield sets of changes to try, the mildest first. The later sets are for chats that the template refuses for several reasons."""
    yield from _MILD
    for arguments in (Change.OBJECTS, Change.TEXT):
        yield from ((arguments, *_ALL[:count]) for count in range(1, len(_ALL) + 1))
    yield Change.TOOLS, Change.TURNS
    yield Change.TOOLS, Change.TURNS, Change.GAPS, Change.SYSTEM
    yield Change.TOOLS, Change.TURNS, Change.GAPS, Change.SYSTEM, Change.EMPTY


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat, and what its template is given with it."""

    messages: Sequence[Message]
    given: Given
    """With the tools as templates take them."""
    knows_tools: bool
    """The template writes tools. Else they are described in words."""

    def written(self, changes: Collection[Change] = ()) -> tuple[Messages, Given, list[str]]:
        """Return the messages and what is given with them, and names of the changes that made a difference."""
        named: list[str] = []
        if not self.knows_tools or Change.TOOLS in changes:
            messages, given = messages_without_tools(self.messages, self.given.tools), replace(self.given, tools=())
            if self.knows_tools:
                named.append(Change.TOOLS.value)
        else:
            plain = messages_for_template(self.messages)
            arguments = next((way for change, way in _ARGUMENTS.items() if change in changes), Arguments.AS_READ)
            messages, given = messages_for_template(self.messages, arguments), self.given
            if messages != plain:
                named.append(_ARGUMENTS_WORD)
        for change, rewrite in _REWRITES.items():
            if change in changes and (changed := rewrite(messages)) != messages:
                messages = changed
                named.append(change.value)
        return messages, given, named


@dataclass(frozen=True, slots=True)
class FittedChat:
    """A chat as its template took it."""

    ids: list[int]
    changes: Sequence[str] = ()
    """Names of what was changed."""
    in_words: bool = False
    """The template knows tools, and refused them: they are described in words, and calls are read so."""


def fit_chat(chat: Chat, render: Render) -> FittedChat:
    """Render a chat, in the mildest form that its template takes.

    Args:
        render: gives the ids of messages.

    Raises:
        TemplateRefused: it takes none.
        InvalidRequest: as `render`.
    """
    messages, given, _ = chat.written()
    try:
        return FittedChat(render(messages, given))
    except TemplateRefused as error:
        refusal = error
    tried = [messages]
    for changes in _attempts():
        messages, given, named = chat.written(changes)
        if messages in tried:
            continue
        tried.append(messages)
        try:
            ids = render(messages, given)
        except TemplateRefused:
            continue
        return FittedChat(ids, named, in_words=Change.TOOLS.value in named)
    hint = "Send messages that it takes: it also refused them with turns joined, system text in the user's turn, and calls one at a time."
    raise TemplateRefused(refusal.message, hint, field=refusal.field)


def _with_short_ids(messages: Messages) -> Messages:
    """Give every call an id of nine letters, which is always the same."""

    def short(call_id: str) -> str:
        return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]

    written: Messages = []
    for message in messages:
        one = dict(message)
        if calls := message.get("tool_calls"):
            one["tool_calls"] = [{**call, "id": short(call["id"])} for call in calls]
        if call_id := message.get("tool_call_id"):
            one["tool_call_id"] = short(call_id)
        written.append(one)
    return written


def _with_text_in_thoughts(messages: Messages) -> Messages:
    """Let the text beside calls be the end of the thoughts before them."""
    written: Messages = []
    for message in messages:
        thoughts, text = message.get(THOUGHTS[0]), message["content"]
        moves = message.get("tool_calls") and thoughts and text
        written.append({**message, "content": "", **dict.fromkeys(THOUGHTS, f"{thoughts}\n{text}")} if moves else message)
    return written


def _with_single_calls(messages: Messages) -> Messages:
    """Make each call a turn of its own, with its result behind it."""
    written: Messages = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            written.append(message)
            continue
        results: Messages = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        turn = message
        for call in calls:
            written.append({**turn, "tool_calls": [call]})
            written += [result for result in results if result["tool_call_id"] == call["id"]]
            turn = {"role": "assistant", "content": ""}
        own = {call["id"] for call in calls}
        written += [result for result in results if result["tool_call_id"] not in own]
    return written


def _with_joined_turns(messages: Messages) -> Messages:
    """Join turns of one role. System text behind the beginning is the user's."""
    written: Messages = []
    for message in messages:
        begins = all(one["role"] == "system" for one in written)
        one = {**message, "role": "user"} if message["role"] == "system" and not begins else message
        before = written[-1] if written else None
        if before is None or before["role"] != one["role"] or one["role"] == "tool" or before.get("tool_calls"):
            written.append(one)
            continue
        texts = {name: _join(before.get(name), one.get(name)) for name in ("content", *THOUGHTS) if name in before or name in one}
        written[-1] = {**before, **one, **texts}
    return written


def _join(*texts: str | None) -> str:
    return "\n\n".join([text for text in texts if text])


def _with_filled_gaps(messages: Messages) -> Messages:
    """Put an empty turn where one is missing: of the user's before the assistant's first, of the assistant's between a call or its result and the user."""
    written: Messages = []
    for message in messages:
        before = written[-1] if written else None
        if message["role"] == "assistant" and (before is None or before["role"] == "system"):
            written.append({"role": "user", "content": ""})
        elif message["role"] == "user" and before is not None and (before["role"] == "tool" or before.get("tool_calls")):
            written.append({"role": "assistant", "content": ""})
        written.append(message)
    return written


def _without_system(messages: Messages) -> Messages:
    """Make all system text the user's."""
    return _with_joined_turns([{**message, "role": "user"} if message["role"] == "system" else message for message in messages])


def _with_something_said(messages: Messages) -> Messages:
    """Let the assistant say `SILENCE` in turns that have neither text nor calls."""
    return [
        {**message, "content": SILENCE}
        if message["role"] == "assistant" and not (message["content"] or message.get("tool_calls"))
        else message
        for message in messages
    ]


_ARGUMENTS: Final = {Change.OBJECTS: Arguments.OBJECTS, Change.TEXT: Arguments.TEXT}
_REWRITES: Final[dict[Change, Callable[[Messages], Messages]]] = {
    Change.IDS: _with_short_ids,
    Change.THOUGHTS: _with_text_in_thoughts,
    Change.CALLS: _with_single_calls,
    Change.SYSTEM: _without_system,
    Change.TURNS: _with_joined_turns,
    Change.GAPS: _with_filled_gaps,
    Change.EMPTY: _with_something_said,
}
"""In the order in which they are applied: a template that knows no system role wants the gap before the first turn filled behind it."""
