from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.scripted_inference import ScriptedInference

from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, TokenLogprob
from paceline.core.ids import RequestId
from paceline.server.answer import merge_chunks
from paceline.server.call import Call
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.shape import DONE, Collected, Shape, Usage
from paceline.server.shapes import ChatShape, CompletionShape, OpenAIShape

SHAPES = (ChatShape, CompletionShape)
MODEL = ScriptedInference().models()[0]


def shape(endpoint: type[OpenAIShape], *, usage: bool = False) -> Shape:
    requests = (GenerationRequest(RequestId("r"), (1,), 8, n=2),)
    call = Call("id-1", endpoint, MODEL, 5, requests, 2, stream=True, include_usage=usage, logprobs=False)
    return endpoint(call)


def events(raw: bytes) -> list[dict[str, Any]]:
    parts = raw.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [orjson.loads(part[6:]) for part in parts]


def text_of(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


@pytest.mark.parametrize("endpoint", SHAPES)
@pytest.mark.parametrize("usage", [False, True])
@given(text=st.text(min_size=1), index=st.sampled_from([0, 1]), finish=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]))
def test_an_event_is_json_and_holds_its_text(
    endpoint: type[OpenAIShape], *, usage: bool, text: str, index: int, finish: FinishReason | None
) -> None:
    got = events(shape(endpoint, usage=usage).event(index, [Content(text)], (), finish))
    assert "".join(text_of(event["choices"][0]) for event in got) == text
    assert [event["choices"][0]["finish_reason"] for event in got][-1] == finish
    for event in got:
        assert (event["id"], event["created"], event["model"], event["system_fingerprint"]) == ("id-1", 5, "echo", "fp_echo")
        assert event["choices"][0]["index"] == index
        assert ("usage" in event) == usage


@pytest.mark.parametrize("endpoint", SHAPES)
def test_text_held_back_makes_no_event(endpoint: type[OpenAIShape]) -> None:
    assert shape(endpoint).event(0, [], (), None) == b""
    assert len(events(shape(endpoint).event(0, [], (), FinishReason.STOP))) == 1


def test_the_opening_gives_every_choice_its_role() -> None:
    got = events(shape(ChatShape).first_events())
    assert [(event["choices"][0]["index"], event["choices"][0]["delta"]["role"]) for event in got] == [(0, "assistant"), (1, "assistant")]
    assert shape(CompletionShape).first_events() == b""


@pytest.mark.parametrize("endpoint", SHAPES)
def test_usage_comes_without_choices(endpoint: type[OpenAIShape]) -> None:
    ending = shape(endpoint, usage=True).ending(Usage(prompt=3, completion=4, cached=2))
    assert ending.endswith(DONE)
    (event,) = events(ending.removesuffix(DONE))
    assert event["choices"] == []
    details = {"cached_tokens": 2}
    assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": details}


def test_logprobs_of_half_a_character_and_of_the_impossible() -> None:
    logprobs = [TokenLogprob(0xC3, -0.5, ((0xC3, -0.5), (0xC4, -math.inf))), TokenLogprob(256, -1.0)]
    (event,) = events(shape(ChatShape).event(0, [], logprobs, None))
    first, last = event["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], -0.5)
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -9999.0]
    assert (last["token"], last["bytes"], last["top_logprobs"]) == ("", [], [])
    (event,) = events(shape(CompletionShape).event(0, [], logprobs, None))
    assert event["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert event["choices"][0]["logprobs"]["top_logprobs"][0] == {"\ufffd": -0.5}


def test_text_offsets_go_on_from_event_to_event() -> None:
    one = shape(CompletionShape)
    offsets = [
        events(one.event(0, [Content("ab")], [TokenLogprob(97, 0.0), TokenLogprob(98, 0.0)], None))[0]["choices"][0]["logprobs"][
            "text_offset"
        ]
        for _ in range(2)
    ]
    assert offsets == [[0, 1], [2, 3]]


@pytest.mark.parametrize("endpoint", SHAPES)
def test_a_whole_answer(endpoint: type[OpenAIShape]) -> None:
    choices = [Collected(["a", "b"], finish=FinishReason.STOP), Collected(finish=FinishReason.LENGTH)]
    answer = orjson.loads(shape(endpoint).whole(choices, Usage(1, 2, 0)))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert [choice.get("text", choice.get("message", {}).get("content")) for choice in answer["choices"]] == ["ab", ""]


PARTS: list[Part] = [
    Reasoning("hm"),
    Content("so"),
    CallBegun(0, "f"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ":1}"),
    CallBegun(1, "g"),
]


def test_calls_and_reasoning_streamed_are_those_of_the_whole_answer() -> None:
    one, collected = shape(ChatShape), Collected()
    streamed = events(b"".join(one.event(0, [part], (), None) for part in PARTS) + one.event(0, [], (), FinishReason.STOP))
    collected.add(PARTS, (), FinishReason.STOP)
    (choice, _) = orjson.loads(one.whole([collected, Collected(finish=FinishReason.STOP)], Usage(1, 2, 0)))["choices"]
    deltas = [event["choices"][0]["delta"] for event in streamed]
    message = choice["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"] == "so"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"] == "hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for place, whole in enumerate(message["tool_calls"]):
        own = [call for call in calls if call["index"] == place]
        assert [own[0]["function"]["name"], own[0]["type"]] == [whole["function"]["name"], whole["type"]]
        assert "".join(call["function"]["arguments"] for call in own) == whole["function"]["arguments"]
    assert len({call["id"] for call in calls if "id" in call}) == len(message["tool_calls"]) == 2
    assert streamed[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "tool_calls"


@given(st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from([0, 1]), st.text(max_size=3))))
def test_merging_keeps_every_sequence_as_it_was(rows: list[tuple[str, int, str]]) -> None:
    chunks = [
        GenerationChunk(RequestId(name), index, (place,), text, (TokenLogprob(place, 0.0),))
        for place, (name, index, text) in enumerate(rows)
    ]
    once = merge_chunks(chunks)
    keys = {(chunk.request_id, chunk.index) for chunk in chunks}
    assert len(once) == len(keys)
    for chunk in once:
        own = [one for one in chunks if (one.request_id, one.index) == (chunk.request_id, chunk.index)]
        assert chunk.text == "".join(one.text for one in own)
        assert chunk.token_ids == tuple(token for one in own for token in one.token_ids)
        assert [one.token_id for one in chunk.logprobs] == list(chunk.token_ids)
