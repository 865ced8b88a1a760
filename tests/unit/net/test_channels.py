"""What a node's channels leave behind."""

from __future__ import annotations

import gc
import socket

import grpc.aio
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop

from paceline.core.clock import SystemClock
from paceline.core.errors import NodeUnreachable
from paceline.net.channels import ChannelPool


def calls() -> list[object]:
    """All there are in this process. By its type, since `isinstance` asks each object for its class, and some warn of being asked."""
    return [each for each in gc.get_objects() if issubclass(type(each), grpc.aio.UnaryUnaryCall)]


@in_loop
async def test_whoever_keeps_an_error_keeps_no_call() -> None:
    # A call keeps its channel dialling though it is closed, and where it dials, somebody that says nothing is reported.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pool = ChannelPool(TestFleet().member("a"), lambda *_: False, SystemClock())
    before = len(calls())
    kept: Exception | None = None
    try:
        await pool.card_at(address, 20.0)
    except NodeUnreachable as error:
        kept = error
    assert kept is not None
    assert len(calls()) == before
