"""A port that is held is nobody else's, refuses who connects, and is served when its holder likes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.ports import find_port, hold_port, listen_on


def hold(host: str, port: int = 0) -> socket.socket:
    return hold_port(host, port, "the tests", "--test-port")


HOSTS = ["127.0.0.1", "localhost", "0.0.0.0", "", *(["::1", "::"] if socket.has_ipv6 else [])]


@pytest.mark.parametrize("host", HOSTS)
def test_a_held_port_is_refused_to_others_and_to_who_connects_until_it_is_served(host: str) -> None:
    with hold(host) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f":{port} for the tests") as taken:
            hold(host, port)
        assert str(port) in taken.value.hint.partition(". ")[0]
        assert "--test-port" in taken.value.hint
        with pytest.raises(OSError, match="in use"):
            socket.create_server((held.getsockname()[0], port), family=held.family)
        near = "::1" if host in {"::1", "::"} else "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((near, port))
        listen_on(held, 1)
        with socket.create_connection((near, port)) as caller, held.accept()[0] as taken_in:
            assert taken_in.getpeername()[1] == caller.getsockname()[1]


def test_a_port_is_held_anew_while_connections_of_the_last_run_linger() -> None:
    with hold("127.0.0.1") as held:
        port = held.getsockname()[1]
        listen_on(held, 1)
        with socket.create_connection(("127.0.0.1", port)) as caller:
            held.accept()[0].close()  # who closes first remembers the connection
            assert caller.recv(1) == b""
    with hold("127.0.0.1", port) as again:
        listen_on(again, 1)
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_that_another_program_serves_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for host in ("127.0.0.1", "0.0.0.0", ""):
            with pytest.raises(ConfigError, match="in use"):
                hold(host, other.getsockname()[1])


def test_an_address_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        hold("192.0.2.1")


def test_a_port_that_is_found_is_free_and_given_to_no_connection() -> None:
    port = find_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        pass
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) if sys.platform == "linux" else 49152
    assert port < lowest


def test_no_port_is_found_at_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"No free port of 192\.0\.2\.1 was found"):
        find_port("192.0.2.1")
