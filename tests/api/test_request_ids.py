"""X-Request-Id: what a client calls its request comes back on every answer, and stands in the log."""

from __future__ import annotations

import logging

import httpx
import pytest
from tests.api.conftest import Serve
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served
from tests.fleet.machines import until

from paceline.server.settings import ServerSettings

KEY = "a-key-of-some-letters"

OURS = {"X-Request-Id": "7f1c-4711/a:b"}


def test_every_answer_has_the_name_that_the_client_gave_or_one_of_its_own(shared: Served[ScriptedInference]) -> None:
    chat = {"model": shared.inference.models()[0].name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    asked = [
        httpx.get(f"{shared.url}/health", headers=OURS),
        httpx.get(f"{shared.url}/v1/models", headers=OURS),
        httpx.get(f"{shared.url}/nothing", headers=OURS),
        httpx.put(f"{shared.url}/v1/models", headers=OURS),
        httpx.post(f"{shared.url}/v1/chat/completions", json=chat, headers=OURS),
        httpx.post(f"{shared.url}/v1/chat/completions", json={**chat, "stream": True}, headers=OURS),
        httpx.post(f"{shared.url}/v1/chat/completions", json={**chat, "top_p": 7}, headers=OURS),
        httpx.post(f"{shared.url}/v1/messages", json=chat, headers=OURS),
    ]
    assert [answer.headers.get_list("x-request-id") for answer in asked] == [["7f1c-4711/a:b"]] * len(asked)
    made = [httpx.get(f"{shared.url}/v1/models").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(name.startswith("req_") for name in made)


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "caf\u00e9", "tab\there"])
def test_a_name_that_is_none_is_refused_and_not_written_anywhere(
    shared: Served[ScriptedInference], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = httpx.get(f"{shared.url}/v1/models", headers=[(b"X-Request-Id", name.encode("latin-1"))])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request_id")
    assert answer.headers["x-request-id"].startswith("req_")
    assert all(name not in line for line in caplog.messages if name)
    assert httpx.get(f"{shared.url}/health", headers=[(b"X-Request-Id", name.encode("latin-1"))]).status_code == 200


def test_two_names_are_none(shared: Served[ScriptedInference]) -> None:
    assert httpx.get(f"{shared.url}/v1/models", headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")]).status_code == 400


def test_a_wrong_key_is_answered_by_the_clients_name(serve_with: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve_with(settings=ServerSettings(api_key=KEY))
    with caplog.at_level(logging.INFO, "paceline.requests"):
        assert httpx.get(f"{served.url}/v1/models", headers=OURS).headers["x-request-id"] == OURS["X-Request-Id"]
        assert httpx.get(f"{served.url}/v1/models", headers={**OURS, "x-api-key": KEY}).status_code == 200
        # A line is written once its answer is sent.
        until(lambda: sum("/v1/models" in line for line in caplog.messages) == 2)
    assert [line.endswith(" [7f1c-4711/a:b]") for line in caplog.messages if "/v1/models" in line] == [True, True]


def test_a_server_that_fails_says_by_which_name(serve_with: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("paceline.server.app.listed_models", fails)
    answer = httpx.get(f"{serve_with().url}/v1/models", headers=OURS)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, OURS["X-Request-Id"])
