"""Which nodes are dropped from a view, and which are only reported, once they do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet
from tests.unit.fleet import cards
from tests.unit.net.member.nodes import Still, in_loop, make_node, running, until_seen

from paceline.core.ids import NodeId
from paceline.fleet.eligibility import Revocations
from paceline.fleet.registry import CardRegistry, Merged
from paceline.net.discovery import AddressBook
from paceline.net.member import presence
from paceline.net.member.gossip import CapabilityServicer, GossipDriver
from paceline.net.member.presence import AGAIN_S, Presence

SLOW = "lan,exchange_s=0.3,restamp_s=0.3,ttl_s=3600"
"""Cards that outlive the test."""
BEE = replace(Still().card(("10.0.0.2:1", "172.17.0.1:1"), ()), node_id=NodeId("bee"))


@pytest.mark.parametrize(
    ("answers", "refuses", "worked", "is_gone"),
    [
        ({"10.0.0.2:1"}, set(), {"10.0.0.2:1"}, False),
        ({"172.17.0.1:1"}, {"10.0.0.2:1"}, {"10.0.0.2:1"}, False),
        (set(), {"10.0.0.2:1"}, {"10.0.0.2:1"}, True),
        (set(), {"10.0.0.2:1", "172.17.0.1:1"}, {"10.0.0.2:1", "172.17.0.1:1"}, True),
        (set(), {"172.17.0.1:1"}, {"10.0.0.2:1"}, False),
        (set(), {"10.0.0.2:1"}, {"10.0.0.2:1", "172.17.0.1:1"}, False),
        (set(), {"10.0.0.2:1", "172.17.0.1:1"}, set(), False),
        (set(), set(), {"10.0.0.2:1"}, False),
    ],
    ids=[
        "answers",
        "answers elsewhere",
        "killed",
        "killed, both refuse",
        "silent, a bridge refuses",
        "silent at one",
        "never reached",
        "silent",
    ],
)
def test_a_node_is_dropped_where_every_address_that_ever_worked_refuses(
    monkeypatch: pytest.MonkeyPatch, answers: set[str], refuses: set[str], worked: set[str], is_gone: bool
) -> None:
    async def says(self: Presence, node_id: NodeId, address: str) -> bool:
        del self, node_id
        return address in answers

    async def refused(address: str) -> bool:
        return address in refuses

    monkeypatch.setattr(Presence, "_answers", says)
    monkeypatch.setattr(presence, "_refuses", refused)
    book, gone, unused = AddressBook(), list[NodeId](), Any
    for address in sorted(worked):
        book.worked(address, "n1")
        book.failed(address, "gossip found out before", 0.0)
    clock = FakeClock()
    looks = Presence(unused, unused, book, clock, gone.append)  # type: ignore[arg-type]
    asyncio.run(looks.look([BEE]))
    asyncio.run(looks.look([BEE]))
    assert gone == [BEE.node_id] * is_gone, "two looks within a second are one"
    clock.advance(AGAIN_S)
    asyncio.run(looks.look([BEE]))
    assert gone == [BEE.node_id] * 2 * is_gone


@in_loop
async def test_a_killed_node_leaves_at_once_and_a_stopped_one_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, go = set[GossipDriver](), asyncio.Event()

    def unless_stopped(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def waits(self: CapabilityServicer, request: Any, context: Any) -> Any:
            if self._gossip in stopped:
                await go.wait()
            return await method(self, request, context)

        return waits

    for name in ("MeasureLink", "ExchangeCapabilities"):
        monkeypatch.setattr(CapabilityServicer, name, unless_stopped(getattr(CapabilityServicer, name)))
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", preset=SLOW)
    async with running(a):
        b, c = (make_node(fleet, tmp_path, name, a, preset=SLOW) for name in "bc")
        async with running(b, c):
            await until_seen(a, "a", "b", "c")
            monkeypatch.setattr(presence, "AGAIN_S", 0.0)
            assert (await a.look()).view.ids == ("a", "b", "c")
            assert b._server is not None
            await b.gossip.close()
            await b._server._server.stop(0)  # its process is gone: no goodbye, and its port refuses
            stopped.add(c.gossip)
            seen = await a.look()
            assert seen.view.ids == ("a", "c")
            assert {failure.address for failure in seen.failures} >= set(c.addresses)
            stopped.clear()
            go.set()
            seen = await a.look()
            assert seen.view.ids == ("a", "c")
            assert not {failure.address for failure in seen.failures} & set(c.addresses)


@pytest.mark.parametrize(
    ("status", "answers"),
    [
        ("UNAVAILABLE", False),
        ("DEADLINE_EXCEEDED", False),
        ("RESOURCE_EXHAUSTED", True),
        ("PERMISSION_DENIED", True),
        ("UNAUTHENTICATED", True),
        ("UNIMPLEMENTED", True),
    ],
)
def test_a_refusal_is_an_answer(monkeypatch: pytest.MonkeyPatch, status: str, answers: bool) -> None:
    class Stub:
        def __init__(self, _: Any) -> None: ...

        async def MeasureLink(self, _: Any) -> None:
            raise AioRpcError(StatusCode[status], Metadata(), Metadata(), "told")

    monkeypatch.setattr(presence, "CapabilityServiceStub", Stub)
    book, pool, opener = AddressBook(), SimpleNamespace(get=lambda *_: None), SimpleNamespace(proven=lambda _: None)
    looks = Presence(pool, opener, book, FakeClock(), lambda _: None)  # type: ignore[arg-type]
    assert asyncio.run(looks._answers(BEE.node_id, "10.0.0.2:1")) is answers
    assert book.has_worked("10.0.0.2:1") is answers


def test_a_node_that_was_lost_comes_back_by_its_own_word_or_a_newer_card() -> None:
    own = CardRegistry(NodeId("own"), Revocations())

    def told(version: int, beat: int) -> Merged:
        return own.merge(cards.passed(cards.card("bee", version), beat=beat), 1.0)

    assert told(1, 1) is Merged.NEW
    own.end(NodeId("bee"), 1.0)
    assert [card.node_id for card in own.sweep(1.0)] == ["bee"]
    assert told(1, 2) is Merged.STALE, "others pass on what it said just before it ended"
    own.heard(NodeId("bee"))
    assert told(1, 2) is Merged.NEW
    own.end(NodeId("bee"), 1.0)
    own.sweep(1.0)
    assert told(2, 0) is Merged.NEW
