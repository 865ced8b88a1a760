"""mDNS on this machine's loopback: members find one another by it alone, and leave the nodes of another fleet in peace."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop, make_node, running, until, until_seen


@in_loop
async def test_members_find_one_another_and_nobody_else(tmp_path: Path) -> None:
    ours, theirs = TestFleet(), TestFleet()
    one, two = (make_node(ours, tmp_path, name, mdns=True) for name in ("one", "two"))
    other = make_node(theirs, tmp_path, "other", mdns=True)
    async with running(one, other, two):
        await asyncio.gather(until_seen(one, "one", "two"), until_seen(two, "one", "two"))
        # Had they been told of the other fleet's node, which started between them, they would have called it by now.
        rounds = {node: node.meter.rounds + 3 for node in (one, two)}
        await until(lambda: all(node.meter.rounds >= enough for node, enough in rounds.items()))
        assert other.view().ids == ("other",)
        assert other.meter.rounds == 0
        assert one.book.failures == two.book.failures == ()
