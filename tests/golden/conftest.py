"""Backends under golden tests, and torch's threads put back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.store.home import Home


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """transformers' small products are faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_cache(paceline_home: Path) -> Path:
    return Home.from_environment().kernels
