"""Engines on loopback are found by what only they answer, and nothing else is asked."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from tests.fakes import recorded_engines as recorded
from tests.fakes.scripted_http import Asked, Said, Served, said, served

from paceline.engines.finding import FoundEngine, Listener, _address, _linux, _reached, find_engines, listeners, working_folder


def paceline(asked: Asked) -> Said:
    """Paceline's own endpoint, which has Ollama's pages too."""
    pages = {"/": {"name": "paceline", "api": "/v1"}, "/api/version": {"version": "0.9"}, "/v1/models": {"data": []}}
    return said(pages[asked.path]) if asked.path in pages else said({}, 404)


def shop(asked: Asked) -> Said:
    """A program that only has OpenAI's pages."""
    return said({"data": [{"id": "m"}]}) if asked.path == "/v1/models" else said({}, 404)


def port_of(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


def find(*servers: Served, **options: object) -> tuple[FoundEngine, ...]:
    wanted = [Listener("127.0.0.1", port_of(server), 4711) for server in servers]
    ports = [each.port for each in wanted]
    return asyncio.run(find_engines(ports=ports, listening=lambda: [*wanted, Listener("127.0.0.1", 1, 0)], **options))


def test_engines_are_found_with_the_user_who_runs_them_and_others_left_out() -> None:
    with served(recorded.vllm) as vllm, served(recorded.ollama) as ollama, served(paceline) as own, served(shop) as other:
        found = find(vllm, ollama, own, other)
        assert {(each.url, each.identity.name) for each in found} == {(vllm.url, "vllm"), (ollama.url, "ollama")}
        assert all(each.uid == 4711 and not each.is_of_this_user for each in found)
        assert all(each.method == "GET" and each.body is None for server in (vllm, ollama, own, other) for each in server.asked)
        assert own.paths() == ["GET /"]


def test_a_port_that_is_left_out_or_unknown_is_not_asked() -> None:
    with served(recorded.ollama) as ollama:
        assert find(ollama, except_ports={port_of(ollama)}) == ()
        assert asyncio.run(find_engines(listening=lambda: [Listener("127.0.0.1", port_of(ollama), 0)])) == ()
        assert not ollama.asked


def test_a_socket_of_this_process_is_listed_with_this_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, gone = one.getsockname()[1], other.getsockname()[1]
        other.close()
        found = {each.port: each for each in listeners()}
    assert found[port] == Listener("127.0.0.1", port, os.getuid())
    assert gone not in found


def test_of_several_users_listeners_at_a_port_another_users_is_taken_to_answer() -> None:
    with served(recorded.ollama) as ollama:
        port = port_of(ollama)
        mine, theirs, wild = (
            Listener("127.0.0.1", port, uid, is_wild=is_wild) for uid, is_wild in ((os.getuid(), False), (4711, False), (os.getuid(), True))
        )
        for sockets, is_own in (([mine], True), ([wild, mine], True), ([wild, theirs], False), ([theirs, wild], False)):
            (found,) = asyncio.run(find_engines(ports=[port], listening=lambda sockets=sockets: sockets))
            assert found.is_of_this_user == is_own


def test_the_working_folder_of_a_listener_is_its_process_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        assert working_folder(one.getsockname()[1]) == Path.cwd()
        port = one.getsockname()[1]
    assert working_folder(port) is None


@pytest.mark.parametrize(
    ("address", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1"), ("::ffff:127.0.0.1", "127.0.0.1"), ("192.168.1.4", None), ("fe80::1", None)],
)  # fmt: skip
def test_an_address_is_reached_on_loopback_or_not_at_all(address: str, reached: str | None) -> None:
    assert _reached(address) == reached


def test_linux_tables_are_read(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    lines = ["sl local_address rem_address st tx rx tr tm retrnsmt uid", "0: 0100007F:1F90 00000000:0000 0A 0:0 0:0 0 1000 0 1", "1: 0100007F:1F91 0100007F:9999 01 0:0 0:0 0 1000 0 1"]  # fmt: skip
    table.write_text("\n".join(lines))
    assert [each.port for each in _linux(table)] == [8080]
    assert next(_linux(table)).url == "http://127.0.0.1:8080"
    assert Listener("::1", 5, 0).url == "http://[::1]:5"
    assert not [*_linux(tmp_path / "none")]
    assert _address("00000000000000000000000001000000") == "::1"
