"""Chats that reach an engine as they are, and its answers as parts."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from paceline.core.errors import InvalidRequest, NotServed
from paceline.core.generation import FinishReason, GenerationChunk
from paceline.core.ids import RequestId
from paceline.engines.passed_chat import passed_chat
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.passing import PassedReader, has_notes, passed_body
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
        {"tool_calls": [{"index": 0, "function": {"name": ["x"], "arguments": {"a": 1}}}]},
    ],
)
def test_deltas_of_another_shape_break_nothing(delta: dict[str, Any]) -> None:
    parts_of(chunk(delta), chunk(finish=FinishReason.STOP))


PIXEL = "data:image/png;base64,iVBORw0KGgo="


def request(*contents: Any, **fields: Any) -> ChatCompletionRequest:
    """Return a chat with a user's message for each content."""
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": content} for content in contents], **fields})


def body_of(asked: ChatCompletionRequest, *, takes_images: bool = True) -> dict[str, Any]:
    return orjson.loads(passed_body(asked, takes_images=takes_images))


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}, PIXEL),
        ({"type": "image_url", "image_url": PIXEL.replace("png", "PNG").removesuffix("=")}, PIXEL),
        ({"type": "image_url", "image_url": PIXEL.replace("Rw0", "R\nw0")}, PIXEL),
        ({"type": "input_image", "image_url": PIXEL}, PIXEL),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "/9j/"}, "title": "x"},
            "data:image/jpeg;base64,/9j/",
        ),
    ],
)
def test_every_apis_images_become_openais(part: dict[str, Any], url: str) -> None:
    assert body_of(request([part]))["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": url}}]


ADDRESSES = (
    *("file:///etc/passwd", "/etc/passwd", "http://169.254.169.254/latest", "HTTPS://example.org/x.png", "gopher://x", "ftp://x/y.png", ""),
    *("data:text/html;base64,AAAA", "data:image/png,AAAA", "data:image/png;base64,", "data:image/png;base64,!!!!", "blob:x", "x" * 500),
    *("data:image/svg+xml;base64,AAAA", "data:image/png;base64,AAAA\0", "data:image/png;base64,A"),
)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "part",
    [
        *({"type": "image_url", "image_url": {"url": url}} for url in ADDRESSES),
        *({"type": "input_image", "image_url": url} for url in ADDRESSES[:3]),
        *({"type": "image", "source": {"type": "url", "url": url}} for url in ADDRESSES[:3]),
        {"type": "image", "source": {"type": "base64", "media_type": "image/png;x=http://x/", "data": "AAAA"}},
        {"type": "image", "source": {"type": "base64", "media_type": "text/html", "data": "AAAA"}},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "input_image", "file_id": "f"},
        {"type": "image", "source": 5},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 5}},
    ],
)
def test_an_image_that_is_not_in_the_body_is_refused(part: dict[str, Any], place: int) -> None:
    contents: list[Any] = ["x", "y"]
    contents[place] = [part]
    with pytest.raises(InvalidRequest) as refused:
        body_of(request(*contents))
    assert refused.value.field == "messages"
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url", "document", "image_url"])
def test_a_part_that_the_engine_does_not_read_is_refused_in_the_question_and_noted_before_it(kind: str) -> None:
    part, sees = {"type": kind, kind: {"url": PIXEL}}, kind != "image_url"
    body = body_of(request([part], "x"), takes_images=sees)
    assert [each["type"] for each in body["messages"][0]["content"]] == ["text"]
    assert has_notes(request([part], "x").messages, takes_images=sees)
    if sees:
        with pytest.raises(NotServed):
            body_of(request([part]))


