"""What clients of other servers expect of paths, versions of HTTP, and numbers."""

from __future__ import annotations

import gzip
from typing import Any

import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import BOUND_S, Served

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
PLAIN: dict[str, Any] = {"model": "echo", "prompt": "ab", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"), [("/chat/completions", CHAT), ("/completions", PLAIN), ("/responses", {"model": "echo", "input": "ab"})]
)
def test_paths_without_their_version_are_the_same(shared: Served[ScriptedInference], path: str, body: dict[str, Any]) -> None:
    answers = [shared.http.post(prefix + path, json=body) for prefix in ("", "/v1")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json().keys() == answers[1].json().keys()


def test_the_list_and_its_models_without_their_version(shared: Served[ScriptedInference]) -> None:
    assert shared.http.get("/models").json() == shared.http.get("/v1/models").json()
    assert shared.http.get("/models/echo").json()["id"] == "echo"
    assert shared.http.get("/modelsx").status_code == 404
    assert shared.http.get("/models/none").json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", PLAIN | {"stream": True}),
        ("/v1/messages", CHAT | {"stream": True}),
        ("/v1/responses", {"model": "echo", "input": "ab", "stream": True}),
        ("/api/chat", CHAT),
    ],
)
def test_http_1_0_gets_no_chunks(shared: Served[ScriptedInference], path: str, body: dict[str, Any]) -> None:
    import socket

    data = orjson.dumps(body)
    with socket.create_connection(shared.address, BOUND_S) as link:
        head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        link.sendall(head.encode() + data)
        got = b"".join(iter(lambda: link.recv(1 << 16), b""))
    head, _, found = got.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"200"
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert found.startswith((b"{", b"data: ", b"event: "))
    assert found.endswith((b"}", b"\n"))


@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate, gzip"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"])
def test_a_compressed_body_is_refused_as_such(shared: Served[ScriptedInference], path: str, coding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = shared.http.post(path, content=gzip.compress(orjson.dumps(CHAT)), headers=headers)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"
    assert shared.http.post("/v1/chat/completions", json=CHAT, headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_head_is_answered_where_ollama_does(shared: Served[ScriptedInference], path: str) -> None:
    answer = shared.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"seed": 42.0, "max_tokens": 2.0, "logprobs": True, "top_logprobs": 3.0}),
        ("/v1/completions", PLAIN | {"n": 1.0, "max_tokens": 3.0}),
        ("/v1/messages", CHAT | {"max_tokens": 2.0}),
        ("/v1/responses", {"model": "echo", "input": "ab", "max_output_tokens": 2.0}),
        ("/api/chat", CHAT | {"options": {"num_predict": 2.0, "seed": 1.0}}),
        ("/detokenize", {"tokens": [104.0, 105, 106.0]}),
    ],
)
def test_whole_floats_are_integers(shared: Served[ScriptedInference], path: str, body: dict[str, Any]) -> None:
    assert shared.http.post(path, json=body | ({} if path == "/detokenize" else {"stream": False})).status_code == 200


@pytest.mark.parametrize("value", [2.5, "2", True, 1e300, -2.0])
def test_no_other_number_is_an_integer(shared: Served[ScriptedInference], value: object) -> None:
    assert shared.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": value}).status_code == 400


def test_models_in_the_shape_of_anthropic(shared: Served[ScriptedInference]) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = shared.http.get("/v1/models", headers=headers).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "echo", page["data"][-1]["id"])
    one = shared.http.get("/v1/models/echo", headers=headers).json()
    assert one == page["data"][0]
    assert (one["type"], one["id"], one["created_at"][-1]) == ("model", "echo", "Z")


def test_input_tokens_of_a_response(shared: Served[ScriptedInference]) -> None:
    counted = shared.http.post("/v1/responses/input_tokens", json={"model": "echo", "input": "ab"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": 2}
    assert shared.http.post("/v1/responses/input_tokens", json={"model": "none", "input": "ab"}).status_code == 404


def test_the_document_lists_what_counts_tokens(shared: Served[ScriptedInference]) -> None:
    document = shared.http.get("/openapi.json").json()
    assert {"/tokenize", "/detokenize", "/v1/responses/input_tokens"} <= document["paths"].keys()
    assert {"with_pieces", "return_token_strs"} <= document["components"]["schemas"]["TokenizeRequest"]["properties"].keys()
