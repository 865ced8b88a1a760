"""Compiled functions are kept between runs, as in the product; this comes before their modules are imported."""

from __future__ import annotations

from paceline.backends import kernel_cache
from paceline.store.home import Home

kernel_cache.use(Home.from_environment().kernels)
