"""The official client's `responses` gets what OpenAI's own server would give it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from typing import Any, get_type_hints

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, response_create_params
from pydantic import BaseModel
from tests.fakes.api_clients import openai_client
from tests.fakes.scripted_inference import EOS, ByteTokenizer, ScriptedInference
from tests.fakes.served import Served

from paceline.core.text import NOTHING_GIVEN, Given
from paceline.server.settings import ServerSettings

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class EndingTokenizer(ByteTokenizer):
    """A chat ends with the token that ends answers, so that an answer says the last message once. The model was shown how to reason."""

    @property
    def chat_template(self) -> str:
        return "<think>"

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        return [*super().render_chat(messages, now, given), EOS]


@pytest.fixture(scope="module")
def served() -> Generator[Served[ScriptedInference], None, None]:
    served = Served(ScriptedInference(tokens_per_item=5, tokenizer=EndingTokenizer()))
    yield served
    served.close()
    assert served.inference.stats().blocks_in_use == 0


@pytest.fixture
def client(served: Served[ScriptedInference]) -> OpenAI:
    return client_of(served)


def client_of(served: Served[ScriptedInference]) -> OpenAI:
    return openai_client(served.url)


def written(text: str) -> dict[str, Any]:
    """A request whose answer is this text: the scripted model says again what it was told."""
    return {"model": "echo", "input": text}


def without_ids(value: object) -> object:
    """A response without what is new each time."""
    if isinstance(value, dict):
        new = ("id", "created_at", "completed_at", "call_id", "parsed", "parsed_arguments")
        return {key: without_ids(inner) for key, inner in value.items() if key not in new}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def test_a_response_is_of_the_official_type(client: OpenAI) -> None:
    asked = written("hello") | {"instructions": "Be brief.", "metadata": {"a": "b"}, "tools": [WEATHER], "reasoning": {"effort": "low"}}
    raw = client.responses.with_raw_response.create(
        **asked, include=["message.output_text.logprobs"], top_logprobs=2, text={"format": {"type": "text"}}, user="me"
    )
    response = Response.model_validate_json(raw.content, strict=True)
    assert not response.__pydantic_extra__ or set(response.__pydantic_extra__) == {"store"}
    assert response.output_text == "hello"
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "me")
    assert [tool.to_dict() for tool in response.tools] == [WEATHER]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (6, 6, 12)
    assert response.usage.input_tokens_details.cached_tokens == 1
    message = response.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(entry.token, len(entry.top_logprobs)) for entry in part.logprobs] == [(letter, 2) for letter in [*"hello", ""]]


@pytest.mark.parametrize(
    "asked",
    [
        written("hello, you"),
        written("hello, you") | {"max_output_tokens": 3},
        written("<think>Let me see.</think>Yes.") | {"max_output_tokens": 15},
        written("<think>Let me see.</think>"),
        written("hello") | {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        written("Let me look." + CALL) | {"tools": [WEATHER]},
        written(CALL + "\n" + CALL) | {"tools": [WEATHER]},
        written("<think>Where is it?</think>In Oslo.") | {"tools": [WEATHER]},
        written("<think>Where is it?</think>" + CALL) | {"tools": [WEATHER], "reasoning": {"summary": "auto"}},
    ],
)
def test_a_stream_tells_what_a_whole_response_says(client: OpenAI, asked: dict[str, Any]) -> None:
    whole = client.responses.create(**asked, store=False)
    with client.responses.stream(**asked, store=False) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.type in ("response.completed", "response.incomplete")
    assert without_ids(last.response.to_dict()) == without_ids(whole.to_dict())
    told: dict[tuple[str, int], str] = {}
    done: list[dict[str, Any]] = []
    for event in events:
        if event.type in TEXTS:
            key = event.item_id, event.output_index
            told[key] = told.get(key, "") + event.delta
        elif event.type == "response.output_item.done":
            done.append(event.item.to_dict())
    assert [item["id"] for item in done] == [item.to_dict()["id"] for item in last.response.output]
    assert without_ids(done) == without_ids([item.to_dict() for item in last.response.output])
    assert {(item["id"], place): text_of(item) for place, item in enumerate(done) if text_of(item)} == told


TEXTS = (
    "response.output_text.delta",
    "response.function_call_arguments.delta",
    "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta",
)


def text_of(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else (item.get("content") or item["summary"])[0]["text"]


def test_reasoning_comes_as_content_or_as_a_summary(client: OpenAI) -> None:
    asked = written("<think>Hm, hm.</think>Yes.") | {"tools": [WEATHER]}
    plain = client.responses.create(**asked).output[0]
    assert plain.type == "reasoning"
    assert plain.content is not None
    assert ([part.text for part in plain.content], plain.summary) == (["Hm, hm."], [])
    response = client.responses.create(**asked, reasoning={"summary": "auto"})
    summarised = response.output[0]
    assert summarised.type == "reasoning"
    assert ([part.text for part in summarised.summary], summarised.content) == (["Hm, hm."], [])
    assert response.output_text == "Yes."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm, hm.</think>")  # the last mark ends it
    carried = client.responses.create(**asked, include=["reasoning.encrypted_content"], store=False).output[0]
    assert carried.type == "reasoning"
    assert carried.encrypted_content


def test_tools_are_called_and_their_results_read(client: OpenAI) -> None:
    first = client.responses.create(**written("Let me look." + CALL), tools=[WEATHER])
    message, call = first.output
    assert message.type == "message"
    assert first.output_text == "Let me look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    after: Any = [*first.output, result, {"role": "user", "content": "And now?"}]
    assert client.responses.create(model="echo", input=after).output_text == "And now?"
    after = [result, {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]}]
    second = client.responses.create(model="echo", input=after, previous_response_id=first.id)
    assert second.output_text == "And now?"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="echo", input=after)
    assert (caught.value.param, "no message before it calls a tool" in str(caught.value)) == ("input[0].call_id", True)


def test_functions_of_a_namespace_are_called_under_it(client: OpenAI) -> None:
    """As Codex has its own tools and those of MCP servers."""
    find = WEATHER | {"name": "find"}
    tools: Any = [find, {"type": "namespace", "name": "crm", "description": "Of customers.", "tools": [find, WEATHER]}]
    wanted = written(CALL.replace("weather", "crm__find") + CALL.replace("weather", "find"))
    call, plain = client.responses.create(**wanted, tools=tools).output
    assert call.type == plain.type == "function_call"
    assert [(one.name, one.namespace, json.loads(one.arguments)) for one in (call, plain)] == [
        ("find", "crm", {"city": "Oslo"}),
        ("find", None, {"city": "Oslo"}),
    ]
    with client.responses.stream(**wanted, tools=tools) as stream:
        assert without_ids([item.model_dump() for item in stream.get_final_response().output]) == without_ids(
            [item.model_dump() for item in (call, plain)]
        )
    results: Any = [{"type": "function_call_output", "call_id": one.call_id, "output": "Ann"} for one in (call, plain)]
    after: Any = [call, plain, *results, {"role": "user", "content": "And now?"}]
    second = client.responses.create(model="echo", input=after, tools=tools)
    assert second.output_text == "And now?"
    (*_, kept) = client.responses.input_items.list(second.id).data
    assert kept.type == "function_call"
    assert (kept.name, kept.namespace) == ("find", "crm")
    for wrong in (
        {"name": "n" * 128},
        {"name": "a b"},
        {"tools": [{"type": "custom", "name": "a"}]},
        {"tools": [find, find]},
        {"tools": 3},
        {"name": 3},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="echo", input="hi", tools=[tools[1] | wrong])
        assert re.fullmatch(r"tools(\[0\](\.\w+(\[0\])?)?)?", caught.value.param or ""), wrong
    many = [{"type": "namespace", "name": f"n{place}", "tools": [find] * 257} for place in range(2)]
    with pytest.raises(openai.BadRequestError, match="at most 512") as caught:
        client.responses.create(model="echo", input="hi", tools=many)
    assert caught.value.param == "tools"


class Person(BaseModel):
    name: str
    age: int


def test_parse_reads_a_model(client: OpenAI) -> None:
    text = '{"name": "Ada", "age": 36}'
    response = client.responses.parse(**written(text), text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
    with client.responses.stream(**written(text), text_format=Person) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
    assert [event.parsed for event in done] == [Person(name="Ada", age=36)]


def test_kept_responses_can_be_read_and_deleted(client: OpenAI) -> None:
    first = client.responses.create(**written("one"))
    second = client.responses.create(**written("two"), previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    listed = client.responses.input_items.list(second.id)
    assert [item.to_dict()["content"] for item in listed] == [[{"type": "input_text", "text": "two"}]]
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "three"}]
    assert client.responses.create(model="echo", input=reference).output_text == "three"
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    # The conversation is in the second one, too.
    assert client.responses.create(**written("three"), previous_response_id=second.id).output_text == "three"


def test_input_items_come_in_pages(client: OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    response = client.responses.create(model="echo", input=items, max_output_tokens=1)
    pages = client.responses.input_items.list(response.id, limit=2, order="asc")
    assert pages.has_more
    assert [item.to_dict()["content"][0]["text"] for item in pages] == ["0", "1", "2", "3", "4"]


def test_nothing_is_kept_where_store_is_false(client: OpenAI) -> None:
    response = client.responses.create(**written("one"), store=False)
    assert response.to_dict()["store"] is False
    for refused in ({"previous_response_id": response.id}, {"previous_response_id": "resp_unknown"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**written("two"), **refused)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="echo", input=[{"type": "item_reference", "id": response.output[0].id}])
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[0].id")


def test_a_stream_that_fails_raises_and_says_so() -> None:
    served = Served(ScriptedInference(fail_after=3))
    try:
        with pytest.raises(openai.APIError, match="The script says: fail"):
            list(client_of(served).responses.create(**written("hello"), max_output_tokens=5, stream=True))
        raw = served.http.post("/v1/responses", json=written("hello") | {"max_output_tokens": 5, "stream": True}).text
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        failed = Response.model_validate_json(json.dumps(events[-1]["response"]), strict=True)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.code == "server_error"
    finally:
        served.close()


def test_old_responses_make_room() -> None:
    served = Served(ScriptedInference(), ServerSettings(kept_responses=2))
    try:
        client = client_of(served)
        first, second, third = [client.responses.create(**written(text), max_output_tokens=3) for text in ("one", "two", "three")]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        assert client.responses.retrieve(second.id).id == second.id
        assert client.responses.retrieve(third.id).id == third.id
    finally:
        served.close()


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]
SERVED: dict[str, Any] = {
    "input": "hi",
    "model": "echo",
    "instructions": "Be brief.",
    "max_output_tokens": 30,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_object"}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "previous_response_id": None,
    "store": False,
    "stream": False,
    "metadata": {"a": "b"},
}
IGNORED: dict[str, Any] = {
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "service_tier": "flex",
    "max_tool_calls": 3,
    "background_options": {"completion_window": "soonest"},
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "auto"},
}
REFUSED: dict[str, Sequence[Any]] = {
    "truncation": ["auto"],
    "background": [True],
    "context_management": [[{"type": "compaction"}]],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "prompt": [{"id": "pmpt_1"}],
    "moderation": [{"model": "omni-moderation-latest"}],
    "text": [{"verbosity": "low"}],
    "reasoning": [{"mode": "pro"}],
    "input": [IMAGE, [{"type": "web_search_call", "id": "ws_1"}], [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]],
    "tools": [[{"type": kind}] for kind in ("web_search", "file_search", "mcp", "code_interpreter", "image_generation", "custom")],
    "tool_choice": [{"type": "web_search_preview"}, {"type": "custom", "name": "a"}],
}


def test_every_field_of_the_official_type_is_served_ignored_or_refused(client: OpenAI) -> None:
    known = set(get_type_hints(response_create_params.ResponseCreateParamsNonStreaming)) - {"stream_options"}
    assert known == set(SERVED) | set(IGNORED) | set(REFUSED)
    off: Any = {"truncation": "disabled", "background": False, "context_management": []}
    assert client.responses.create(**SERVED, **IGNORED, **off).status == "completed"
    for field, values in REFUSED.items():
        for value in values:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**SERVED | {field: value})
            assert caught.value.code in ("unsupported_parameter", "invalid_value"), (field, value)
            assert (caught.value.param or "").startswith(field), (field, value)
            assert field in str(caught.value)


def test_errors_have_the_names_of_this_api(client: OpenAI) -> None:
    for wrong, field, code in (
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "a" * 5000}, "input", "context_length_exceeded"),
        ({"input": [{"role": "user", "content": "a" * 5000}]}, "input", "context_length_exceeded"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "invalid_value"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": "echo", "input": "hi"} | {"extra_body": wrong})
        assert (caught.value.param, caught.value.code) == (field, code), wrong
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model="other", input="hi")
    assert gone.value.code == "model_not_found"


def test_sampling_fields_beyond_openais_are_served_and_unknown_ones_named(client: OpenAI) -> None:
    asked = written("hello") | {"extra_body": {"stop_token_ids": [ord("l")], "seed": 3, "top_k": 5, "colour": "red"}}
    raw = client.responses.with_raw_response.create(**asked)
    assert raw.parse().output_text == "he"
    assert raw.headers["x-paceline-ignored"] == "colour"