UNKNOWN = {
    "num_ctx": 5, "keep_alive": -1, "ttl": 5, "draft_model": "/x", "adapters": "/etc/passwd", "lora_path": "/etc", "id_slot": 0,
    "priority": -1, "cache_prompt": False, "mm_processor_kwargs": {"a": 1}, "a\nb": 2, "__class__": 1, "speculative.n_max": 9,
    "n_keep": 5, "repetition_context_size": 1, "xtc_threshold": 1, "role_mapping": {}, "extra_body": {"num_ctx": 1}, "vllm_xargs": {},
    "stream_options": {"include_usage": True}, "stream": True, "n": 2, "user": "me", "metadata": {"a": "b"}, "now": "2026-01-01T00:00:00Z",
    "ways": ["alone"], "cache_salt": "s", "draft": "off", "prediction": {}, "store": True, "add_generation_prompt": True, "logprobs": False,
}  # fmt: skip


def test_only_fields_of_a_chat_reach_an_engine() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"default": None}}}}}
    kept: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "seed": 3,
        "stop": ["x"], "max_tokens": 5, "max_completion_tokens": 5, "logit_bias": {"1": 5.0}, "reasoning_effort": "low",
        "parallel_tool_calls": True, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": True},
        "tools": [tool],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [None, 1]}}},
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": PIXEL}}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "c", "name": "f"},
        ],
    }  # fmt: skip
    more = {"images": ["/etc/passwd"], "cache": "x", "prefix": True, "cache_control": {}, "__class__": "y"}
    asked: dict[str, Any] = {**kept, **UNKNOWN, "model": "m", "tools": [{**tool, "cache_control": {}, "path": "x"}]}
    asked["messages"] = [
        {"role": "developer", "content": "s", "name": "me"},
        {"role": "user", "content": [part | more for part in kept["messages"][1]["content"]], **more},
        {**kept["messages"][2], "tool_calls": [{**call, **more, "index": 0, "function": {**call["function"], **more}}], **more},
        {**kept["messages"][3], **more},
    ]
    assert body_of(ChatCompletionRequest.model_validate_json(orjson.dumps(asked))) == kept


def test_a_body_of_another_machine_keeps_no_more_than_a_clients() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x", "path": "y"}], "images": ["/etc/passwd"]}
    assert passed_chat({"messages": [message], **UNKNOWN}) == {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}


@pytest.mark.parametrize(
    "body",
    [
        *(None, 5, [], {}, {"messages": 5}, {"messages": [5]}, {"messages": [None]}, {"messages": [{"content": 5}]}, {"messages": [{"content": [5]}]}),
        *({"messages": [{"content": [{"type": kind, "text": "x", "image_url": "y"}]}]} for kind in ("image", "input_audio", "file", "image_url")),
        *({"messages": [], name: 5} for name in ("tools", "tool_choice", "response_format", "chat_template_kwargs")),
        {"messages": [{"tool_calls": [{"function": 5}]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
        *({"messages": [], "chat_template_kwargs": {name: "x"}} for name in ("chat_template", "tokenize", "documents")),
    ],
)  # fmt: skip
def test_a_body_in_another_shape_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest):
        passed_chat(body)


@pytest.mark.parametrize("where", ["http://127.0.0.1:1/x", "file:///etc/passwd", "x.json", "//host/x"])
@pytest.mark.parametrize("key", ["$ref", "$dynamicRef"])
def test_a_schema_refers_to_nothing_outside_of_itself(key: str, where: str) -> None:
    def bodies(schema: dict[str, Any]) -> list[dict[str, Any]]:
        inner = {"type": "object", "properties": {"a": {"anyOf": [schema]}}}
        forms = [{"type": "json_object", "schema": inner}, {"type": "json_schema", "json_schema": {"schema": inner}}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": inner}}]
        return [*({"messages": [], "response_format": form} for form in forms), {"messages": [], "tools": tools}]

    for body in bodies({key: "#/$defs/a"}) + bodies({"properties": {key: {"type": "string"}}}):
        assert passed_chat(body) == body
    for body in bodies({key: where}):
        with pytest.raises(InvalidRequest):
            passed_chat(body)


@pytest.mark.parametrize("field", [{"think": False}, {"thinking": {"type": "disabled"}}])
def test_what_turns_reasoning_off_is_passed_under_one_name(field: dict[str, Any]) -> None:
    body = body_of(request("x", max_tokens=-1, **field))
    assert body == {"reasoning_effort": "none", "messages": [{"role": "user", "content": "x"}]}
