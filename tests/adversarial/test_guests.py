"""What guests, and members that lie about themselves, get of other machines' requests: nothing, by default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.adversarial.machines import LIE, LONG, NAME, TRUTH, Engine, Made, machines, offer
from tests.unit.machine.weights.conftest import new_home, sharded  # noqa: F401
from tests.unit.net.member.nodes import in_loop, until

from paceline.core.errors import NodeUnreachable, NotTrusted, Overloaded, SourceLost
from paceline.core.generation import FinishReason, GenerationRequest
from paceline.core.ids import Trust
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.net.channels import Purpose
from paceline.net.weights_client import WeightsClient
from paceline.server.intake import find_model, listed_models
from paceline.store.home import Home

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
        with pytest.raises(NotTrusted, match="visitor is a guest of the fleet, and answering requests takes a member or more"):
            nas.node.channel(visitor_.node.node_id, visitor_.node.addresses, Use.ANSWER)


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


@in_loop
async def test_21_a_member_that_claims_a_hundred_times_its_speed_gets_no_request_of_a_machine_that_has_the_model(tmp_path: Path) -> None:
    desk, boaster = Made("desk", Engine(LONG), (offer(1e8),)), Made("boaster", Engine(LONG), (offer(1e10),))
    async with machines(tmp_path, desk, boaster) as (desk_, boaster_):
        assert boaster_.engine is not None
        assert desk_.first == "desk"
        await until(lambda: bool(boaster_.engine.asked))  # type: ignore[union-attr]
        await until(lambda: any(record.decode for record in desk_.inference._proofs._records.values()))
        assert await desk_.answer() == list(LONG)
        assert desk_.first == "desk"
        assert not boaster_.saw(4, 7, 1, 1)  # what it was asked was no client's prompt


@in_loop
async def test_21_a_request_leaves_for_a_faster_machine_once_that_has_proved_it(tmp_path: Path) -> None:
    desk, fast = Made("desk", Engine(LONG), (offer(1),)), Made("fast", Engine(LONG), (offer(50),))
    async with machines(tmp_path, desk, fast) as (desk_, fast_):
        await until(lambda: desk_.first == "fast")
        assert await desk_.answer() == list(LONG)
        assert fast_.saw(4, 7, 1, 1)


@in_loop
async def test_21_where_no_model_is_a_claim_counts_until_its_speed_was_seen(tmp_path: Path) -> None:
    boaster, honest = Made("boaster", Engine(LONG), (offer(1e10),)), Made("honest", Engine(LONG), (offer(1e8),))
    async with machines(tmp_path, boaster, honest, Made("nas")) as (_, honest_, nas):
        await until(lambda: bool(nas.inference.models()) and nas.first == "boaster")
        assert await nas.answer(1, 2) == list(LONG)
        await until(lambda: nas.first == "honest")
        assert await nas.answer(3, 4) == list(LONG)
        assert honest_.saw(3, 4)


@in_loop
async def test_41_a_whole_answer_that_lies_is_found_before_any_client_s_where_it_lies_always(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk, liar = Made("desk", Engine(LONG), (offer(1),)), Made("liar", Engine(LONG[::-1]), (offer(50),))
    async with machines(tmp_path, desk, liar) as (desk_, liar_):
        await until(lambda: "liar gave other tokens for a request than this machine computes" in caplog.text)
        assert await desk_.answer() == list(LONG)
        assert not liar_.saw(4, 7, 1, 1)


@in_loop
async def test_41_a_whole_answer_that_lies_now_and_then_is_found_by_computing_some_again(tmp_path: Path) -> None:
    def lies_to_clients(request: GenerationRequest) -> Sequence[int]:
        return LONG if request.ignore_eos else LIE

    desk = Made("desk", Engine(LONG), (offer(1),), draw=lambda: 0.0)
    async with machines(tmp_path, desk, Made("liar", Engine(lies_to_clients), (offer(50),))) as (desk_, _):
        await until(lambda: desk_.first == "liar")
        assert await desk_.answer() == list(LIE)
        await until(lambda: desk_.first == "desk")
        assert await desk_.answer() == list(LONG)


@in_loop
async def test_41_of_two_that_are_proved_at_once_each_answer_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    liars = [Made(name, Engine(LONG[::-1]), (offer(50),)) for name in ("liar", "other")]
    desk = Engine(LONG, begins=asyncio.Barrier(2).wait)
    async with machines(tmp_path, Made("desk", desk, (offer(1),)), *liars):
        for name in ("liar", "other"):
            await until(lambda name=name: f"{name} gave other tokens for a request than this machine computes" in caplog.text)


@in_loop
async def test_41_an_answer_that_ends_where_a_smaller_context_does_is_no_lie(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def of_context(most: int) -> Callable[[GenerationRequest], Sequence[int]]:
        return lambda request: LONG[: 16 if request.ignore_eos else most]

    desk = Engine(of_context(40), ends=FinishReason.LENGTH)
    small = Made("small", Engine(of_context(20), ends=FinishReason.LENGTH), (offer(50),))
    async with machines(tmp_path, Made("desk", desk, (offer(1),), draw=lambda: 0.0), small) as (desk_, _):
        await until(lambda: desk_.first == "small")
        assert await desk_.answer(5, 6) == list(LONG[:20])
        await until(lambda: desk_.saw(5, 6) and not desk.live)
        assert await desk_.answer(7, 8) == list(LONG[:20])
        assert "gave other tokens" not in caplog.text


@in_loop
async def test_a_member_that_offers_a_model_by_a_served_name_of_another_machine_gets_none_of_its_requests(tmp_path: Path) -> None:
    alias, longer = "gpt-4o", NAME.upper()
    desk = Made("desk", Engine(), (offer(100),))
    laptop = Made(
        "laptop",
        Engine(LIE, digest="e" * 64),
        (offer(FAST, model_id=alias, digest="e" * 64), offer(FAST, model_id=longer, digest="e" * 64)),
    )
    async with machines(tmp_path, desk, laptop) as (desk_, _):
        await until(lambda: {model.name for model in desk_.inference.models()} == {NAME, alias, longer})
        assert find_model(alias, desk_.inference, (alias,)).name == NAME
        assert [model.name for model in listed_models(desk_.inference, (alias,))] == [NAME, longer, alias]
        assert listed_models(desk_.inference, (alias,))[-1].fingerprint == find_model(NAME, desk_.inference, ()).fingerprint
        # Without regard to case, nobody takes this machine's name from it either.
        assert find_model(f"{NAME}:latest", desk_.inference, ()).name == NAME
