"""How many KV blocks a shard gets."""

from __future__ import annotations

import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import Net, hosting, wanted

from paceline.core.errors import ShardUnavailable
from paceline.ways.pipeline.host.session import HostLimits
from paceline.ways.pipeline.host.warm import SHARDS_FREE_SHARE, blocks_for


def test_a_pool_fits_though_its_memory_comes_in_groups_of_blocks() -> None:
    request = wanted(n_blocks=40, least_blocks=20)
    assert blocks_for(request, 4, left_bytes=100 + 39 * 10, fixed=100, a_block=10, group=16) == 32
    with pytest.raises(ShardUnavailable, match="may be taken here"):
        blocks_for(request, 4, left_bytes=100 + 31 * 10, fixed=100, a_block=10, group=16)


@pytest.mark.parametrize("bound", [None, 1 << 29])
@in_loop
async def test_memory_that_layers_are_to_take_is_nobody_else_s_while_they_load(bound: int | None) -> None:
    """The system calls it free, and a tensor rank that is asked for meanwhile would be given it."""
    async with hosting(Net(), "a", limits=HostLimits(memory_bytes=bound), free_bytes=lambda: 1 << 30) as a:
        (device,) = a.devices
        before = a.warm.left_bytes(device)
        a.loads.gate.clear()
        shard = a.warm.prepare(wanted(0, 6, n_blocks=4000))
        await until(lambda: len(a.loads.asked) == 1)
        left = a.warm.left_bytes(device)
        a.loads.gate.set()
        await until(lambda: shard.loaded is not None)
        share = SHARDS_FREE_SHARE if bound is None else 1.0
        assert before - left == pytest.approx(share * shard.memory_bytes, rel=0.01)
        assert shard.memory_bytes > 1 << 20
