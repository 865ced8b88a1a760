"""Ollama's API as bytes: lines, figures, errors, what is taken of undeclared bodies, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.scripted_encoder import ScriptedEncoder
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.server.settings import ServerSettings

Scripted = Served[ScriptedInference]
Serve = Callable[..., Scripted]

HELLO: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 7}}
TEXT: dict[str, Any] = {"model": "echo", "prompt": "hello", "options": {"num_predict": 7}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'


def lines_of(served: Scripted, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def error_of(served: Scripted, path: str, body: dict[str, Any], status: int = 400) -> str:
    answer = served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    return answer.json()["error"]


def asked_with(text: str, **fields: Any) -> dict[str, Any]:
    """A chat that the scripted model answers with `text`, once."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "options": {"num_predict": len(text)}, **fields}


def test_a_chat_is_lines_of_which_the_last_has_the_figures(shared: Scripted) -> None:
    *lines, last = lines_of(shared, "/api/chat", HELLO)
    assert "".join(line["message"]["content"] for line in lines) == "hellohe"
    assert all(line.keys() == {"model", "created_at", "message", "done"} and not line["done"] for line in lines)
    assert last["done"]
    assert last["done_reason"] == "length"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["prompt_eval_count"], last["eval_count"], last["load_duration"]) == (5, 7, 0)
    assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"]
    assert last["prompt_eval_duration"] > 0


def test_a_whole_answer_is_one_object(shared: Scripted) -> None:
    answer = shared.http.post("/api/chat", json={**HELLO, "stream": False})
    assert answer.headers["content-type"] == "application/json"
    whole = answer.json()
    assert whole["message"] == {"role": "assistant", "content": "hellohe"}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 7)


def test_a_text_is_lines_too(shared: Scripted) -> None:
    *lines, last = lines_of(shared, "/api/generate", TEXT)
    assert "".join(line["response"] for line in lines) == "hellohe"
    assert last["response"] == ""
    assert shared.http.post("/api/generate", json={**TEXT, "stream": False, "raw": True}).json()["response"] == "hellohe"


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_without_a_prompt_the_model_is_loaded(shared: Scripted, path: str, field: str) -> None:
    answer = shared.http.post(path, json={"model": "ECHO:latest", "keep_alive": -1}).json()
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("echo", True, "load")
    assert field in answer
    assert "not served here" in error_of(shared, path, {"model": "other"}, 404)


def test_calls_come_whole_with_arguments_as_an_object(shared: Scripted) -> None:
    body = asked_with(f"So: {CALL}", tools=[WEATHER])
    *lines, last = lines_of(shared, "/api/chat", body)
    assert "".join(line["message"]["content"] for line in lines).strip() == "So:"
    (call,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Bonn", "days": 2}}
    assert call["id"].startswith("call_")
    assert "tool_calls" not in last["message"]
    whole = shared.http.post("/api/chat", json={**body, "stream": False}).json()["message"]
    assert whole["content"].strip() == "So:"
    assert whole["tool_calls"][0]["function"] == call["function"]


def test_a_call_that_was_cut_off_is_text(shared: Scripted) -> None:
    body = {**asked_with(CALL, tools=[WEATHER]), "options": {"num_predict": CALL.index("Bonn")}}
    *lines, last = lines_of(shared, "/api/chat", body)
    text = "".join(line["message"]["content"] for line in lines)
    assert '"weather"' in text
    assert text.rstrip().endswith('"city": "')
    assert not any("tool_calls" in line["message"] for line in lines)
    assert last["done_reason"] == "length"
    assert shared.http.post("/api/chat", json={**body, "stream": False}).json()["message"]["content"] == text


def test_logprobs(shared: Scripted) -> None:
    *lines, _ = lines_of(shared, "/api/chat", {**HELLO, "logprobs": True, "top_logprobs": 1})
    first = lines[0]["logprobs"][0]
    assert first == {"token": "h", "logprob": 0.0, "bytes": [104], "top_logprobs": [{"token": "h", "logprob": 0.0, "bytes": [104]}]}
    assert sum(len(line["logprobs"]) for line in lines) == 7
    whole = shared.http.post("/api/generate", json={**TEXT, "logprobs": True, "stream": False}).json()
    assert [one["token"] for one in whole["logprobs"]] == list("hellohe")


def test_an_error_in_a_stream_is_its_last_line(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(fail_after=3))
    *lines, last = lines_of(served, "/api/chat", HELLO)
    assert last.keys() == {"error"}
    assert "The script says: fail" in last["error"]
    assert not any(line["done"] for line in lines)


def test_more_tokens_than_there_is_room_for_end_with_length(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_context=16))
    *_, last = lines_of(served, "/api/chat", {**HELLO, "options": {"num_predict": 100_000, "num_ctx": 100_000}})
    assert (last["done_reason"], last["eval_count"]) == ("length", 11)
    said = error_of(served, "/api/chat", asked_with("x" * 40))
    assert "exceed the context" in said or "holds 16" in said
    assert "max_tokens" not in said


