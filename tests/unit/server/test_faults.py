from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
from pydantic import BaseModel

from paceline import server
from paceline.core.errors import (
    FleetError,
    ImpossiblePin,
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    OutOfMemory,
    PlacementError,
    UserError,
    VocabularyMismatch,
)
from paceline.server.anthropic.requests import MessagesRequest
from paceline.server.faults import Api, Fault, Refusal, api_of, fault_of_error, fault_of_mistake
from paceline.server.fields import read_body
from paceline.server.ollama.requests import OllamaChatRequest
from paceline.server.requests import ChatCompletionRequest, CompletionRequest
from paceline.server.responses.requests import ResponsesRequest


def test_what_no_json_can_hold_is_replaced() -> None:
    fault = fault_of_error(InvalidRequest("the template says \ud800\x00"))
    assert orjson.loads(fault.body())["error"]["message"] == "the template says ?\x00"
    assert orjson.loads(fault.body(Api.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "the template says ?\x00"},
    }
    assert orjson.loads(fault.body(Api.OLLAMA)) == {"error": "the template says ?\x00"}


@pytest.mark.parametrize("error", [NodeUnreachable("b is gone"), FleetError("b refuses this node: a was revoked")])
def test_a_machine_that_is_gone_or_refuses_is_no_bug_of_ours(error: FleetError) -> None:
    fault = fault_of_error(error)
    assert (fault.status, fault.code, fault.headers) == (503, "no_machine", {"Retry-After": "5"})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ImpossiblePin("desk is pinned and is not in the fleet"), 400, "invalid_value"),
        (VocabularyMismatch("its tokens are others"), 400, "invalid_value"),
        (OutOfMemory("it does not fit"), 400, "invalid_value"),
        (ModelNotFound("there is none"), 404, "model_not_found"),
        (PlacementError("no machine has it"), 503, "no_machine"),
    ],
)
def test_what_is_the_owner_s_to_mend_is_no_fault_of_the_fleet(error: UserError, status: int, code: str) -> None:
    fault = fault_of_mistake(error)
    assert (fault.status, fault.code) == (status, code)


@pytest.mark.parametrize("rest", [": the schema is nested too deep", " and tools: an answer has one form"])
def test_messages_have_the_field_as_the_api_calls_it(rest: str) -> None:
    fault = Fault(400, f"response_format{rest}", param="response_format")
    assert orjson.loads(fault.body(Api.OPENAI))["error"]["message"] == f"response_format{rest}"
    assert orjson.loads(fault.body(Api.ANTHROPIC))["error"]["message"] == f"output_config.format{rest}"
    assert orjson.loads(fault.body(Api.OLLAMA))["error"] == f"format{rest}"
    assert (
        orjson.loads(Fault(400, f"No response_format{rest}", param="response_format").body(Api.OLLAMA))["error"]
        == f"No response_format{rest}"
    )


DOCUMENT = Path(__file__).parents[3] / "docs/reference/api.md"


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the tests travel without the documents")
def test_every_code_that_clients_are_told_is_documented() -> None:
    sources = [path.read_text() for path in Path(str(server.__file__)).parent.rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'code="([a-z_]+)"', source)}
    table = DOCUMENT.read_text().partition("## Errors")[2].partition("## Events")[0]
    assert {"invalid_type", "not_found"} <= codes
    assert sorted(code for code in codes if f"`{code}`" not in table) == []
    assert "| 501 |" in table


