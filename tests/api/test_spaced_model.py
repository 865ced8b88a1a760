"""Chats, forms, tools and gaps with a vocabulary that puts a space before each text."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from tests.fakes.served import Served
from tests.fakes.spaced_model import CONTEXT, write_spaced

from paceline.machine.host import EngineHost
from paceline.machine.settings import NodeSettings
from paceline.node.build import build_node

pytestmark = pytest.mark.timeout(600)  # the first load on a machine compiles kernels

RED = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": RED}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 24, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "the", "max_tokens": 24, "temperature": 0}
COLORS = {'{"color": "red"}', '{"color": "green"}'}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, paceline_home: object) -> Generator[Served[EngineHost], None, None]:
    path = write_spaced(tmp_path_factory.mktemp("spaced") / "spaced.gguf")
    node = build_node(NodeSettings(model=str(path), context=CONTEXT, kv_tokens=4 * CONTEXT))
    found = Served(node.host)
    yield found
    found.close()
    assert node.close()


def first_token(served: Served[EngineHost], text: str) -> dict[str, float]:
    """A bias by which an answer begins with one token."""
    ids = served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return {str(ids[0]): 100.0}


@pytest.mark.parametrize(
    ("asked", "right"),
    [
        ({"regex": "(yes|no)"}, {"yes", "no"}),
        ({"regex": " yes"}, {" yes"}),
        ({"grammar": 'start: "there " ("red" | "green")'}, {"there red", "there green"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": RED}}}, COLORS),
    ],
)
def test_answers_are_of_their_form(served: Served[EngineHost], asked: dict[str, Any], right: set[str]) -> None:
    chat = served.http.post("/v1/chat/completions", json=CHAT | asked).json()
    assert chat["choices"][0]["message"]["content"] in right
    text = served.http.post("/v1/completions", json=TEXT | asked).json()
    assert text["choices"][0]["text"] in right


def test_a_required_call_is_written(served: Served[EngineHost]) -> None:
    asked = CHAT | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    (call,) = served.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["tool_calls"]
    assert json.dumps(json.loads(call["function"]["arguments"])) in COLORS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_an_answer_begins_without_the_vocabularys_space(served: Served[EngineHost], path: str) -> None:
    body: dict[str, Any] = {**CHAT, "logit_bias": first_token(served, "yes"), "max_tokens": 2, "stream": False}
    if path != "/v1/chat/completions":
        del body["logit_bias"]  # the others have no bias: they answer alike
    if path == "/v1/responses":
        body = {"input": "the", "max_output_tokens": 24, "temperature": 0}
    text = json.dumps(served.http.post(path, json=body).json())
    assert text.count('"content": " ') == text.count('"text": " ') == 0


def test_a_stream_has_the_text_of_the_whole(served: Served[EngineHost]) -> None:
    body = CHAT | {"logit_bias": first_token(served, "yes"), "max_tokens": 3}
    whole = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    lines = served.http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    assert whole.startswith("yes")


@pytest.mark.parametrize(("prompt", "begins"), [("the", " yes"), ([1], "yes")])
def test_a_text_that_goes_on_keeps_its_space(served: Served[EngineHost], prompt: Any, begins: str) -> None:
    body = TEXT | {"prompt": prompt, "logit_bias": first_token(served, "yes"), "max_tokens": 2}
    assert served.http.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith(begins)


def test_an_answer_that_goes_on_keeps_its_space(served: Served[EngineHost]) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "no"}]
    body = CHAT | {"messages": messages, "continue_final_message": True, "logit_bias": first_token(served, "yes"), "max_tokens": 1}
    assert served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == " yes"


def test_a_text_comes_back(served: Served[EngineHost]) -> None:
    for text in ("Hello there", " yes", "\nin"):
        ids = served.http.post("/tokenize", json={"content": text}).json()["tokens"]
        assert served.http.post("/detokenize", json={"tokens": ids}).json()["content"] == text
    body = {"prompt": ids, "echo": True, "max_tokens": 0}
    assert served.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "\nin"


def test_a_gap_is_filled_between_the_texts_as_they_are(served: Served[EngineHost]) -> None:
    suffix = "\nreturn x"
    body = TEXT | {"prompt": "def ", "suffix": suffix, "max_tokens": 1}
    count = served.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
    parts = [served.http.post("/tokenize", json={"prompt": text}).json()["count"] for text in ("def ", "a", f"a{suffix}")]
    assert count == parts[0] + parts[2] - parts[1] + 2


COMPLETIONS, CHATS, OLLAMA, RESPONSES = "/v1/completions", "/v1/chat/completions", "/api/chat", "/v1/responses"
SCORES = {"logprobs": True, "top_logprobs": 3}
SCORED: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {**CHAT, **SCORES}),
    (CHATS, {**CHAT, **SCORES, "continue_final_message": True, "messages": [*CHAT["messages"], {"role": "assistant", "content": "no"}]}),
    (CHATS, {**CHAT, **SCORES, "regex": " yes"}),
    (OLLAMA, {**SCORES, "stream": False, "messages": CHAT["messages"], "options": {"temperature": 0, "num_predict": 8}}),
    (RESPONSES, {"input": "the", "top_logprobs": 3, "max_output_tokens": 16, "temperature": 0}),
]


def entries_of(answer: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return an answer's text and its log probabilities, in any of the shapes."""
    if "output" in answer:
        (part,) = answer["output"][0]["content"]
        return part["text"], part["logprobs"]
    if "choices" not in answer:
        return answer["message"]["content"], answer["logprobs"]
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["logprobs"]["content"]


@pytest.mark.parametrize(("path", "body"), SCORED)
def test_scored_tokens_make_up_the_text(served: Served[EngineHost], path: str, body: dict[str, Any]) -> None:
    text, entries = entries_of(served.http.post(path, json=body).json())
    assert text.startswith(entries[0]["token"])
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == text
    begins = [entry["token"] for entry in entries[0]["top_logprobs"]]
    assert begins[0] == entries[0]["token"], "a token is spelled alike among those that could stand in its place"


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"prompt": [1]}, {"prompt": [1], "echo": True}, {"echo": True, "regex": " yes"}])
def test_scored_tokens_of_a_completion_make_up_its_text(served: Served[EngineHost], fields: dict[str, Any]) -> None:
    body = TEXT | {"max_tokens": 3, "logprobs": 2, "logit_bias": first_token(served, "yes")} | fields
    choice = served.http.post(COMPLETIONS, json=body).json()["choices"][0]
    lines = served.http.post(COMPLETIONS, json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    streamed = {name: [one for event in events for one in (event["logprobs"] or {}).get(name, [])] for name in ("tokens", "text_offset")}
    shown = choice["logprobs"]
    assert streamed == {name: shown[name] for name in streamed}
    assert "".join(shown["tokens"]) == choice["text"].removeprefix("<s>")
    assert shown["text_offset"] == [len("".join(shown["tokens"][:place])) for place in range(len(shown["tokens"]))]
