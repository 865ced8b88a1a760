"""Chats that reach an engine as they are, and its answers as parts."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from paceline.core.generation import FinishReason, GenerationChunk
from paceline.core.ids import RequestId
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.messages import MediaPart
from paceline.server.passing import PassedReader, image_part, passed_body
from paceline.server.requests import ChatCompletionRequest


def chunk(*deltas: Any, finish: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk(RequestId("r"), 0, (), "", deltas=tuple(orjson.dumps(delta).decode() for delta in deltas), finish_reason=finish)


def parts_of(*chunks: GenerationChunk) -> list[Part]:
    reader = PassedReader()
    return [part for each in chunks for part in reader.read(each)]


def test_content_and_thoughts_are_parts() -> None:
    said = chunk(
        {"role": "assistant", "content": None}, {"reasoning_content": "hm"}, {"reasoning": "m"}, {"content": "Hi"}, {"content": ""}
    )
    assert parts_of(said) == [Reasoning("hm"), Reasoning("m"), Content("Hi")]


def test_calls_are_parts_and_close_at_the_end() -> None:
    def call(index: int | None, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{**({} if index is None else {"index": index}), "id": "x", "function": function}]}

    chunks = (
        chunk(call(0, name="a", arguments="")),
        chunk(call(0, arguments='{"x":'), call(0, arguments="1}")),
        chunk(call(1, name="b", arguments="{}")),
        chunk(finish=FinishReason.STOP),
    )
    begun = [CallBegun(0, "a", True), CallArguments(0, '{"x":', True), CallArguments(0, "1}", True), CallBegun(1, "b", True)]
    assert parts_of(*chunks) == [*begun, CallArguments(1, "{}", True), CallArguments(0, "", False), CallArguments(1, "", False)]


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": "x"},
        {"tool_calls": [5]},
        {"content": 5},
        {},
        {"tool_calls": [{"index": 99, "function": None}]},
        {"tool_calls": [{"index": -1}]},
    ],
)
def test_deltas_of_another_shape_break_nothing(delta: dict[str, Any]) -> None:
    parts_of(chunk(delta), chunk(finish=FinishReason.STOP))


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}, "data:image/png;base64,AA"),
        ({"type": "image_url", "image_url": "https://x/y.png"}, "https://x/y.png"),
        ({"type": "input_image", "image_url": "data:image/png;base64,AA"}, "data:image/png;base64,AA"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "/9j/"}}, "data:image/jpeg;base64,/9j/"),
        ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "https://x/y.png"),
    ],
)
def test_every_apis_images_become_openais(part: dict[str, Any], url: str) -> None:
    assert image_part(MediaPart.model_validate(part)) == {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("part", [{"type": "input_audio", "input_audio": {}}, {"type": "image", "source": 5}, {"type": "image_url"}])
def test_parts_that_are_no_images_become_a_note(part: dict[str, Any]) -> None:
    assert image_part(MediaPart.model_validate(part))["type"] == "text"


def test_a_body_keeps_what_an_engine_knows_and_nothing_of_paceline() -> None:
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "u"}}]}],
        "temperature": 0.5,
        "seed": 3,
        "stop": ["x"],
        "stream": True,
        "n": 2,
        "ways": ["alone"],
        "cache_salt": "s",
        "user": "me",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    }
    body = orjson.loads(passed_body(ChatCompletionRequest.model_validate(asked)))
    assert body == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "u"}}]}],
        **{name: asked[name] for name in ("temperature", "seed", "stop", "tools", "response_format")},
    }