@pytest.mark.parametrize(
    "options",
    [
        {"num_predict": 7, "mirostat": 0, "tfs_z": 1, "typical_p": 1.0, "num_gpu": 99, "num_thread": 8, "num_keep": 4, "use_mmap": True},
        {"num_predict": 7, "stop": [], "repeat_last_n": 64, "repeat_penalty": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "seed": 1},
        {"num_predict": 7, "temperature": None, "num_ctx": 1 << 20, "mirostat_tau": 5.0, "penalize_newline": True, "numa": False},
    ],
)
def test_options_that_are_taken(shared: Scripted, options: dict[str, Any]) -> None:
    extra = {"keep_alive": "5m", "truncate": True, "shift": False, "think": False, "format": "", "tools": []}
    *lines, _ = lines_of(shared, "/api/chat", {**HELLO, **extra, "options": options})
    assert "".join(line["message"]["content"] for line in lines) == "hellohe"


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
        ("/api/chat", {"options": {"temperature": 9}}, "options.temperature"),
        ("/api/chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("/api/chat", {"format": "xml"}, "format"),
        ("/api/chat", {"think": "very"}, "think"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "a", "tool_name": "f"}]}, "messages[0]"),
        ("/api/chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ("/api/generate", {"images": ["aGk="]}, "images"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"raw": True, "system": "Be."}, "system"),
        ("/api/show", {}, "model"),
    ],
)
def test_what_is_refused_is_named(shared: Scripted, path: str, change: dict[str, Any], named: str) -> None:
    body = {"/api/chat": HELLO, "/api/generate": TEXT, "/api/show": {}}[path] | change
    assert error_of(shared, path, body).startswith(f"{named}:")


def test_what_is_ignored_is_named(shared: Scripted) -> None:
    options = {"num_predict": 2, "num_ctx": 4096, "num_gpu": 1}
    for path, body in (("/api/chat", HELLO), ("/api/generate", TEXT), ("/api/generate", {**TEXT, "raw": True})):
        answer = shared.http.post(path, json={**body, "truncate": True, "keep_alive": 0, "options": options})
        assert set(answer.headers["x-paceline-ignored"].split(", ")) == {"truncate", "options.num_ctx", "options.num_gpu"}


def test_models(shared: Scripted) -> None:
    (listed,) = shared.http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "echo:latest"
    (loaded,) = shared.http.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["context_length"], loaded["size_vram"]) == ("echo:latest", 4096, 0)
    shown = shared.http.post("/api/show", json={"name": "echo:latest"}).json()
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
    assert error_of(shared, "/api/show", {"model": "other"}, 404)


