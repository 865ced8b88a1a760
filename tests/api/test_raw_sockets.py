"""Clients that do not speak HTTP well, or stop speaking: each connection is answered or closed, and holds nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import BOUND_S, Served

from paceline.server.settings import ServerSettings

Serve = Callable[..., Served[ScriptedInference]]
HURRIED = ServerSettings(request_timeout_s=0.2, slow_reader_timeout_s=0.2)


def post(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


def plain(**fields: object) -> bytes:
    return orjson.dumps({"model": "echo", "prompt": "ab"} | fields)


def connect(served: Served[ScriptedInference]) -> socket.socket:
    return socket.create_connection(served.address, BOUND_S)


def to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    got = b""
    while part := connection.recv(1 << 16):
        got += part
    return got


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100])
def test_garbage(serve_with: Serve, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with connect(serve_with()) as connection:
        connection.sendall(sent)
        head, _, body = to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(body)["error"]["code"] == "invalid_http"
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: h", post(b'{"model"', 100)])
def test_a_request_that_never_ends_is_closed(serve_with: Serve, sent: bytes) -> None:
    with connect(serve_with(settings=HURRIED)) as connection:
        connection.sendall(sent)
        head, _, body = to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert orjson.loads(body)["error"]["code"] == "request_timeout"


def test_half_a_second_request_is_closed_too(serve_with: Serve) -> None:
    with connect(serve_with(settings=HURRIED)) as connection:
        connection.sendall(post(plain(max_tokens=1)))
        first = b""
        while b'"usage"' not in first:
            first += connection.recv(1 << 16)
        connection.sendall(b"GET /health HT")
        rest = to_end(connection)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in rest


def test_headers_without_end(serve_with: Serve) -> None:
    with connect(serve_with()) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)
        assert to_end(connection).startswith(b"HTTP/1.1 431 ")


def flooded(connection: socket.socket, data: bytes) -> bytes:
    """What the server says before it closes, sent one piece of `data` after another; b"" where it resets the connection."""
    got = b""
    with suppress(ConnectionError):
        for _ in range(1000):
            connection.sendall(data)
        while part := connection.recv(1 << 16):
            got += part
    return got


@pytest.mark.parametrize("endless", [(b"0\r\n", b"X: y\r\n" * 1000), (b"0\r\nX: ", b"y" * 6000), (b"2;", b"y" * 6000)])
def test_a_body_without_end_of_its_chunks(serve_with: Serve, endless: tuple[bytes, bytes]) -> None:
    """Neither trailers, nor one trailer, nor a chunk's extension may go on for ever."""
    served = serve_with()
    with connect(served) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
            + endless[0]
        )
        got = flooded(connection, endless[1])
    assert got == b"" or got.startswith(b"HTTP/1.1 431 ")
    assert served.http.get("/health").status_code == 200


def test_many_small_chunks_are_a_body(serve_with: Serve) -> None:
    body = plain(max_tokens=1).ljust(60_000)
    with connect(serve_with()) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def answers(connection: socket.socket, count: int) -> bytes:
    """Everything until so many whole answers are there."""
    got = b""
    while got.count(b'"usage"') < count:
        got += connection.recv(1 << 16)
    return got


