"""What one machine can do to an API by connections alone, with and without TLS and a key: nothing to others."""

from __future__ import annotations

import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import BOUND_S, Served

from paceline.server.serve import own_certificate
from paceline.server.settings import ServerSettings, TlsFiles
from paceline.store.home import Home

Serve = Callable[..., Served[ScriptedInference]]
KEY = "open-sesame-open-sesame"
ASK = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n".encode()
MOST = 4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has one loopback address")


@pytest.fixture
def serve() -> Generator[Serve, None, None]:
    with ExitStack() as started:

        def start(tls: TlsFiles | None = None, host: str = "127.0.0.1") -> Served[ScriptedInference]:
            served = Served(ScriptedInference(), ServerSettings(api_key=KEY, max_connections=MOST), tls, host)
            started.callback(served.close)
            return served

        yield start


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    return own_certificate(Home(tmp_path), (), time.time()) if request.param == "tls" else None


def connect(served: Served[ScriptedInference], host: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.address[1]), BOUND_S, (host, 0))


def answered(served: Served[ScriptedInference], host: str, tls: TlsFiles | None) -> bytes:
    """What a client of that address gets that has the key."""
    connection = connect(served, host)
    if tls is not None:
        connection = ssl.create_default_context(cafile=tls.certificate).wrap_socket(connection, server_hostname="localhost")
    with connection:
        connection.sendall(ASK)
        return connection.recv(1 << 16)


def test_a_stranger_that_holds_all_connections_keeps_nobody_else_out(serve: Serve, tls: TlsFiles | None) -> None:
    served = serve(tls)
    with ExitStack() as held:
        strangers = [held.enter_context(connect(served, "127.0.0.2")) for _ in range(3 * MOST)]
        for _ in range(2):
            assert answered(served, "127.0.0.3", tls).startswith(b"HTTP/1.1 200 ")
        # Those beyond the bound were turned away, unfinished handshakes among them, and one made way: it came first.
        for stranger in (*strangers[MOST:], strangers[0]):
            while stranger.recv(1 << 16):
                pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no sockets for both IPv4 and IPv6")
def test_where_the_api_listens_on_ipv6_too_each_ipv4_address_counts_for_itself(serve: Serve) -> None:
    """There they come as ::ffff:a.b.c.d, all in one /64: one that holds connections would keep all others out."""
    served = serve(host="::")
    with ExitStack() as held:
        for _ in range(3 * MOST):
            held.enter_context(connect(served, "127.0.0.2"))
        assert answered(served, "127.0.0.3", None).startswith(b"HTTP/1.1 200 ")


def test_the_right_key_is_taken_while_its_own_address_sends_wrong_ones(serve: Serve) -> None:
    served = serve()
    wrong = ASK.replace(KEY.encode(), b"a-guess-a-guess-a-guess")
    for _ in range(20):
        with connect(served, "127.0.0.2") as guesser:
            guesser.sendall(wrong)
            assert guesser.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
    assert answered(served, "127.0.0.2", None).startswith(b"HTTP/1.1 200 ")


def test_an_answer_that_is_under_way_makes_way_for_nobody(serve: Serve) -> None:
    served = serve()
    body = orjson.dumps({"model": "echo", "prompt": "ab", "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    with ExitStack() as held:
        streams = [held.enter_context(connect(served, "127.0.0.2")) for _ in range(MOST)]
        for stream in streams:
            stream.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        served.run(served.inference.until_live(MOST))
        assert answered(served, "127.0.0.3", None).startswith(b"HTTP/1.1 429 ")
        for stream in streams:
            assert stream.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_a_body_behind_an_offer_of_another_protocol_is_no_request_of_its_own(serve: Serve, protocol: str) -> None:
    """Behind a proxy that passes the offer on, its sender would ask in the name of whoever has that connection next."""
    served = serve()
    head = ASK.replace(b"Connection: close", b"Connection: Upgrade\r\nUpgrade: " + protocol.encode())
    with connect(served, "127.0.0.2") as connection:
        connection.sendall(head.replace(b"\r\n\r\n", f"\r\nContent-Length: {len(ASK)}\r\n\r\n".encode()))
        connection.sendall(ASK)
        connection.sendall(ASK)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    assert got.count(b"HTTP/1.1 200 ") == 2


def test_the_api_s_document_is_made_once_however_often_it_is_asked_for(serve: Serve) -> None:
    """Making it holds up every stream."""
    served = serve()
    assert served.app.openapi() is served.app.openapi()
    assert served.http.get("/openapi.json").json() == served.app.openapi()


@pytest.mark.parametrize("kind", [{}, [], 0, None, "xml"])
def test_a_form_of_answers_that_is_of_the_wrong_type_is_the_client_s_fault(serve: Serve, kind: object) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "response_format": {"type": kind}}
    answer = serve().http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
