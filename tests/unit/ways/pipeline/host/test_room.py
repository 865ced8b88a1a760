"""How many KV blocks a shard gets."""

from __future__ import annotations

import pytest
from tests.unit.ways.pipeline.host.hosts import wanted

from paceline.core.errors import ShardUnavailable
from paceline.ways.pipeline.host.warm import blocks_for


def test_a_pool_fits_though_its_memory_comes_in_groups_of_blocks() -> None:
    request = wanted(n_blocks=40, least_blocks=20)
    assert blocks_for(request, 4, left_bytes=100 + 39 * 10, fixed=100, a_block=10, group=16) == 32
    with pytest.raises(ShardUnavailable, match="may be taken here"):
        blocks_for(request, 4, left_bytes=100 + 31 * 10, fixed=100, a_block=10, group=16)
