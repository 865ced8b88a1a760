"""Bad input gets a 4xx in OpenAI's shape that names the field. Never a 500, never a leaked block."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.server.settings import ServerSettings

Serve = Callable[..., Served[ScriptedInference]]
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PLAIN = {"model": "echo", "prompt": "hi", "max_tokens": 1}

PLAIN_FIELDS = [
    ("model", 3, "model"),
    ("prompt", None, "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", ["a", 1], "prompt"),
    ("prompt", [1.5], "prompt"),
    ("prompt", [True], "prompt"),
    ("prompt", [-1], "prompt"),
    ("prompt", [257], "prompt"),
    ("prompt", ["a"] * 129, "prompt"),
    ("prompt", {"text": "a"}, "prompt"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", -0.1, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", 1.01, "min_p"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("seed", "x", "seed"),
    ("seed", 1 << 63, "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -2, "max_tokens"),
    ("max_tokens", 1 << 80, "max_tokens"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("stop", 1, "stop"),
    ("stop", [""], "stop[0]"),
    ("stop", ["a", 2], "stop[1]"),
    ("stop_token_ids", [257], "stop_token_ids"),
    ("stop_token_ids", ["a"], "stop_token_ids[0]"),
    ("logit_bias", {"x": 1}, "logit_bias.x"),
    ("logit_bias", {"1": 101}, "logit_bias.1"),
    ("logit_bias", {"257": 1}, "logit_bias"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("echo", "yes", "echo"),
    ("best_of", 2, "best_of"),
    ("suffix", "end", "suffix"),
    ("draft", "", "draft"),
    ("draft", 1, "draft"),
    ("draft", "no-such-model", "draft"),
    ("ways", [], "ways"),
    ("ways", "alone", "ways"),
    ("ways", ["Alone"], "ways[0]"),
    ("ways", ["sideways"], "ways"),
]
CHAT_FIELDS = [
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ("messages", [{"role": "tool", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "assistant", "content": "x"}], "messages"),
    ("max_completion_tokens", 2, "max_completion_tokens"),
    ("top_logprobs", 2, "top_logprobs"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2, "tools"),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 10_000, "tools"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
    ("tool_choice", "required", "tool_choice"),
    ("functions", [{}], "functions"),
    ("response_format", {"type": "yaml"}, "response_format"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "response_format.json_schema.schema"),
    ("response_format", "json_object", "response_format"),
    ("regex", "", "regex"),
    ("modalities", ["audio"], "modalities"),
    ("audio", {}, "audio"),
    ("reasoning_effort", "hard", "reasoning_effort"),
]


@pytest.mark.parametrize(
    ("path", "body", "field", "value", "param"),
    [("/v1/completions", PLAIN, *case) for case in PLAIN_FIELDS] + [("/v1/chat/completions", CHAT, *case) for case in CHAT_FIELDS],
    ids=lambda value: str(value)[:24] if not isinstance(value, dict) else "",
)
def test_bad_field(shared: Served[ScriptedInference], path: str, body: dict[str, object], field: str, value: object, param: str) -> None:
    fields = {key: given for key, given in (body | {field: value}).items() if given is not None}
    answer = shared.http.post(path, content=orjson.dumps(fields) if value != 1 << 80 else str(fields).replace("'", '"').encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["code"]


def test_an_image_is_refused_in_words_that_say_so(shared: Served[ScriptedInference]) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]}
    error = shared.http.post("/v1/chat/completions", content=orjson.dumps(body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[0].content[1].type")
    assert "no images" in error["message"]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model":"echo","prompt":"\xff"}', "invalid_json"),
        (b'{"model":"echo","prompt":"\\ud800"}', "invalid_json"),
        (b'{"model":"echo","prompt":"a","temperature":NaN}', "invalid_value"),
        (b'{"model":"echo","prompt":"a","temperature":-Infinity}', "invalid_value"),
        (b'{"model":"echo","prompt":"a","top_p":1e999}', "invalid_value"),
        (b'{"model":"echo","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_json"),
    ],
)
def test_malformed_body(shared: Served[ScriptedInference], raw: bytes, code: str) -> None:
    answer = shared.http.post("/v1/completions", content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (orjson.dumps(PLAIN | {"prompt": "a" * (10 << 20)}), 400, "context_length_exceeded"),
        (orjson.dumps(PLAIN | {"prompt": "\u00e9" * (5 << 20)}), 400, "context_length_exceeded"),
        (orjson.dumps(CHAT | {"messages": [{"role": "user", "content": "a" * (10 << 20)}]}), 400, "context_length_exceeded"),
        (b'{"model":"echo","prompt":[' + b"1," * (4 << 20) + b"1]}", 400, "context_length_exceeded"),
        (b'{"model":"echo","messages":[' + b"{}," * (1 << 20) + b"{}]}", 400, "context_length_exceeded"),
        (orjson.dumps(PLAIN | {"prompt": "a" * (17 << 20)}), 413, "request_too_large"),
    ],
)
def test_giant_body(shared: Served[ScriptedInference], body: bytes, status: int, code: str) -> None:
    answer = shared.http.post("/v1/completions" if b'"prompt"' in body[:200] else "/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_giant_chunked_body(shared: Served[ScriptedInference]) -> None:
    answer = shared.http.post("/v1/completions", content=(b" " * (1 << 20) for _ in range(17)))
    assert answer.status_code == 413


def test_bodies_together_are_bounded(serve_with: Serve) -> None:
    served = serve_with(settings=ServerSettings(max_pending_body_bytes=1000))
    answer = served.http.post("/v1/completions", json=PLAIN | {"prompt": "a" * 1000})
    assert answer.status_code == 429
    assert served.http.post("/v1/completions", json=PLAIN).status_code == 200


def test_context(shared: Served[ScriptedInference]) -> None:
    for fields, param in (({"max_tokens": 4095}, "max_tokens"), ({"prompt": "a" * 4096, "max_tokens": None}, "prompt")):
        answer = shared.http.post("/v1/completions", json={k: v for k, v in (PLAIN | fields).items() if v is not None})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert shared.http.post("/v1/completions", json=PLAIN | {"max_tokens": 4094}).status_code == 200


def test_unknown_model_path_and_method(shared: Served[ScriptedInference]) -> None:
    answer = shared.http.post("/v1/completions", json=PLAIN | {"model": "gpt-4o"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "echo" in answer.json()["error"]["message"]
    for method, path, status in (("GET", "/v1/none", 404), ("DELETE", "/v1/models", 405), ("GET", "/v1/completions", 405)):
        answer = shared.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["allow"] == "POST"


def test_a_draft_model_that_nobody_has_is_refused_with_the_names_of_those_there_are(shared: Served[ScriptedInference]) -> None:
    for streamed in (False, True):
        answer = shared.http.post("/v1/completions", json=PLAIN | {"draft": "no-such-model", "stream": streamed})
        assert answer.status_code == 400
        assert "auto, off, ngram" in answer.json()["error"]["message"]
    for known in ("auto", "off", "ngram", None):
        assert shared.http.post("/v1/completions", json=PLAIN | {"draft": known}).status_code == 200
