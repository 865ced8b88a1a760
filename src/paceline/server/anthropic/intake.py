"""Bodies of `/v1/messages` in, calls and counts out; as `server.intake`, synchronous and in threads."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from paceline.core.errors import ContextOverflow
from paceline.server.anthropic.chat import chat_of
from paceline.server.anthropic.requests import CountTokensRequest, MessagesRequest
from paceline.server.anthropic.shape import MessageShape
from paceline.server.call import Call
from paceline.server.fields import ignored_fields
from paceline.server.intake import ChatPrompt, Intake
from paceline.server.requests import ChatCompletionRequest

TOO_LONG = "prompt is too long: "
"""How Anthropic's error begins. Claude Code compacts a conversation by it, and reads the two numbers behind it."""


def answered(intake: Intake, body: bytes) -> Call:
    """A message to be answered. Where `max_tokens` is more than the context leaves, the answer may take what it leaves.

    Raises:
        Refusal: the body is malformed.
        InvalidRequest, ContextOverflow, UnknownModel: it can't be served as asked.
    """
    asked = intake.parse(MessagesRequest, body)
    chat = chat_of(asked)
    prompt = _prompt(intake, chat)
    size, most = len(prompt.ids), prompt.model.max_context
    if size >= most:
        raise ContextOverflow(f"{TOO_LONG}{size} tokens > {most - 1} maximum", "Send less, or compact the conversation.", field="messages")
    call = intake.call_of(chat, prompt)
    room = None if asked.max_tokens > most - size else asked.max_tokens
    requests = tuple(replace(request, max_tokens=room) for request in call.requests)
    return replace(call, id=f"msg_{uuid4().hex}", requests=requests, ignored=ignored_fields(asked), shape=MessageShape)


def counted(intake: Intake, body: bytes) -> tuple[int, tuple[str, ...]]:
    """The tokens of a prompt, and the fields that were ignored; raises as `answered` does."""
    asked = intake.parse(CountTokensRequest, body)
    return len(_prompt(intake, chat_of(asked)).ids), ignored_fields(asked)


def _prompt(intake: Intake, chat: ChatCompletionRequest) -> ChatPrompt:
    try:
        return intake.prompt_of(chat)
    except ContextOverflow as error:
        raise ContextOverflow(TOO_LONG + error.message, error.hint, field=error.field) from error