def test_embeddings() -> None:
    served = Served(ScriptedInference(), encoder=ScriptedEncoder())
    try:
        several = served.http.post("/api/embed", json={"model": "counts:latest", "input": ["\x01", "\x02\x02"], "truncate": True})
        assert several.json()["embeddings"] == [[0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0, 0, 0]]
        assert (several.json()["model"], several.json()["prompt_eval_count"]) == ("counts", 3)
        assert several.json()["total_duration"] > 0
        assert several.headers["x-paceline-ignored"] == "truncate"
        one = served.http.post("/api/embeddings", json={"model": "counts", "prompt": "\x02\x02"})
        assert one.json() == {"embedding": several.json()["embeddings"][1]}
        assert error_of(served, "/api/embed", {"model": "counts", "input": ["a", "b" * 65]}).startswith("input[1]")
        assert error_of(served, "/api/embeddings", {"model": "counts", "prompt": "b" * 65}).startswith("prompt")
        assert "makes no embeddings" in error_of(served, "/api/embed", {"model": "echo", "input": "a"})
        assert [model["name"] for model in served.http.get("/api/tags").json()["models"]] == ["echo:latest", "counts:latest"]
        shown = served.http.post("/api/show", json={"model": "counts"}).json()
        assert shown["capabilities"] == ["embedding"]
        assert shown["model_info"]["model.embedding_length"] == 8
    finally:
        served.close()


def test_models_are_not_fetched_through_the_api(shared: Scripted) -> None:
    for method, path in (("POST", "pull"), ("DELETE", "delete"), ("POST", "create"), ("HEAD", "blobs/sha256:1"), ("POST", "push")):
        answer = shared.http.request(method, f"/api/{path}", json={"model": "x"})
        assert answer.status_code == 501
        assert method == "HEAD" or f"paceline {'rm' if path == 'delete' else 'pull'}" in answer.json()["error"]
    assert shared.http.get("/api/nothing").json().keys() == {"error"}


def test_who_looks_whether_it_runs_finds_it_running(shared: Scripted) -> None:
    assert shared.http.head("/").status_code == 200
    version = shared.http.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # the least that Visual Studio Code takes


def test_a_program_may_leave_out_that_its_body_is_json(shared: Scripted) -> None:
    body = json.dumps({**HELLO, "stream": False})

    def status(path: str = "/api/chat", **headers: str) -> int:
        request = shared.http.build_request("POST", path, content=body)
        del request.headers["content-type"]
        request.headers.update({"user-agent": "curl/8.5.0"} | {name.replace("_", "-"): value for name, value in headers.items()})
        return shared.http.send(request).status_code

    curl = "application/x-www-form-urlencoded"
    assert status(content_type=curl) == 200
    assert status() == 200
    assert status(content_type="text/plain") == 415
    assert status("/v1/chat/completions", content_type=curl) == 415
    # What a page can have a browser send, of browsers that say less and less of it.
    firefox = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
    assert status(content_type=curl, origin="https://evil.example", user_agent=firefox) == 403
    assert status(content_type=curl, origin="null") == 403
    assert status(content_type=curl, sec_fetch_site="cross-site") == 403
    for says in (
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_mode": "no-cors"},
        {"referer": "https://evil.example/"},
    ):
        assert status(content_type=curl, **says) == 415
    assert status(content_type=curl, origin=shared.url) == 415
    assert status(content_type=curl, user_agent=firefox) == 415
    assert status(user_agent=firefox) == 415


def test_the_key_is_asked_for(serve_with: Serve) -> None:
    served = serve_with(settings=ServerSettings(api_key="0123456789abcdef"))
    served.http.headers.pop("authorization")
    for path in ("/api/tags", "/api/version", "/api/pull"):
        answer = served.http.get(path)
        assert answer.status_code == 401
        assert answer.json().keys() == {"error"}


def test_a_silent_stream_has_lines_without_text(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=2), ServerSettings(comment_s=0.02))
    with served.http.stream("POST", "/api/chat", json=HELLO) as answer:
        lines = answer.iter_lines()
        texts = [json.loads(next(lines))["message"]["content"] for _ in range(3)]
        assert "".join(texts) == "he"
        served.loop.call_soon_threadsafe(served.inference.release)
        texts += [json.loads(line)["message"]["content"] for line in lines]
    assert "".join(texts) == "hellohe"
