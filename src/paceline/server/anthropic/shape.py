"""Answers of `/v1/messages` as bytes: blocks of thinking, text and calls, in the order in which the model wrote them.

Law: what the official client accumulates from a stream is the whole answer of the same parts, but for ids: both are made of the same blocks.

The answers' shapes, for the OpenAPI document only, as in `server.replies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import orjson

from paceline.core.generation import AnswerProgress, FinishReason, GenerationChunk, TokenLogprob
from paceline.engine.sequence import TextStream
from paceline.server.call import Call
from paceline.server.faults import Api, Fault
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.lazy_model import LazyModel
from paceline.server.messages import json_bytes, json_object
from paceline.server.shape import CalledTool, Collected, Reader, Shape, Streamed, Usage, new_call_id

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageUsage(LazyModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredText(LazyModel):
    type: Literal["text"]
    text: str


class AnsweredThinking(LazyModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(LazyModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnsweredMessage(LazyModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(LazyModel):
    input_tokens: int


class MessageFault(LazyModel):
    type: str
    message: str


class MessageFaultReply(LazyModel):
    type: Literal["error"]
    error: MessageFault


SIGNATURE = "unsigned"
"""Signature of thinking blocks. Clients that find no signature drop the thinking from the messages they send back."""
_PIECES = {Content: b'{"type":"text_delta","text":', Reasoning: b'{"type":"thinking_delta","thinking":'}


class StopReader:
    """A reader that finds out, too, which stop sequence ended the answer."""

    def __init__(self, reader: Reader, text: TextStream) -> None:
        self._reader, self._text = reader, text

    @property
    def found(self) -> str | None:
        """The stop sequence; None: none ended it."""
        return self._text.stopped_by

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    def read(self, chunk: GenerationChunk) -> list[Part]:
        for token in chunk.token_ids:
            self._text.push(token)
        if chunk.finish_reason is not None:
            self._text.flush()
        return self._reader.read(chunk)


class MessageShape(Shape):
    """One answer: this API has no `n`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._request = call.requests[0]
        self._blocks: list[dict[str, Any]] = []
        """Blocks begun so far. The last one lacks the text in `_pieces` while it is open."""
        self._pieces: list[str] = []
        self._open: type[Part] | None = None
        """Kind of part in the block that was begun last."""
        self._called: CalledTool | None = None
        """Call with arguments that are still being read."""
        self._finish: FinishReason | None = None
        self._stop: StopReader | None = None

    def silence(self, reading: AnswerProgress | None) -> bytes:
        return (b"" if reading is None else reading.comment()) + PING

    def watching(self, readers: Sequence[Reader]) -> Sequence[Reader]:
        """Return a reader that looks for stop sequences, if the request has any."""
        if not self._request.stop:
            return readers
        [reader] = readers
        self._stop = StopReader(reader, TextStream(self._call.model.tokenizer, self._request.stop))
        return [self._stop]

    def first_events(self) -> bytes:
        """`message_start`. How much of the prompt was cached is not known yet: the last event says it."""
        usage = Usage(len(self._request.prompt_ids), 0, 0)
        return _event("message_start", {"message": self._message([], usage, ended=False)})

    def event(self, index: int, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """Return a delta for each part, and events for the blocks that they begin and end."""
        del index, logprobs
        out = b""
        for part in parts:
            match part:
                case Content(text) | Reasoning(text):
                    out += self._call_ended() + self._told(type(part), text)
                case CallBegun(_, name, is_open):
                    out += self._call_ended()
                    self._called = CalledTool(name, is_open=is_open)
                case CallArguments():
                    out += self._argued(part)
        if finish is not None:
            self._finish = finish
            out += self._call_ended() + self._end()
        return out

    def _told(self, kind: type[Content | Reasoning], text: str) -> bytes:
        """Return a text, or a thought, as a delta of the open block, or of a new one."""
        out = b""
        if self._open is not kind:
            out = self._begin(kind, {"type": "text", "text": ""} if kind is Content else _thinking(""))
        return out + self._delta(_PIECES[kind], text)

    def _argued(self, piece: CallArguments) -> bytes:
        """Add a piece of arguments. Returns the call's block once they are whole: an earlier block could not be taken back if the call is cut off."""
        if self._called is None:
            return b""
        self._called.add(piece)
        return b"" if piece.is_open else self._call_ended()

    def _call_ended(self) -> bytes:
        """Return the call that was begun as a block; as text if it was cut off, or its arguments are not an object."""
        called, self._called = self._called, None
        if called is None:
            return b""
        arguments = "".join(called.arguments) or "{}"
        if called.is_open or json_object(arguments) is None:
            return self._told(Content, called.as_text)
        begun = self._begin(CallBegun, _tool_use(called.name, {}))
        return begun + self._delta(b'{"type":"input_json_delta","partial_json":', arguments) + self._end()

    def _delta(self, head: bytes, text: str) -> bytes:
        self._pieces.append(text)
        event = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":' % (len(self._blocks) - 1)
        return event + head + orjson.dumps(text) + b"}}\n\n"

    def ending(self, usage: Usage) -> bytes:
        delta = {"stop_reason": self._reason(), "stop_sequence": self._stop and self._stop.found}
        return _event("message_delta", {"delta": delta, "usage": _usage(usage)}) + _event("message_stop", {})

    def collected(self) -> Collected:
        return Streamed(self)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        del choices  # `collected` made the one there is
        return json_bytes(self._message(self._blocks, usage, ended=True))

    def fault_event(self, fault: Fault) -> bytes:
        return b"event: error\ndata: " + fault.body(Api.ANTHROPIC) + b"\n\n"

    def _begin(self, kind: type[Part], block: dict[str, Any]) -> bytes:
        out = self._end() + _event("content_block_start", {"index": len(self._blocks), "content_block": block})
        self._open = kind
        self._blocks.append(block)
        return out

    def _end(self) -> bytes:
        """Close the block that is open, if one is."""
        if self._open is None:
            return b""
        index, block, text, out = {"index": len(self._blocks) - 1}, self._blocks[-1], "".join(self._pieces), b""
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block |= {"thinking": text, "signature": SIGNATURE}
                out = _event("content_block_delta", index | {"delta": {"type": "signature_delta", "signature": SIGNATURE}})
            case _:
                block["input"] = json_object(text)
        self._open, self._pieces = None, []
        return out + _event("content_block_stop", index)

    def _message(self, content: list[dict[str, Any]], usage: Usage, *, ended: bool) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model.name,
            "content": content,
            "stop_reason": self._reason() if ended else None,
            "stop_sequence": self._stop.found if ended and self._stop else None,
            "usage": _usage(usage),
        }

    def _reason(self) -> str:
        if self._finish is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._request.max_tokens is None else "max_tokens"
        if self._stop and self._stop.found is not None:
            return "stop_sequence"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{new_call_id()}", "name": name, "input": arguments}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes({"type": name, **body}) + b"\n\n"
