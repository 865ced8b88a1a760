from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.unit.net.tensor.meeting import Meeting, meeting

from paceline.testing.fleets import TestFleet


@pytest.fixture
def met() -> Generator[Meeting]:
    with meeting(TestFleet()) as one:
        yield one
