from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fleet.machines import EMPTY, Machine, free_port, machines, token_in

from paceline.store.home import Home


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    """Two machines of one fleet; `a` has the CA, and runs. What `b` runs is up to each test."""
    with machines(tmp_path_factory.mktemp("fleet"), Home.from_environment().kernels, "a", "b") as (a, b):
        a.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        a.up(*EMPTY)
        b.run("join", token_in(a.run("token", "--address", "127.0.0.1")), "--name", "b")
        yield a, b
