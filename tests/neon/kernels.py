"""A plugin of pytest under qemu, where the tests' own conftest has too much to import: where compiled kernels are kept."""

from __future__ import annotations

from paceline.backends import kernel_cache
from paceline.store.home import Home

kernel_cache.use(Home.from_environment().kernels)