def test_a_name_that_does_not_fit_is_told_which_letters_do() -> None:
    named = {"type": "function", "function": {"name": "two words"}}
    with pytest.raises(Refusal) as refused:
        read_body(ChatCompletionRequest, orjson.dumps({"messages": [{"role": "user", "content": "a"}], "tools": [named]}))
    assert all(shown in refused.value.fault.message for shown in ("128", "a-z", "A-Z", "0-9", "_", "."))
    assert "[" not in refused.value.fault.message.partition(": ")[2]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1, 2, 3, 4, 5, 6]),
        ([1, 2.0], [1, 2]),
        ([[1.0, 2], [3.0]], [[1, 2], [3]]),
        ([[1], [2.0]], [[1], [2]]),
    ],
)
def test_whole_floats_are_token_ids(prompt: object, read: object) -> None:
    body = {"model": "m", "prompt": prompt, "stop_token_ids": [float(one) for one in range(9)]}
    asked = read_body(CompletionRequest, orjson.dumps(body))
    assert (asked.prompt, asked.stop_token_ids) == (read, list(range(9)))


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (CompletionRequest, {"prompt": "a", "stop": ["x"] * 17}, "stop: Input should have 16 entries at most"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": 3}, "stop_token_ids: Input should be a list"),
        (CompletionRequest, {"prompt": "a", "n": 1.5}, "n: Input should be a whole number"),
        (CompletionRequest, {"prompt": "a", "temperature": "warm"}, "temperature: Input should be a number"),
        (CompletionRequest, {"prompt": "a", "stream": "maybe"}, "stream: Input should be true or false"),
        (CompletionRequest, {"prompt": "a", "model": ""}, "model: Input should not be empty"),
        (ChatCompletionRequest, {"messages": []}, "messages: Input should not be empty"),
        (ChatCompletionRequest, {"messages": "hi"}, "messages: Input should be a list"),
        (ChatCompletionRequest, {"messages": [1]}, "messages[0]: Input should be an object"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x: Input should have 1 to 9 characters, each one of 0-9"),
        (CompletionRequest, {"prompt": [1.0, 2.5]}, "prompt: Token ids should be integers, at least one for each text"),
    ],
)
def test_what_does_not_fit_a_body_is_said_in_our_words(kind: type[CompletionRequest], body: dict[str, object], says: str) -> None:
    with pytest.raises(Refusal) as refused:
        read_body(kind, orjson.dumps(body))
    assert refused.value.fault.message == says


@pytest.mark.parametrize(
    ("path", "inner", "outer"),
    [
        ("/v1/responses", "response_format.json_schema.schema.items", "text.format.schema.items"),
        ("/v1/responses", "response_format", "text.format"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "text.format", "text.format"),
        ("/v1/responses/input_tokens", "tools[1].function.parameters.items", "tools[1].parameters.items"),
        ("/v1/chat/completions", "response_format.json_schema.schema", "response_format.json_schema.schema"),
    ],
)
def test_a_refusal_after_a_request_was_read_names_the_fields_of_its_api(path: str, inner: str, outer: str) -> None:
    said = orjson.loads(Fault(400, f"{inner}: can't be followed", param=inner).body(api_of(path)))["error"]
    assert (said["param"], said["message"]) == (outer, f"{outer}: can't be followed")


@pytest.mark.parametrize(
    ("path", "kind", "body", "param"),
    [
        ("/v1/responses", ResponsesRequest, {"input": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/responses", ResponsesRequest, {"input": "a", "max_output_tokens": "five"}, "max_output_tokens"),
        ("/v1/responses", ResponsesRequest, {"input": "a", "text": {"format": {"type": "text", "strict": True}}}, "text.format.strict"),
        ("/v1/messages", MessagesRequest, {"max_tokens": 1, "messages": [], "response_format": {"type": "text"}}, "messages"),
        ("/api/chat", OllamaChatRequest, {"model": "m", "functions": [1]}, "functions"),
        (
            "/v1/chat/completions",
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": "a"}], "max_new_tokens": 1},
            "max_new_tokens",
        ),
    ],
)
def test_a_refused_field_keeps_the_name_that_the_client_sent(path: str, kind: type[BaseModel], body: dict[str, object], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        read_body(kind, orjson.dumps(body))
    said = orjson.loads(refused.value.fault.body(api_of(path)))["error"]
    assert refused.value.fault.param == param
    assert (said if isinstance(said, str) else said["message"]).startswith(f"{param}:")
    assert not isinstance(said, dict) or said.get("param", param) == param
