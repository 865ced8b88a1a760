"""mDNS on a network of its own: members find one another by it alone, and leave the nodes of another fleet in peace."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fleet.machines import machines, until
from tests.fleet.network import network, why_not

from paceline.store.home import Home
from paceline.transport.trust.folder import FleetFolder

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "there are network namespaces")


def test_members_find_one_another_and_nobody_else(tmp_path: Path) -> None:
    names = ("m1", "m2", "other")
    with network(*names) as net, machines(tmp_path, Home.from_environment().kernels, *names, options=("--no-model",)) as made:
        for machine in made:
            machine.prefix = net.inside(machine.name)
        one, two, other = made
        token = one.init("--address", net.address("m1"))
        one.up()
        two.run("join", token, "--name", "m2")
        other.init()
        FleetFolder(two.home / "fleet").peers_file.unlink()
        other.up()
        two.up()
        # Neither was told of the other: what they remember of peers they learned by mDNS.
        until(lambda: FleetFolder(one.home / "fleet").peers() == [two.node.address])
        until(lambda: FleetFolder(two.home / "fleet").peers() == [one.node.address])
        assert one.node.address.startswith(net.address("m1"))
        seen = other.status()
        assert [node["node_id"] for node in seen["nodes"]] == ["other"]
        assert seen["failing_peers"] == []
        assert [node["node_id"] for node in one.status()["nodes"]] == ["m1", "m2"]
