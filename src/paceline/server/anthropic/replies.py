"""The answers' shapes, for the OpenAPI document only, as in `server.replies`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredText(BaseModel):
    type: Literal["text"]
    text: str


class AnsweredThinking(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnsweredMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class MessageFault(BaseModel):
    type: str
    message: str


class MessageFaultReply(BaseModel):
    type: Literal["error"]
    error: MessageFault
