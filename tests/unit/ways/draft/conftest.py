"""A fleet of nodes that draft, once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.ways.draft.fleet import FleetRunner


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.ways.draft.client.LATE_S", 20.0)  # nobody here is late, whatever else the machine does
        runner = FleetRunner(tmp_path_factory.mktemp("fleet"))
        try:
            yield runner
        finally:
            runner.close()
