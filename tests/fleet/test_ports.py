"""A port that another program has is said before a model is loaded, also where that program is a node that still loads its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fleet.machines import Machine, Up, free_port, machines
from tests.fleet.test_pipeline import found_fleet

from paceline.store.home import Home

SMALL = ("--context", "512", "--kv-tokens", "4096", "--threads", "1", "--fleet-host", "127.0.0.1", "--no-mdns")
PORTS = ("--port", "--fleet-port", "--tensor-port")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with machines(tmp_path, Home.from_environment().kernels, "a", "b") as (a, b):
        found_fleet(a, b)
        yield a, b


def asked(**ports: int) -> tuple[str, ...]:
    """A start with these ports, and any for the others."""
    given = {option: str(ports.get(option.strip("-").replace("-", "_"), 0)) for option in PORTS}
    return ("up", *SMALL, *(word for pair in given.items() for word in pair))


def test_of_two_starts_at_once_one_has_the_port_and_the_other_loads_nothing(pair: tuple[Machine, Machine]) -> None:
    a, b = pair
    ports = {"port": free_port(), "fleet_port": free_port(), "tensor_port": free_port()}
    first = Up(a, asked(**ports))
    a.running.append(first)
    first.wait_for("Loading")
    first.process.send_signal(signal.SIGSTOP)  # so that it is not done before the others are
    for name, port in ports.items():
        said = b.run(*asked(**{name: port}), code=2)
        assert f":{port} for" in said
        assert f"--{name.replace('_', '-')}" in said
        assert "Loading" not in said
    assert "runs already" in a.run(*asked(), code=2)
    first.process.send_signal(signal.SIGCONT)
    first.wait_ready()
    assert first.url.endswith(f":{ports['port']}")
    assert first.address.endswith(f":{ports['fleet_port']}")
