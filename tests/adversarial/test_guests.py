"""What guests, and members that lie about themselves, get of other machines' requests: nothing, by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adversarial.machines import LIE, NAME, TRUTH, Engine, Made, machines, offer
from tests.unit.node.fleet.nodes import in_loop, until
from tests.unit.node.weights.conftest import new_home, sharded  # noqa: F401

from paceline.core.errors import NodeUnreachable, NotTrusted, Overloaded, SourceLost
from paceline.core.trust import Trust
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.store.home import Home
from paceline.transport.channels import Purpose
from paceline.transport.weights_client import WeightsClient

Homes = Callable[[str], Home]
FAST = 1e9


@in_loop
async def test_20_a_guest_that_offers_the_same_digest_faster_gets_no_request(tmp_path: Path) -> None:
    desk = Made("desk", Engine(), (offer(100),), Trust.TRUSTED)
    visitor = Made("visitor", Engine(LIE), (offer(FAST),), Trust.GUEST)
    async with machines(tmp_path, desk, visitor, Made("nas")) as (desk_, visitor_, nas):
        assert await desk_.answer() == list(TRUTH)
        await until(lambda: bool(nas.inference.models()))
        assert await nas.answer() == list(TRUTH)
        assert visitor_.engine is not None
        assert (visitor_.engine.asked, visitor_.engine.described) == ([], 0)
        # Nor could a way that forgot to ask which nodes may: there is no channel.
        seen = nas.node.view().get(visitor_.node.node_id)
        assert seen is not None
        with pytest.raises(NotTrusted, match="visitor is a guest of the fleet, and answering requests takes a member or more"):
            nas.node.channel(visitor_.node.node_id, seen.card.addresses, Use.ANSWER)


@in_loop
async def test_20_a_model_that_only_a_guest_has_is_not_listed_unless_guests_may_answer(tmp_path: Path) -> None:
    visitor = Made("visitor", Engine(LIE), (offer(FAST),), Trust.GUEST)
    wide = Made("wide", policy=TrustPolicy(answer=Trust.GUEST))
    async with machines(tmp_path, visitor, Made("nas"), wide) as (visitor_, nas, wide_):
        await until(lambda: [model.name for model in wide_.inference.models()] == [NAME])
        assert await wide_.answer() == list(LIE)
        assert nas.inference.models() == ()
        with pytest.raises(NodeUnreachable, match="No machine of the fleet"):
            await nas.answer()
        assert visitor_.engine is not None
        assert len(visitor_.engine.asked) == 1


@in_loop
async def test_24_a_guest_pulls_private_weights_only_where_guests_may(tmp_path: Path, sharded: tuple[Home, str]) -> None:  # noqa: F811
    home, digest = sharded
    visitor, nas = Made("visitor", trust=Trust.GUEST), Made("nas")
    for policy, guests in ((TrustPolicy(), False), (TrustPolicy(taker=Trust.GUEST), True)):
        desk = Made("desk", policy=policy, home=home)
        async with machines(tmp_path, desk, visitor, nas) as (desk_, visitor_, nas_):
            for asks, may in ((visitor_, guests), (nas_, True)):
                channel = asks.node.pool.get(Purpose.WEIGHTS, desk_.node.addresses[0], desk_.node.identity.member)
                client = WeightsClient(channel, "desk")
                if may:
                    assert (await client.describe(digest, lambda done, total: None)).digest == digest
                    continue
                with pytest.raises(SourceLost, match="it gives this machine none, which it does not trust enough"):
                    await client.describe(digest, lambda done, total: None)


@in_loop
async def test_35_where_a_machine_s_queue_is_full_requests_go_to_the_next_one_and_to_no_guest(tmp_path: Path) -> None:
    full = Engine(refuse=lambda: Overloaded("The queue is full", retry_after_s=1))
    desk, nas = Made("desk", full, (offer(300),)), Made("nas", Engine(), (offer(100),))
    visitor = Made("visitor", Engine(LIE), (offer(FAST),), Trust.GUEST)
    async with machines(tmp_path, desk, nas, visitor) as (desk_, nas_, visitor_):
        assert await desk_.answer(1, 2) == list(TRUTH)
        assert nas_.saw(1, 2)
        assert visitor_.engine is not None
        assert visitor_.engine.asked == []
