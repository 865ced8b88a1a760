"""Texts and chats in tokens, and back, in vLLM's and llama-server's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.server.settings import ServerSettings

from .conftest import Serve

KEY = "a-key-of-some-letters"

HI = [104, 105]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "echo", "prompt": "hi"},
        {"prompt": "hi", "add_special_tokens": False},
        {"content": "hi"},
        {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "hi"}], "continue_final_message": True},
    ],
)
def test_what_is_sent_comes_back_as_tokens(shared: Served[ScriptedInference], fields: dict[str, Any]) -> None:
    answer = shared.http.post("/tokenize", json=fields | {"with_letters": True})
    assert answer.json() == {"tokens": HI, "count": 2, "max_model_len": 4096}
    assert answer.headers["x-paceline-ignored"] == "with_letters"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"content": "h\u00e9", "with_pieces": True}, {"tokens": [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]}),
        ({"prompt": "hi", "return_token_strs": True}, {"tokens": HI, "token_strs": ["h", "i"]}),
        ({"prompt": "hi", "with_pieces": False, "return_token_strs": False}, {"tokens": HI}),
        ({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}, {"tokens": HI}),
    ],
)  # fmt: skip
def test_pieces_are_shown_where_they_are_asked_for(
    shared: Served[ScriptedInference], fields: dict[str, Any], found: dict[str, Any]
) -> None:
    answer = shared.http.post("/tokenize", json=fields)
    assert {name: value for name, value in answer.json().items() if name not in {"count", "max_model_len"}} == found
    assert "x-paceline-ignored" not in answer.headers


def test_tokens_come_back_as_text(shared: Served[ScriptedInference]) -> None:
    assert shared.http.post("/detokenize", json={"tokens": HI}).json() == {"prompt": "hi", "content": "hi"}
    assert shared.http.post("/detokenize", json={"model": "echo", "tokens": []}).json()["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * 4_000_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [257]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_named(shared: Served[ScriptedInference], path: str, fields: dict[str, Any], status: int, param: str) -> None:
    answer = shared.http.post(path, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_key_is_asked_for(serve_with: Serve) -> None:
    served = serve_with(settings=ServerSettings(api_key=KEY))
    assert served.http.post("/tokenize", json={"prompt": "a"}, headers={"authorization": ""}).status_code == 401
