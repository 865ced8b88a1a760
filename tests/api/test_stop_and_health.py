"""Health follows progress; a stop ends every stream, and the server with them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.errors import ConfigError
from paceline.core.inference import Progress
from paceline.server.app import create_app, service_of
from paceline.server.serve import bind, serve
from paceline.server.settings import ServerSettings

Serve = Callable[..., Served[ScriptedInference]]
BODY = {"model": "echo", "prompt": "ab", "stream": True}


@pytest.mark.parametrize(
    ("progress", "status", "word"),
    [
        (Progress(busy=False, seconds_since_step=900.0), 200, "ok"),
        (Progress(busy=True, seconds_since_step=29.0), 200, "ok"),
        (Progress(busy=True, seconds_since_step=31.0), 503, "stalled"),
        (Progress(busy=True, seconds_since_step=99.0, step_expected_s=20.0), 200, "ok"),
        (Progress(busy=True, seconds_since_step=101.0, step_expected_s=20.0), 503, "stalled"),
        (Progress(busy=False, seconds_since_step=0.0, error="the engine died"), 503, "failed"),
        (Progress(busy=False, seconds_since_step=0.0, lacks="rank 1 ended"), 503, "recovering"),
        (Progress(busy=True, seconds_since_step=31.0, lacks="rank 1 ended"), 503, "recovering"),
        (Progress(busy=False, seconds_since_step=0.0, failing=("fleet-links",)), 200, "ok"),
    ],
)
def test_health(serve_with: Serve, progress: Progress, status: int, word: str) -> None:
    served = serve_with()
    served.inference.reported = progress
    answer = served.http.get("/health")
    said = answer.json()
    assert (answer.status_code, said["status"], said["error"], tuple(said["failing"])) == (
        *(status, word, progress.error or progress.lacks, progress.failing),
    )


def test_metrics_count(serve_with: Serve) -> None:
    served = serve_with()
    served.http.post("/v1/completions", json=BODY | {"max_tokens": 5}).raise_for_status()
    served.http.post("/v1/completions", json=BODY | {"max_tokens": 0})
    assert served.metric("paceline_generated_tokens_total") == 5
    assert served.metric("paceline_prompt_tokens_total") == 2
    assert served.metric("paceline_ttft_seconds_count") == 1
    assert served.metric("paceline_inter_token_seconds_count") == 4
    assert served.metric('paceline_http_responses_total{path="/v1/completions",status="200"}') == 1
    assert served.metric('paceline_http_responses_total{path="/v1/completions",status="400"}') == 1
    assert served.metric("paceline_http_in_flight") == 1  # the scrape itself
    for idle in ("paceline_requests_waiting", "paceline_requests_running", "paceline_kv_blocks_used"):
        assert served.metric(idle) == 0


def test_stop_ends_streams_and_silent_connections(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=1))
    with socket.create_connection(served.address) as silent, served.http.stream("POST", "/v1/completions", json=BODY) as stream:
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        served.begin_stop()
        rest = "".join(lines)
        assert "server_stopping" in rest
        assert "[DONE]" not in rest
        served.join()
    assert served.inference.stats().blocks_in_use == 0


def test_a_stop_behind_the_last_of_an_answer_adds_nothing_to_it() -> None:
    sent: list[dict[str, Any]] = []

    async def call() -> None:
        app = create_app(ScriptedInference(), ServerSettings())
        bodies = iter([{"type": "http.request", "body": json.dumps(BODY | {"max_tokens": 2}).encode(), "more_body": False}])

        async def receive() -> Any:
            body = next(bodies, None)
            return body or await asyncio.get_running_loop().create_future()  # the client stays

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message["more_body"]:
                service_of(app).stop()  # before the answer has put away what ran beside it

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope | {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "http_version": "1.1"}, receive, send)
        service_of(app).close()

    asyncio.run(call())
    assert b"[DONE]" in sent[-1]["body"]
    assert [message["more_body"] for message in sent[1:]].count(False) == 1


def test_a_draining_server_goes_on_and_says_so(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=1))
    service = service_of(served.app)
    assert service.is_quiet
    with served.http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 2}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        assert not service.is_quiet
        service.is_draining = True
        assert httpx.get(f"{served.url}/health").json()["status"] == "stopping"
        refused = httpx.post(f"{served.url}/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        served.loop.call_soon_threadsafe(served.inference.release)
        assert "[DONE]" in "".join(lines)


def test_a_silent_stream_is_kept_alive_by_comments(serve_with: Serve) -> None:
    for hold_after in (0, 1):  # before the first token too
        served = serve_with(ScriptedInference(hold_after=hold_after), ServerSettings(comment_s=0.01))
        with served.http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 2}) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            comments = [line for line in (next(lines) for _ in range(8)) if line.startswith(":")]
            assert len(comments) >= 3
            served.loop.call_soon_threadsafe(served.inference.release)
            rest = [line for line in lines if line and not line.startswith(":")]
            assert rest[-1] == "data: [DONE]"


def test_a_model_that_is_about_to_come_is_asked_for_again(serve_with: Serve) -> None:
    served = serve_with()
    served.inference.awaited.add("soon")
    for answer in (served.http.post("/v1/completions", json=BODY | {"model": "soon"}), served.http.get("/v1/models/soon")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_machine")
        assert int(answer.headers["retry-after"]) > 0
    assert served.http.post("/v1/completions", json=BODY | {"model": "never"}).status_code == 404


def test_stop_answers_waiting_calls(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=0))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(base_url=served.url) as client:
            call = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(served.inference.until_live(1), served.loop))
            served.begin_stop()
            return await call

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    served.join()


def test_stop_does_not_wait_for_a_client_that_does_not_read(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_context=1 << 20))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(served.address)
        body = b'{"model":"echo","prompt":"ab","stream":true,"n":128}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        served.run(served.inference.until_live(1))
        served.begin_stop()
        served.join()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "example.org"])
def test_open_addresses_need_a_key(host: str) -> None:
    async def start() -> None:
        with bind("127.0.0.1", 0) as held:
            await serve(create_app(ScriptedInference()), host, held, stop=asyncio.Event())

    with pytest.raises(ConfigError, match="without an API key"):
        asyncio.run(start())


def test_a_taken_port_is_named(serve_with: Serve) -> None:
    served = serve_with()

    with pytest.raises(ConfigError, match=str(served.address[1])) as taken:
        bind(*served.address)
    assert "--port" in taken.value.hint


def test_all_interfaces_with_a_key() -> None:
    async def start() -> int:
        stop, urls = asyncio.Event(), asyncio.Queue[str]()
        app = create_app(ScriptedInference(), ServerSettings(api_key="open-sesame-open-sesame"))
        running = asyncio.create_task(serve(app, "0.0.0.0", bind("0.0.0.0", 0), stop=stop, on_ready=urls.put_nowait))
        port = httpx.URL(await urls.get()).port
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{port}/v1/models")
        stop.set()
        await running
        return answer.status_code

    assert asyncio.run(start()) == 401


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"x-paceline-owner": ""}])
def test_what_fails_is_named_to_none_without_the_key(serve_with: Serve, headers: dict[str, str]) -> None:
    inference = ScriptedInference()
    inference.reported = Progress(busy=False, seconds_since_step=0.0, error="/home/me/x: 10.0.0.7", failing=("/home/me can't be written",))
    served = serve_with(inference, ServerSettings(api_key="open-sesame-open-sesame"))
    told = httpx.get(f"{served.url}/health", headers=headers)
    assert (told.status_code, told.json()["status"], len(told.json()["failing"])) == (503, "failed", 1)
    assert "/home" not in told.text
    whole = httpx.get(f"{served.url}/health", headers={"x-api-key": "open-sesame-open-sesame"}).json()
    assert (whole["error"], whole["failing"]) == (inference.reported.error, list(inference.reported.failing))
