from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.server.settings import ServerSettings

Serve = Callable[..., Served[ScriptedInference]]


@pytest.fixture
def serve_with() -> Generator[Serve, None, None]:
    """Starts servers; each is stopped, and must have freed every block."""
    started: list[Served[ScriptedInference]] = []

    def start(inference: ScriptedInference | None = None, settings: ServerSettings | None = None) -> Served[ScriptedInference]:
        served = Served(inference or ScriptedInference(), settings)
        started.append(served)
        return served

    yield start
    for served in started:
        served.close()
    for served in started:
        assert served.inference.stats().blocks_in_use == 0


@pytest.fixture
def served(serve_with: Serve) -> Served[ScriptedInference]:
    """One with the defaults."""
    return serve_with()


@pytest.fixture(scope="session")
def shared() -> Generator[Served[ScriptedInference], None, None]:
    """One for all tests that leave nothing behind."""
    served = Served(ScriptedInference())
    yield served
    served.close()
    assert served.inference.stats().blocks_in_use == 0
