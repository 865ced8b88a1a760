"""Strangers at a node's port in numbers: they take a bounded share of this process, and members get through when they are gone."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.fleets import TestFleet
from tests.fleet.open_files import open_files
from tests.unit.net.member.nodes import in_loop, make_node, running, until, until_seen

from paceline.net import server

MOST = 16


@in_loop
async def test_connections_are_bounded_and_members_come_through_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [option for option in server.SERVER_OPTIONS if option[0] != "grpc.max_allowed_incoming_connections"]
    bounded = partial(server.NodeServer, options=[*options, ("grpc.max_allowed_incoming_connections", MOST)])
    monkeypatch.setattr("paceline.net.member.node.NodeServer", bounded)
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        host, _, port = a.addresses[0].rpartition(":")
        with ExitStack() as strangers:
            for _ in range(4 * MOST):
                strangers.enter_context(socket.create_connection((host, int(port))))
            await until(lambda: 0 < open_files(os.getpid()).connected_to(int(port)) <= MOST)
        b = make_node(fleet, tmp_path, "b", a)
        async with running(b):
            await until_seen(a, "a", "b")
            await until_seen(b, "a", "b")


def test_a_node_bounds_its_connections() -> None:
    assert ("grpc.max_allowed_incoming_connections", server.MAX_CONNECTIONS) in server.SERVER_OPTIONS
