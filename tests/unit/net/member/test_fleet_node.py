"""Nodes find, lose and refuse one another: gossip over real mTLS."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import QUICK, in_loop, make_node, running, until, until_seen

from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, FleetError, MembershipError, NodeUnreachable, PeerFloods
from paceline.core.ids import NodeId, Trust
from paceline.core.stats import DraftUse
from paceline.fleet.card import ModelOffer, Role
from paceline.fleet.links import LinkTimes
from paceline.fleet.messages import ExchangeRequest, GossipCall
from paceline.fleet.presets import parse_preset
from paceline.net.channels import Purpose
from paceline.net.exchange import Exchanger
from paceline.net.member.gossip import CapabilityServicer
from paceline.net.member.state import Claim, control_channel, look, read_running, read_sight, read_version
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.rpc_faults import error_of
from paceline.net.trust.folder import FleetFolder
from paceline.net.wire import control_pb2
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.control_pb2_grpc import ControlServiceStub
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub
from paceline.store.home import Home

DRAFTS = ModelOffer("small", Role.PROPOSER, "int4", digest="e", vocabulary="v")
MODEL = ModelOffer("m", Role.VERIFIER, "int4", digest="d", warm=True, vocabulary="v")


@in_loop
async def test_three_nodes_in_a_row_see_one_another(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        async with running(b):
            c = make_node(fleet, tmp_path, "c", b)
            async with running(c):
                for node in (a, b, c):
                    await until_seen(node, "a", "b", "c")
                assert a.view().cards == b.view().cards == c.view().cards
                # Who was met is called again after a restart, without being named.
                await until(lambda: set(FleetFolder(tmp_path / "a" / "fleet").peers()) == {*b.addresses, *c.addresses})
            # A goodbye is heard at once, long before the card would expire.
            await until_seen(a, "a", "b")
            await until_seen(b, "a", "b")
    assert read_running(FleetFolder(tmp_path / "a" / "fleet")) is None


@in_loop
async def test_both_nodes_with_a_copied_home_say_that_the_id_runs_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        shutil.copytree(tmp_path / "b", tmp_path / "other machine" / "b")
        copy = make_node(fleet, tmp_path / "other machine", "b", a)
        async with running(b, copy):
            for node in (b, copy):
                await until(lambda node=node: bool(node.sight().view.clashes))
                (clash,) = node.sight().view.clashes
                assert clash.addresses == node.addresses
            assert {clash.other_addresses for node in (b, copy) for clash in node.sight().view.clashes} == {b.addresses, copy.addresses}
            assert not a.sight().view.clashes
    assert [line.levelname for line in caplog.records if "b runs elsewhere too" in line.message] == ["ERROR", "ERROR"]


@in_loop
async def test_everybody_sees_how_far_each_is_trusted(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", trust=Trust.TRUSTED)
    b = make_node(fleet, tmp_path, "b")
    async with running(a, b):
        c = make_node(fleet, tmp_path, "c", a, b, trust=Trust.GUEST)
        async with running(c):
            for node in (a, b, c):
                await until_seen(node, "a", "b", "c")
                assert node.view().trust == {"a": Trust.TRUSTED, "b": Trust.MEMBER, "c": Trust.GUEST}
            async with control_channel(b.identity, b.addresses[0]) as channel:
                assert (await read_sight(channel, 5)).view.trust == b.view().trust


@in_loop
async def test_nodes_meet_over_ipv6_too(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", host="::1")
    async with running(a):
        assert a.addresses[0].startswith("[::1]:")
        b = make_node(fleet, tmp_path, "b", a, host="::1")
        async with running(b):
            await until_seen(a, "a", "b")
            await until_seen(b, "a", "b")


@in_loop
async def test_an_address_that_leads_nowhere_does_not_keep_nodes_apart(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        async with running(b):
            refused: list[FleetError] = []
            call = GossipCall(0, ("127.0.0.1:1", *a.addresses), None, ExchangeRequest(), 2.0)
            bounds = parse_preset(QUICK).bounds
            exchanger = Exchanger(b.node_id, b.pool, b.gossip.opener, b.book, bounds, SystemClock())
            answer = await exchanger.call(call, refused.append)
            assert not refused
            assert answer.peer == "a"
            assert b.book.is_failing("127.0.0.1:1")


@in_loop
async def test_a_peer_that_leaves_in_an_exchange_has_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, asked, exchange = asyncio.Event(), asyncio.Event(), CapabilityServicer.ExchangeCapabilities

    async def answer(self: CapabilityServicer, request: Any, context: Any) -> Any:
        if silent.is_set():
            asked.set()
            await asyncio.Event().wait()
        return await exchange(self, request, context)

    monkeypatch.setattr(CapabilityServicer, "ExchangeCapabilities", answer)
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        async with running(b):
            await until_seen(b, "a", "b")
            silent.set()
            exchanger = Exchanger(b.node_id, b.pool, b.gossip.opener, b.book, parse_preset(QUICK).bounds, SystemClock())
            call = asyncio.create_task(exchanger.call(GossipCall(0, a.addresses, NodeId("a"), ExchangeRequest(), 20.0), lambda _: None))
            await asked.wait()
            b.pool.drop(NodeId("a"))
            with pytest.raises(NodeUnreachable, match=r"a at .* is gone"):
                await call


@in_loop
async def test_a_restarted_node_supersedes_itself_and_finds_its_peers(tmp_path: Path) -> None:
    fleet = TestFleet()
    a, b = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "b")
    async with running(a):
        first = make_node(fleet, tmp_path, "b", a)
        async with running(first):
            await until_seen(a, "a", "b")
            before = a.view().get(first.node_id)
            await until(lambda: bool(FleetFolder(tmp_path / "b" / "fleet").peers()))
        b = make_node(fleet, tmp_path, "b")  # told of nobody: it remembers
        async with running(b):
            await until_seen(a, "a", "b")
            after = a.view().get(b.node_id)
            assert before is not None
            assert after is not None
            assert after.card.version > before.card.version
            assert after.card.instance != before.card.instance
            assert read_version(FleetFolder(tmp_path / "b" / "fleet")) >= after.card.version


@in_loop
async def test_a_revoked_node_is_dropped_and_refused_and_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        c = make_node(fleet, tmp_path, "c", a)
        async with running(b, c):
            for node in (a, b, c):
                await until_seen(node, "a", "b", "c")
            a.gossip.learn((fleet.revoke("c"),))
            await until_seen(a, "a", "b")
            await until_seen(b, "a", "b")
            assert b.view().revoked == ("c",)
            await until(lambda: "refused c" in caplog.text)
            # It is told, by the CA's own word, and knows it from then on.
            await until(lambda: "this machine (c) was revoked" in caplog.text)
            with pytest.raises(MembershipError, match=r"^c is not a member any more: .* refuses this node: c was revoked"):
                await look(FleetFolder(Home(tmp_path / "c").fleet))
            await until(lambda: bool(FleetFolder(tmp_path / "c" / "fleet").sealed_revocations()))
            await until(lambda: bool(FleetFolder(tmp_path / "b" / "fleet").sealed_revocations()))
    again = make_node(fleet, tmp_path, "b")
    assert again.gossip.voids(c.node_id, c.identity.member.issued_at)
    with pytest.raises(MembershipError, match="revoked"):
        make_node(fleet, tmp_path, "c")


@in_loop
async def test_an_address_that_was_given_and_does_not_answer_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet()
    b = make_node(fleet, tmp_path, "b", given=("127.0.0.1:1",))
    async with running(b):
        await until(lambda: b.meter.failed > 1)
    assert caplog.text.count("no member answers at 127.0.0.1:1, ") == 1


@in_loop
async def test_two_fleets_on_one_network_do_not_mix(tmp_path: Path) -> None:
    a = make_node(TestFleet(), tmp_path, "a")
    async with running(a):
        stranger = make_node(TestFleet(), tmp_path, "stranger", a)
        async with running(stranger):
            await until(lambda: stranger.meter.failed > 2)
            assert stranger.view().ids == ("stranger",)
            assert a.view().ids == ("a",)
            (failure,) = stranger.sight().failures
            assert failure.address == a.addresses[0]


@in_loop
async def test_the_view_is_told_to_the_own_machine_only(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        drafts = (DraftUse("fleet", 4, 16, 4, "b", "small", 9, 0.0125, 2, "slow"),)
        a.show_drafts(lambda: drafts)
        async with control_channel(a.identity, a.addresses[0]) as channel:
            sight = await read_sight(channel, 5)
            assert (sight.view.ids, sight.drafts) == (("a",), drafts)
        b = make_node(fleet, tmp_path, "b")
        # Another member meets another certificate than its own there, so it can't even ask by mistake.
        async with control_channel(b.identity, a.addresses[0]) as channel:
            with pytest.raises(NodeUnreachable):
                await read_sight(channel, 5)
        channel = b.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ControlServiceStub(channel).GetFleetView(control_pb2.GetFleetViewRequest())
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await b.pool.close()


@in_loop
async def test_a_peer_that_floods_or_sends_too_much_gets_a_typed_error(tmp_path: Path) -> None:
    fleet = TestFleet()
    a, b = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "b")
    async with running(a):
        stub = CapabilityServiceStub(b.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member))
        oversized = wire.ExchangeCapabilitiesRequest(
            protocol=PROTOCOL_VERSION, cards=[wire.PassedCard(card=wire.SignedCard(card=bytes(100_000)))]
        )
        million = wire.ExchangeCapabilitiesRequest(protocol=PROTOCOL_VERSION, digests=wire.CardDigests(node_keys=range(1_000_000)))
        uneven = wire.ExchangeCapabilitiesRequest(
            protocol=PROTOCOL_VERSION, digests=wire.CardDigests(node_keys=[1], versions=[1, 2], beats=[0])
        )
        kinds: list[str] = []
        for request in (oversized, million, uneven):
            try:
                await stub.ExchangeCapabilities(request)
            except grpc.aio.AioRpcError as error:
                kinds.append(type(error_of(error, "a")).__name__)
        assert kinds[0] == "MessageTooLarge"
        assert kinds[1] in {"MessageTooLarge", "FleetError"}  # gRPC itself bounds what it reads
        assert kinds[2] == "MalformedMessage"
        forged = wire.PassedCard(card=wire.SignedCard(card=b"\x0a\x01x\x60\x01", signature=b"no"))
        await stub.ExchangeCapabilities(
            wire.ExchangeCapabilitiesRequest(protocol=PROTOCOL_VERSION, cards=[forged])
        )  # left out, and told in the log
        assert a.view().ids == ("a",)
        assert a.meter.refused > 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # noqa: PT012 - which of them is refused is the clock's affair
            for _ in range(1000):
                await stub.ExchangeCapabilities(wire.ExchangeCapabilitiesRequest(protocol=PROTOCOL_VERSION))
        assert isinstance(error_of(refused.value, "a"), PeerFloods)
        await b.pool.close()


@in_loop
async def test_a_taken_port_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        port = a.addresses[0].rpartition(":")[2]
        b = make_node(fleet, tmp_path, "b")
        b._settings = type(b._settings)(int(port), "127.0.0.1", mdns=False)
        with pytest.raises(ConfigError, match=port):
            await b.start()
        with pytest.raises(ConfigError, match=port):
            Claim(FleetFolder(tmp_path / "b" / "fleet"), b._settings)
        await b.stop()
    assert not [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("fleet")]


@in_loop
async def test_one_identity_runs_once(tmp_path: Path) -> None:
    fleet = TestFleet()
    a, again = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "a")
    async with running(a):
        with pytest.raises(MembershipError, match="runs already"):
            await again.start()
        with pytest.raises(MembershipError, match="runs already"):
            Claim(FleetFolder(tmp_path / "a" / "fleet"), a._settings)
        await again.stop()
        assert read_running(FleetFolder(tmp_path / "a" / "fleet")) is not None
    async with running(again):
        assert again.view().ids == ("a",)


@in_loop
async def test_links_between_nodes_that_may_share_a_plan_are_measured_and_told(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", offers=(DRAFTS, MODEL))
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a, offers=(DRAFTS,))
        async with running(b):
            await until(lambda: [[link.to for link in card.links] for card in b.view().cards] == [["b"], ["a"]])
            (link,) = b.view().cards[0].links
            assert link.address == b.addresses[0]
            assert link.rtt_s > 0
            assert link.bytes_per_s > 0


@in_loop
async def test_a_peer_that_leaves_while_it_is_measured_ends_no_more_than_that_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, asked, measure = asyncio.Event(), set[str](), CapabilityServicer.MeasureLink

    async def late(self: CapabilityServicer, request: wire.MeasureLinkRequest, context: Any) -> wire.MeasureLinkResponse:
        asked.add(self._guard.peer(context).node_id)
        await go.wait()
        return await measure(self, request, context)

    monkeypatch.setattr(CapabilityServicer, "MeasureLink", late)
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", offers=(DRAFTS, MODEL))
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a, offers=(DRAFTS,))
        for node in (a, b):
            node._links._watch._times = replace(LinkTimes(), retry_s=0.1)
        async with running(b):
            await until(lambda: asked == {"a", "b"})
            a.pool.drop(NodeId("b"))  # as when its card says that it left
            b.pool.drop(NodeId("a"))
            go.set()
            await until(lambda: [[link.to for link in card.links] for card in b.view().cards] == [["b"], ["a"]])


@in_loop
async def test_a_node_that_left_leaves_nothing_behind(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        async with running(b):
            await until_seen(a, "a", "b")
            (address,) = b.addresses
            a.book.failed(address, "gone for a moment", 0.0)
            assert [failure.address for failure in a.sight().failures] == [address]
        await until_seen(a, "a")
        assert a.sight().failures == ()
        await until(lambda: len(a.pool) == 0)  # an exchange that was under way ends first


@in_loop
async def test_a_connection_that_is_lost_is_not_said_to_be_slow(tmp_path: Path) -> None:
    fleet = TestFleet()
    a, b = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "b")
    async with running(b):
        exchanger = Exchanger(a.node_id, a.pool, a.gossip.opener, a.book, parse_preset(QUICK).bounds, SystemClock())
        call = GossipCall(0, b.addresses, None, ExchangeRequest(), 1.0)
        assert (await exchanger.call(call, lambda _: None)).peer == "b"
        assert b._server is not None
        await b._server.stop(0.0)  # as SIGKILL leaves the others: with no goodbye
        with pytest.raises(NodeUnreachable, match=r"b at .* can't be reached \(no connection to it comes about\)"):
            await exchanger.call(call, lambda _: None)
        await a.pool.close()


@in_loop
async def test_a_card_on_loopback_leads_to_no_port_of_a_machine_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        async with running(b):
            await until_seen(a, "a", "b")
            assert a.tensor_addresses_of(NodeId("b"), 22) == ("127.0.0.1:22",)
            monkeypatch.setattr(type(a), "addresses", ("10.9.9.9:7",))
            assert a.tensor_addresses_of(NodeId("b"), 22) == ()
            assert a.tensor_addresses_of(NodeId("a"), 22) == (f"10.9.9.9:{a.tensors.port}",)
