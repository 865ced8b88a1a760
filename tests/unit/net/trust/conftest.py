from __future__ import annotations

import pytest

from paceline.testing.fleets import TestFleet


@pytest.fixture
def fleet() -> TestFleet:
    return TestFleet()
