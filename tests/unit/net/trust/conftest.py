from __future__ import annotations

import pytest
from tests.fakes.fleets import TestFleet


@pytest.fixture
def fleet() -> TestFleet:
    return TestFleet()
