from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.tensor.meeting import Meeting, meeting


@pytest.fixture
def met() -> Generator[Meeting]:
    with meeting(TestFleet()) as one:
        yield one
