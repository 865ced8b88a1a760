from __future__ import annotations

import socket

import pytest

from paceline.net.member.links import connect_s


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_networks_share_of_a_round_trip_is_the_time_to_connect(host: str) -> None:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as server:
        seconds = connect_s(f"{host}:{server.getsockname()[1]}")
    assert seconds is not None
    assert seconds > 0


@pytest.mark.parametrize("address", ["127.0.0.1:1", "", "127.0.0.1:", "not an address", "nowhere.invalid:80", "127.0.0.1:99999"])
def test_an_address_that_does_not_connect_has_none(address: str) -> None:
    assert connect_s(address) is None
