"""Requests and chunks survive the wire whole; counts that no request has are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidRequest
from paceline.core.generation import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Notice,
    SamplingParams,
    TokenLogprob,
)
from paceline.core.ids import RequestId
from paceline.core.model import ModelRef
from paceline.net.wire import generate_pb2 as wire
from paceline.ways.forward.codec import MAX_N, read_chunks, read_request, write_chunks, write_request

ID = RequestId("r")
tokens = st.integers(0, (1 << 32) - 1)
reals = st.floats(allow_nan=False)
shares = st.floats(0, 1)
penalties = st.floats(-2, 2)
names = st.text("abcz_", min_size=1, max_size=9)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, (1 << 31) - 1),
    top_p=shares,
    min_p=shares,
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    GenerationRequest,
    st.just(ID),
    st.lists(tokens, min_size=1, max_size=20).map(tuple),
    st.none() | st.integers(1, 1 << 31),
    samplings,
    st.integers(1, MAX_N),
    st.lists(texts.filter(bool), max_size=4).map(tuple),
    st.frozensets(tokens, max_size=4),
    st.booleans(),
    st.none() | texts.filter(bool),
    st.dictionaries(st.integers(0, MAX_N - 1), st.lists(tokens, max_size=4).map(tuple), max_size=4),
    scores_prompt=st.booleans(),
    ways=st.none() | st.frozensets(st.sampled_from(["alone", "draft", "pipeline"]), min_size=1),
    exact=st.booleans(),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), texts.filter(bool)),
)
chunks = st.builds(
    GenerationChunk,
    st.just(ID),
    tokens,
    st.lists(tokens, max_size=4).map(tuple),
    texts,
    st.lists(st.builds(TokenLogprob, tokens, reals, st.lists(st.tuples(tokens, reals), max_size=3).map(tuple)), max_size=3).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none() | texts.filter(bool),
    st.none() | names,
    tokens,
)
notices = st.builds(
    Notice, names, st.dictionaries(names, st.text("abc :-", max_size=9) | st.integers(-(1 << 63), (1 << 63) - 1) | reals, max_size=4)
)
news = st.builds(
    GenerationChunk, st.just(ID), tokens, st.just(()), st.just(""), notices=st.lists(notices, min_size=1, max_size=3).map(tuple)
)


@given(requests)
def test_a_request_survives_the_wire(request: GenerationRequest) -> None:
    message = wire.GenerateRequest.FromString(write_request(ModelRef("d", "int4", "m"), "id", request).SerializeToString())
    assert read_request(message, ID) == request
    assert (message.model_id, message.digest, message.quantization) == ("m", "d", "int4")
    assert message.numerics_id.startswith("id" if request.grammar is None else "id, llguidance ")


@given(st.lists(chunks | news, max_size=4))
def test_chunks_survive_the_wire(gained: list[GenerationChunk]) -> None:
    message = wire.GenerateResponse.FromString(write_chunks(gained).SerializeToString())
    assert read_chunks(message, ID) == gained


def test_what_a_peer_says_beside_an_answer_can_break_nobody_s_stream() -> None:
    notice = Notice("shard_failover", {"lost": "b", "no name": 1})
    forged = [
        GenerationChunk(ID, 0, (), "", notices=(Notice("x\ndata: {}", {}), Notice("shard_status", {"reason": "a\n\nb"}), notice)),
        GenerationChunk(ID, 0, (7,), "seven", notices=(notice,)),
        GenerationChunk(ID, 0, (), "", finish_reason=FinishReason.ERROR, code='"}\n'),
    ]
    status, text, end = read_chunks(wire.GenerateResponse.FromString(write_chunks(forged).SerializeToString()), ID)
    assert status.notices == (Notice("shard_status", {"reason": "a??b"}), Notice("shard_failover", {"lost": "b"}))
    assert (text.text, text.notices) == ("seven", ())
    assert end.code is None


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("n", {"n": 0}),
        ("n", {"n": MAX_N + 1}),
        ("max_tokens", {"max_tokens": (1 << 31) + 1}),
        ("prompt", {"prompt_ids": []}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": ["x"] * 65}),
        ("logprobs", {"sampling": wire.Sampling(repetition_penalty=1, logprobs=21)}),
        ("min_p", {"sampling": wire.Sampling(repetition_penalty=1, min_p=1.5)}),
        ("top_p", {"sampling": wire.Sampling(repetition_penalty=1, top_p=math.nan)}),
        ("temperature", {"sampling": wire.Sampling(repetition_penalty=1, temperature=1e300)}),
    ],
)
def test_values_that_no_request_has_are_refused(field: str, change: dict[str, object]) -> None:
    fields: dict[str, object] = {"n": 1, "max_tokens": 1, "prompt_ids": [1], **change}
    with pytest.raises(InvalidRequest) as refused:
        read_request(wire.GenerateRequest(**fields), ID)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_reason_of_a_later_version_is_an_error() -> None:
    message = wire.GenerateResponse()
    message.chunks.add().MergeFromString(bytes([5 << 3, 99]))
    (chunk,) = read_chunks(message, ID)
    assert chunk.finish_reason is FinishReason.ERROR
    assert chunk.error


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": wire.Sampling(repetition_penalty=1, logit_bias=dict.fromkeys(range(1025), 1.0))},
        {"stop_ids": range(65)},
        {"stop": ["x" * (65 << 10)]},
        {"draft": "x" * 513},
        {"ways": ["Alone"]},
        {"ways": ["alone"] * 17},
    ],
)
def test_lists_without_end_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        read_request(wire.GenerateRequest(n=1, max_tokens=1, prompt_ids=[1], **more), ID)  # type: ignore[arg-type]
