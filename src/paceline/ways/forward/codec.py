"""A generation as generate.proto says it, and back. `core.generation` has what the fields mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Final

from paceline.core.errors import InvalidRequest
from paceline.core.generation import (
    MAX_GRAMMAR_LETTERS,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Notice,
    Range,
    SamplingParams,
    TokenLogprob,
    check_sampling,
)
from paceline.core.ids import RequestId
from paceline.core.model import ModelRef
from paceline.core.text import printable
from paceline.core.via import MOST_NODES, is_node_mark
from paceline.engine.grammar import VERSION
from paceline.net.mapper import Codec, Length, Mapped, or_none
from paceline.net.wire import generate_pb2 as wire

_REASONS: Final = {
    FinishReason.STOP: wire.FINISH_REASON_STOP,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
    FinishReason.ABORT: wire.FINISH_REASON_ABORT,
    FinishReason.ERROR: wire.FINISH_REASON_ERROR,
}
_FROM_WIRE: Final = {number: reason for reason, number in _REASONS.items()}
MAX_N = 128
MAX_STOPS = 64
MAX_STOP_LETTERS = 64 << 10
MAX_DRAFT_LETTERS = 512
MAX_SALT_LETTERS = 512
"""None lower than the API's own."""
MAX_WAYS = 16
CHAT_PIECE = 100_000
"""Characters of a chat in one field: no field of a request is longer than half a MiB."""
MAX_NOTICES = 16
MAX_DETAILS = 16
MAX_DETAIL_LETTERS = 1000
_NAME = re.compile("[a-z_]{1,64}")


def _refuse(text: str, field: str) -> InvalidRequest:
    return InvalidRequest(text, field=field)


def _read_so_far(messages: Sequence[wire.SequenceSoFar]) -> dict[int, tuple[int, ...]]:
    so_far = {one.index: tuple(one.token_ids) for one in messages}
    if len(so_far) != len(messages):
        raise InvalidRequest("A sequence goes on twice", field="so_far")
    return so_far


_SAMPLING: Final = Codec(SamplingParams, wire.Sampling, _refuse, {"logit_bias": Mapped(read=dict)})
_GRAMMAR: Final = Codec(
    Grammar,
    wire.Grammar,
    _refuse,
    {"kind": Mapped(write=str, read=GrammarKind), "text": Mapped(bound=Length(0, MAX_GRAMMAR_LETTERS), called="grammar")},
    beside=["version"],
)
_REQUEST: Final = Codec(
    GenerationRequest,
    wire.GenerateRequest,
    _refuse,
    {
        "request_id": "",
        "prompt_ids": Mapped(bound=Length(0, 1 << 31), called="prompt"),
        "chat": Mapped(write=lambda chat: [chat[at : at + CHAT_PIECE] for at in range(0, len(chat), CHAT_PIECE)], read="".join),
        "max_tokens": Range(0, 1 << 31),
        "sampling": Mapped(write=_SAMPLING.write, read=_SAMPLING.read, always=True),
        "n": Range(1, MAX_N),
        "stop": Length(0, MAX_STOPS, lambda text: 0 < len(text) <= MAX_STOP_LETTERS),
        "stop_ids": Mapped(bound=Length(0, MAX_STOPS), write=sorted, read=frozenset, called="stop_token_ids"),
        "draft": or_none(Length(0, MAX_DRAFT_LETTERS)),
        "ways": Mapped(
            bound=Length(0, MAX_WAYS, lambda way: _NAME.fullmatch(way) is not None), write=sorted, read=lambda ways: frozenset(ways) or None
        ),
        "so_far": Mapped(
            bound=Length(0, MAX_N),
            write=lambda so_far: [wire.SequenceSoFar(index=index, token_ids=tokens) for index, tokens in so_far.items()],
            read=_read_so_far,
        ),
        "cache_salt": Length(0, MAX_SALT_LETTERS),
        "via": Length(0, MOST_NODES, is_node_mark),
        "grammar": Mapped(codec=_GRAMMAR, write=lambda grammar: _GRAMMAR.write(grammar, version=VERSION)),
    },
    given=["request_id", "caller", "client", "shares_kv", "max_tokens", "leg"],
    beside=["model_id", "digest", "quantization", "numerics_id", "scores_only"],
)


def write_request(model: ModelRef, numerics_id: str, request: GenerationRequest) -> wire.GenerateRequest:
    """A request for the node that has exactly this model loaded."""
    return _REQUEST.write(
        request,
        model_id=model.name,
        digest=model.digest,
        quantization=model.weights,
        numerics_id=numerics_asked(numerics_id, None if request.grammar is None else VERSION),
        scores_only=request.scores_prompt and request.max_tokens == 0,
    )


def numerics_asked(numerics_id: str, grammars: str | None) -> str:
    """What decides bytes beside the model and the request, as a request names it: for one of a given form, who follows grammars too. A node that knows
    no grammars, and would leave out what it does not know, finds another id than its own there, and refuses.
    """
    return numerics_id if grammars is None else f"{numerics_id}, {grammars}"


