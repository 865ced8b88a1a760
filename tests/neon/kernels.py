"""A plugin of pytest under qemu, where the tests' own conftest has too much to import: where compiled kernels are kept, and the home."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.backends import kernel_cache
from paceline.store.home import Home

kernel_cache.use(Home.from_environment().kernels)


@pytest.fixture(scope="session")
def paceline_home() -> Path:
    return Home.from_environment().root
