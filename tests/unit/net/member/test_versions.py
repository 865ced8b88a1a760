"""Nodes of two protocol versions are no members of each other's fleet, and each names the other and what to do."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop, make_node, running, until, until_seen

from paceline.core.clock import SystemClock
from paceline.core.errors import OtherProtocol
from paceline.core.ids import NodeId
from paceline.fleet.messages import ExchangeRequest
from paceline.net.channels import Purpose
from paceline.net.exchange_codec import write_request
from paceline.net.member.node import FleetNode
from paceline.net.member.reach import Barrier, reach
from paceline.net.member.state import look
from paceline.net.protocol import PROTOCOL_VERSION, OtherVersions
from paceline.net.rpc_faults import error_of
from paceline.net.trust.folder import FleetFolder
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub

OLDER, NEWER = PROTOCOL_VERSION, PROTOCOL_VERSION + 1


def todos(node: FleetNode) -> dict[str, str]:
    """What a node's status says to do, by the node of another version."""
    return {other.node_id: other.todo for other in node.sight().other_versions}


@in_loop
async def test_nodes_of_two_versions_name_each_other_and_meet_once_they_are_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", protocol=OLDER)
    async with running(a):
        c = make_node(fleet, tmp_path, "c", a, protocol=OLDER)
        b = make_node(fleet, tmp_path, "b", a, c, protocol=NEWER)
        async with running(c, b):
            await until(lambda: "b" in todos(a) and "a" in todos(b))
            await until_seen(c, "a", "c")
            await until_seen(a, "a", "c")
            assert todos(a)["b"] == "Update Paceline on this machine"
            assert todos(b)["a"] == "Update Paceline on a"
            assert b.view().ids == ("b",)
            (shown,) = (await look(FleetFolder(tmp_path / "a" / "fleet"))).sight.other_versions
            assert (shown.node_id, shown.protocol, shown.own_protocol) == ("b", NEWER, OLDER)
            assert len([line for line in caplog.records if "b speaks protocol version" in line.message and line.levelname == "ERROR"]) <= 2
            stub = CapabilityServiceStub(b.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ExchangeCapabilities(write_request(ExchangeRequest(), NEWER))
            error = error_of(refused.value, "a")
            assert isinstance(error, OtherProtocol)
            assert error.spoken == OLDER
        updated = make_node(fleet, tmp_path, "b", a, protocol=OLDER)
        async with running(updated):
            await until_seen(a, "a", "b")
            assert todos(a) == {}


@in_loop
async def test_a_member_that_comes_back_with_another_version_leaves_the_views_at_once(tmp_path: Path) -> None:
    fleet = TestFleet()
    patient = "desk,ttl_s=600,exchange_s=0.2,restamp_s=0.2,rpc_timeout_s=2"
    a = make_node(fleet, tmp_path, "a", preset=patient)
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a, preset=patient)
        async with running(b):
            await until_seen(a, "a", "b")
        again = make_node(fleet, tmp_path, "b", a, preset=patient, protocol=NEWER)
        async with running(again):
            await until(lambda: "b" in todos(a))
            assert a.view().ids == ("a",)


@in_loop
async def test_doctor_finds_out_that_a_node_speaks_another_version(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a", protocol=NEWER)
    async with running(a):
        found = await reach(a.addresses[0], fleet.member("b"), SystemClock())
    assert found.barrier is Barrier.VERSION
    assert f"a speaks protocol version {NEWER}" in found.why
    assert "Update Paceline on this machine" in found.why


class Clock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_node_is_named_for_a_while_and_not_once_it_is_alike() -> None:
    clock, lost = Clock(), list[NodeId]()
    versions = OtherVersions(3, clock, lost.append)
    for node_id, spoken in (("new", 4), ("old", 2), ("none", 0)):
        with pytest.raises(OtherProtocol):
            versions.check(NodeId(node_id), spoken)
    versions.check(NodeId("alike"), 3)
    assert lost == ["new", "old", "none"]
    assert {one.node_id: one.todo.rpartition(" on ")[2] for one in versions.known} == {"new": "this machine", "none": "none", "old": "old"}
    versions.check(NodeId("old"), 3)
    assert [one.node_id for one in versions.known] == ["new", "none"]
    clock.now = 601.0
    assert versions.known == ()
    for number in range(1000):
        with pytest.raises(OtherProtocol):
            versions.check(NodeId(f"n{number}"), 9)
    assert len(versions.known) == 256
