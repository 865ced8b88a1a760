"""What the system saw of connections, without what programs at either end take."""

from __future__ import annotations

import socket
import sys

import pytest

from paceline.net.trust.connections import round_trip_s


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't say")
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_a_round_trip_is_the_networks_and_not_that_of_who_answers(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family is socket.AF_INET6) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert round_trip_s(address) is None
        with socket.socket(family) as one:
            one.connect((host, server.getsockname()[1]))
            other, _ = server.accept()
            with other:
                before = round_trip_s(address) or 0.0
                one.sendall(b"asks")
                other.sendall(other.recv(4))
                one.recv(4)
                assert 0.0 < (round_trip_s(address) or 0.0) <= before, "it is the shortest that was seen, whatever answering takes"