def read_request(message: wire.GenerateRequest, request_id: RequestId, caller: str = "") -> GenerationRequest:
    """The request in a message, under an id of this process's own.

    Raises:
        InvalidRequest: a count that no request has, or a sampling parameter out of its range. What the model decides (its context, its vocabulary) is checked at admission.
    """
    most = 0 if message.scores_prompt and message.scores_only else message.max_tokens or None
    request = _REQUEST.read_checked(message, "A request", request_id=request_id, caller=caller, max_tokens=most)
    if bool(request.prompt_ids) == bool(request.chat):
        raise InvalidRequest("prompt: a request has either a prompt or a chat", field="prompt")
    check_sampling(request.sampling)
    return request


_LOGPROB: Final = Codec(
    TokenLogprob,
    wire.TokenLogprob,
    _refuse,
    {
        "top": Mapped(
            ("top_ids", "top_logprobs"),
            None,
            lambda top: ([token for token, _ in top], [logprob for _, logprob in top]),
            lambda ids, logprobs: tuple(zip(ids, logprobs, strict=False)),
        )
    },
)
_PLAIN: Final = frozenset({"index", "token_ids", "text"})
"""Fields of a chunk that has tokens and nothing else. Nearly all chunks are such, and the whole table takes more than twice as long for them."""
_CHUNK: Final = Codec(
    GenerationChunk,
    wire.GenerationChunk,
    _refuse,
    {
        "logprobs": _LOGPROB,
        "finish_reason": Mapped(
            write=_REASONS.__getitem__, read=lambda number: _FROM_WIRE.get(number, FinishReason.ERROR) if number else None
        ),
        "error": "",
        "code": Mapped(read=lambda code: code if _NAME.fullmatch(code) else None),
        "prompt_logprobs": _LOGPROB,
        "notices": Mapped(write=lambda notices: [_write_notice(notice) for notice in notices]),
    },
    given=["request_id", "notices", "error", "transfer"],
)


_rest_of: Final = attrgetter(*(each.name for each in fields(GenerationChunk) if each.name not in {"request_id", *_PLAIN}))


def write_chunks(chunks: Sequence[GenerationChunk]) -> wire.GenerateResponse:
    return wire.GenerateResponse(chunks=[_CHUNK.write(chunk) if any(_rest_of(chunk)) else _write_plain(chunk) for chunk in chunks])


def _write_plain(chunk: GenerationChunk) -> wire.GenerationChunk:
    return wire.GenerationChunk(index=chunk.index, token_ids=chunk.token_ids, text=chunk.text)


def read_chunks(message: wire.GenerateResponse, request_id: RequestId) -> list[GenerationChunk]:
    """The chunks in a message, under the id the caller knows the request by."""
    return [_read_chunk(chunk, request_id) for chunk in message.chunks]


def _read_chunk(chunk: wire.GenerationChunk, request_id: RequestId) -> GenerationChunk:
    if _PLAIN.issuperset([field.name for field, _ in chunk.ListFields()]):
        return GenerationChunk(request_id, chunk.index, tuple(chunk.token_ids), chunk.text)
    return _CHUNK.read(chunk, request_id=request_id, notices=_read_notices(chunk), error=_read_error(chunk))


def _read_error(chunk: wire.GenerationChunk) -> str | None:
    known = not chunk.finish_reason or chunk.finish_reason in _FROM_WIRE
    return (chunk.error or None) if known else "The node ended the sequence in a way unknown here"


def _write_notice(notice: Notice) -> wire.Notice:
    details: list[wire.NoticeDetail] = []
    for key, value in notice.detail.items():
        match value:
            case str():
                details.append(wire.NoticeDetail(key=key, text=value))
            case int():
                details.append(wire.NoticeDetail(key=key, whole=value))
            case float():
                details.append(wire.NoticeDetail(key=key, real=value))
    return wire.Notice(kind=notice.kind, detail=details)


def _read_notices(chunk: wire.GenerationChunk) -> tuple[Notice, ...]:
    """Names go into a client's stream as they are: what is no name is left out, and so is what stands beside tokens."""
    if not chunk.notices or chunk.token_ids or chunk.text or chunk.finish_reason != wire.FINISH_REASON_UNSPECIFIED:
        return ()
    return tuple(
        Notice(notice.kind, {one.key: _value(one) for one in notice.detail[:MAX_DETAILS] if _NAME.fullmatch(one.key)})
        for notice in chunk.notices[:MAX_NOTICES]
        if _NAME.fullmatch(notice.kind)
    )


def _value(detail: wire.NoticeDetail) -> str | int | float:
    match detail.WhichOneof("value"):
        case "whole":
            return detail.whole
        case "real":
            return detail.real
        case _:
            return printable(detail.text, MAX_DETAIL_LETTERS)
