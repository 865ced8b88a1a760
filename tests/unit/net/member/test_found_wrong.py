"""A node whose work came out otherwise when it was computed again is left out of all that it computes, by every way of sharing work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop, make_node, running, until_seen

from paceline.core.ids import NodeId
from paceline.fleet.eligibility import COMPUTES, Use
from paceline.fleet.messages import Effect
from paceline.net.member import node as member
from paceline.ways.pipeline.routes.fleet_access import NodeFleetAccess

BEE = NodeId("b")


@in_loop
async def test_a_node_found_wrong_is_left_out_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WRONG_S", 0.2)
    fleet, heard = TestFleet(), list[Effect]()
    a = make_node(fleet, tmp_path, "a")
    async with running(a), running(make_node(fleet, tmp_path, "b", a)):
        await until_seen(a, "a", "b")
        access = NodeFleetAccess(a, 3600.0)
        a.listen(heard.append)
        a.found_wrong(BEE, "b computes other bytes")
        assert [effect.card.node_id for effect in heard if hasattr(effect, "card")] == [BEE]
        for use in Use:
            assert ("b" in {card.node_id for card in a.eligible(use).cards}) == (use not in COMPUTES), use
        assert [card.node_id for card in access.cards()] == ["a"]
        assert list(access.trust()) == ["a"]
        async with asyncio.timeout(60.0):
            while a.wrong:  # noqa: ASYNC110 - its time passes, there is no event
                await asyncio.sleep(0.05)
        assert [card.node_id for card in access.cards()] == ["a", "b"]
        assert all({card.node_id for card in a.eligible(use).cards} == {"a", "b"} for use in COMPUTES)