@pytest.mark.parametrize("pieces", [1, 2, 50])
def test_requests_sent_ahead_are_answered_in_turn(serve_with: Serve, pieces: int) -> None:
    served = serve_with(ScriptedInference(hold_after=1))
    sent = b"".join(post(plain(max_tokens=2, prompt=prompt)) for prompt in ("ab", "cd", "ef"))
    size = -(-len(sent) // pieces)
    with connect(served) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        served.run(served.inference.until_live(1))
        served.loop.call_soon_threadsafe(served.inference.release)
        texts = [
            orjson.loads(part.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
            for part in answers(connection, 3).split(b"HTTP/1.1 200 OK\r\n")[1:]
        ]
    assert texts == ["ab", "cd", "ef"]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("ahead", [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", post(plain()), b"GET /heal"])
def test_a_request_sent_ahead_does_not_hide_that_the_client_left(serve_with: Serve, ahead: bytes, *, apart: bool) -> None:
    served = serve_with(ScriptedInference(hold_after=0))
    with connect(served) as connection:
        connection.sendall(post(plain()) + (b"" if apart else ahead))
        served.run(served.inference.until_live(1))
        if apart:
            connection.sendall(ahead)
    served.run(served.inference.until_live(0))


def test_a_flood_behind_a_request_ends_it(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=0))
    with connect(served) as connection:
        connection.sendall(post(plain()))
        served.run(served.inference.until_live(1))
        assert flooded(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000) == b""
    served.run(served.inference.until_live(0))


def test_a_request_refused_before_its_end_is_answered_once(serve_with: Serve) -> None:
    served = serve_with(settings=ServerSettings(max_body_bytes=1000, request_timeout_s=0.5))
    with connect(served) as connection:
        connection.sendall(post(b" " * 500_000) + post(plain(max_tokens=1)))
        got = answers(connection, 1)
        assert (got.count(b"HTTP/1.1 "), got.count(b"HTTP/1.1 413 ")) == (2, 1)
        connection.sendall(post(b"", 1 << 20))
        assert to_end(connection).count(b"HTTP/1.1 ") == 1


def test_a_long_answer_outlives_the_time_for_its_request(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=1), HURRIED)
    with connect(served) as connection, connect(served) as other:
        connection.sendall(post(plain(max_tokens=2, stream=True)))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert to_end(other).startswith(b"HTTP/1.1 408 ")  # it came later, and its time is over
        served.loop.call_soon_threadsafe(served.inference.release)
        got = b""
        while b"[DONE]" not in got:
            got += connection.recv(1 << 16)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_blocks(serve_with: Serve, *, stream: bool) -> None:
    served = serve_with(ScriptedInference(hold_after=1 if stream else 0))
    with connect(served) as connection:
        connection.sendall(post(plain(stream=stream, n=3)))
        served.run(served.inference.until_live(1))
        if stream:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert served.metric("paceline_kv_blocks_used") > 0
    served.run(served.inference.until_live(0))
    assert served.metric("paceline_kv_blocks_used") == 0
    assert served.metric("paceline_client_disconnects_total") == 1


def test_a_client_that_does_not_read_is_dropped(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_context=1 << 20), HURRIED)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(BOUND_S)
        connection.connect(served.address)
        connection.sendall(post(plain(stream=True, n=128)))
        served.run(served.inference.until_live(1))
        served.run(served.inference.until_live(0))
    assert served.metric('paceline_sequences_finished_total{reason="abort"}') == 128


def test_too_many_connections(serve_with: Serve) -> None:
    served = serve_with(settings=ServerSettings(max_connections=2))
    with connect(served) as first, connect(served) as second, connect(served) as third:
        assert to_end(third).startswith(b"HTTP/1.1 429 ")
        for connection in (first, second):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_expect_100_continue(serve_with: Serve) -> None:
    with connect(serve_with()) as connection:
        body = plain(max_tokens=1)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
        )
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("piece", [1, 1 << 16])
def test_an_upgrade_that_is_offered_is_declined_and_the_request_answered(serve_with: Serve, framing: str, piece: int) -> None:
    """Java's client offers HTTP/2 with every first request over plain HTTP."""
    served = serve_with()
    body = plain(max_tokens=1)
    sized = f"Content-Length: {len(body)}" if framing == "length" else "Transfer-Encoding: chunked"
    framed = body if framing == "length" else f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{offer}\r\n{sized}\r\n\r\n"
    page = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    sent = head.encode() + framed + page + head.encode() + framed + last
    with connect(served) as connection:
        for start in range(0, len(sent), piece):
            connection.sendall(sent[start : start + piece])
        assert to_end(connection).count(b"HTTP/1.1 200 ") == 4
