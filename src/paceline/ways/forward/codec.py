"""A generation as generate.proto says it, and back. `core.generation` has what the fields mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.core.errors import InvalidRequest
from paceline.core.generation import (
    MAX_GRAMMAR_LETTERS,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Notice,
    SamplingParams,
    TokenLogprob,
    check_sampling,
)
from paceline.core.ids import RequestId
from paceline.core.shown import printable
from paceline.engine.grammar import VERSION
from paceline.net.wire import generate_pb2 as wire

_TO_WIRE = {
    None: wire.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: wire.FINISH_REASON_STOP,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
    FinishReason.ABORT: wire.FINISH_REASON_ABORT,
    FinishReason.ERROR: wire.FINISH_REASON_ERROR,
}
_FROM_WIRE = {number: reason for reason, number in _TO_WIRE.items()}
MAX_N = 128
MAX_STOPS = 64
MAX_STOP_LETTERS = 64 << 10
MAX_DRAFT_LETTERS = 512
MAX_SALT_LETTERS = 512
"""None lower than the API's own."""
MAX_NOTICES = 16
MAX_DETAILS = 16
MAX_DETAIL_LETTERS = 1000
_NAME = re.compile("[a-z_]{1,64}")


def write_request(model: str, digest: str, weights: str, numerics_id: str, request: GenerationRequest) -> wire.GenerateRequest:
    """A request for the node that has exactly this model loaded."""
    sampling = request.sampling
    return wire.GenerateRequest(
        model_id=model,
        digest=digest,
        quantization=weights,
        numerics_id=numerics_asked(numerics_id, None if request.grammar is None else VERSION),
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        max_tokens=request.max_tokens or 0,
        sampling=wire.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=sampling.logit_bias,
            logprobs=sampling.logprobs,
        ),
        n=request.n,
        stop=request.stop,
        stop_ids=sorted(request.stop_ids),
        ignore_eos=request.ignore_eos,
        draft=request.draft or "",
        so_far=[wire.SequenceSoFar(index=index, token_ids=tokens) for index, tokens in request.so_far.items()],
        cache_salt=request.cache_salt,
        scores_prompt=request.scores_prompt,
        scores_only=request.scores_prompt and request.max_tokens == 0,
        grammar=None if request.grammar is None else wire.Grammar(kind=request.grammar.kind, text=request.grammar.text, version=VERSION),
    )


def numerics_asked(numerics_id: str, grammars: str | None) -> str:
    """What decides bytes beside the model and the request, as a request names it: for one of a given form, who follows grammars too. A node that knows
    no grammars, and would leave out what it does not know, finds another id than its own there, and refuses.
    """
    return numerics_id if grammars is None else f"{numerics_id}, {grammars}"


def read_request(message: wire.GenerateRequest, request_id: RequestId, caller: str = "") -> GenerationRequest:
    """The request in a message, under an id of this process's own.

    Args:
        caller: the node that sent it.

    Raises:
        InvalidRequest: a count that no request has, or a sampling parameter out of its range. What the model decides (its context, its vocabulary) is checked at admission.
    """
    sampling = message.sampling
    for field, value, least, most in (
        ("n", message.n, 1, MAX_N),
        ("max_tokens", message.max_tokens, 0, 1 << 31),
        ("prompt", len(message.prompt_ids), 1, 1 << 31),
        ("stop", len(message.stop), 0, MAX_STOPS),
        ("stop", max(map(len, message.stop), default=0), 0, MAX_STOP_LETTERS),
        ("stop_token_ids", len(message.stop_ids), 0, MAX_STOPS),
        ("draft", len(message.draft), 0, MAX_DRAFT_LETTERS),
        ("so_far", len(message.so_far), 0, MAX_N),
        ("cache_salt", len(message.cache_salt), 0, MAX_SALT_LETTERS),
        ("grammar", len(message.grammar.text), 0, MAX_GRAMMAR_LETTERS),
    ):
        if not least <= value <= most:
            raise InvalidRequest(f"{field} is {value}, and {least} to {most} are taken", field=field)
    if not all(message.stop):
        raise InvalidRequest("A stop text is empty", field="stop")
    so_far = {one.index: tuple(one.token_ids) for one in message.so_far}
    if len(so_far) != len(message.so_far):
        raise InvalidRequest("A sequence goes on twice", field="so_far")
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed if sampling.HasField("seed") else None,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    check_sampling(params)
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(message.prompt_ids),
        max_tokens=0 if message.scores_prompt and message.scores_only else message.max_tokens or None,
        sampling=params,
        n=message.n,
        stop=tuple(message.stop),
        stop_ids=frozenset(message.stop_ids),
        ignore_eos=message.ignore_eos,
        draft=message.draft or None,
        so_far=so_far,
        caller=caller,
        cache_salt=message.cache_salt,
        scores_prompt=message.scores_prompt,
        grammar=_read_grammar(message),
    )


def _read_grammar(message: wire.GenerateRequest) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    kind = message.grammar.kind
    if kind not in set(GrammarKind):
        raise InvalidRequest(f"grammar: {printable(kind, 100)!r} is no kind of grammar", field="grammar")
    return Grammar(GrammarKind(kind), message.grammar.text)


def write_chunks(chunks: Sequence[GenerationChunk]) -> wire.GenerateResponse:
    """What the sequences of one request gained."""
    return wire.GenerateResponse(
        chunks=[
            wire.GenerationChunk(
                index=chunk.index,
                token_ids=chunk.token_ids,
                text=chunk.text,
                logprobs=_write_logprobs(chunk.logprobs),
                prompt_logprobs=_write_logprobs(chunk.prompt_logprobs),
                finish_reason=_TO_WIRE[chunk.finish_reason],
                error=chunk.error or "",
                cached_tokens=chunk.cached_tokens,
                code=chunk.code or "",
                notices=[_write_notice(notice) for notice in chunk.notices],
            )
            for chunk in chunks
        ]
    )


def read_chunks(message: wire.GenerateResponse, request_id: RequestId) -> list[GenerationChunk]:
    """The chunks in a message, under the id the caller knows the request by."""
    return [
        GenerationChunk(
            request_id=request_id,
            index=chunk.index,
            token_ids=tuple(chunk.token_ids),
            text=chunk.text,
            logprobs=_read_logprobs(chunk.logprobs),
            prompt_logprobs=_read_logprobs(chunk.prompt_logprobs),
            finish_reason=_FROM_WIRE.get(chunk.finish_reason, FinishReason.ERROR),
            error=(chunk.error or None) if chunk.finish_reason in _FROM_WIRE else "The node ended the sequence in a way unknown here",
            cached_tokens=chunk.cached_tokens,
            code=chunk.code if _NAME.fullmatch(chunk.code) else None,
            notices=_read_notices(chunk),
        )
        for chunk in message.chunks
    ]


def _write_logprobs(logprobs: Sequence[TokenLogprob]) -> list[wire.TokenLogprob]:
    return [
        wire.TokenLogprob(
            token_id=one.token_id,
            logprob=one.logprob,
            top_ids=[token for token, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
        )
        for one in logprobs
    ]


def _read_logprobs(messages: Iterable[wire.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(one.token_id, one.logprob, tuple(zip(one.top_ids, one.top_logprobs, strict=False))) for one in messages)


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
