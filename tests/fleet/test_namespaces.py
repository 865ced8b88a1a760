"""Five nodes on a network of their own: they join and converge; power cuts, latency, loss, a partition and its healing.

At every moment of all this: no view shows a card past its TTL.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.machines import Machine, machines, until
from tests.fleet.network import Network, network, why_not

from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "there are network namespaces")

NAMES = ("n1", "n2", "n3", "n4", "n5")
BY_MDNS = ("n4", "n5")
"""The others don't look for anybody."""
TTL_S = 6
PRESET = f"desk,ttl_s={TTL_S},exchange_s=1,restamp_s=1,rpc_timeout_s=3"
ON_ITS_WAY_S = 1.5
"""Ages do not count the time that cards are on the wire, nor the watcher's own."""

View = dict[str, tuple[int, float, int]]


@dataclass(slots=True)
class Watcher:
    """Everything that was seen, by everybody, from the start."""

    process: subprocess.Popen[str]
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.samples.append(json.loads(line))

    def views(self, at: int = -1) -> dict[str, View | None]:
        """As of the last sample, or of another."""
        if not self.samples:
            return dict.fromkeys(NAMES)
        return {name: None if said is None else said["seen"] for name, said in self.samples[at]["views"].items()}

    def rounds(self, at: int) -> dict[str, int]:
        """Up to this sample."""
        return {name: said["rounds"] for name, said in self.samples[at]["views"].items() if said is not None}

    def sees(self, expected: dict[str, set[str]], at: int = -1) -> bool:
        """Whether these nodes see exactly these."""
        views = self.views(at)
        return all((view := views[name]) is not None and set(view) == seen for name, seen in expected.items())

    def agree(self, *names: str, at: int = -1) -> bool:
        """Whether these nodes see one another, and nobody else, with the very same cards."""
        if not self.sees({name: set(names) for name in names}, at):
            return False
        cards = [{node: card[0] for node, card in (self.views(at)[name] or {}).items()} for name in names]
        return all(one == cards[0] for one in cards)


@dataclass(slots=True)
class Fleet:
    net: Network
    nodes: dict[str, Machine]
    watcher: Watcher
    killed: dict[str, float] = field(default_factory=dict[str, float])
    """When nodes died that have not started again, by the monotonic clock."""

    def kill(self, name: str) -> None:
        self.nodes[name].node.kill()
        self.killed[name] = time.monotonic()

    def check(self) -> None:
        """No view has ever shown a card past its TTL."""
        for sample in self.watcher.samples:
            for viewer, said in sample["views"].items():
                for node, (_, age_s, ttl_s) in (said["seen"] if said is not None else {}).items():
                    assert age_s <= ttl_s, f"{viewer} shows {node} at {age_s} s"
                    died = self.killed.get(node)
                    assert died is None or sample["at"] <= died + TTL_S + ON_ITS_WAY_S, f"{viewer} shows {node}, which is dead"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root, kernels = tmp_path_factory.mktemp("namespaces"), Home.from_environment().kernels
    with network(*NAMES, "watcher") as net, machines(root, kernels, *NAMES, preset=PRESET, warm=None) as made:
        nodes = {machine.name: machine for machine in made}
        for name, machine in nodes.items():
            machine.prefix = net.inside(name)
            machine.options = ("--no-model", "--fleet-host", net.address(name), *(() if name in BY_MDNS else ("--no-mdns",)))
        first, *others = made
        token = first.init("--uses", "16", "--address", net.address("n1"))
        first.up()
        # Each a Python of its own, as on machines: a command that is forked asks before the first one's join port is open.
        with ThreadPoolExecutor(len(others)) as together:
            list(together.map(lambda machine: machine.run("join", token, "--name", machine.name), others))
            # It was told of nobody, and nobody of it: what brings it to the others is mDNS.
            FleetFolder(nodes[BY_MDNS[1]].home / "fleet").peers_file.unlink()
            list(together.map(lambda machine: machine.up(), others))
        command = [*net.inside("watcher"), sys.executable, str(Path(__file__).parent / "watch.py"), *(str(one.home) for one in made)]
        watcher = Watcher(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        reader = threading.Thread(target=watcher.read)
        reader.start()
        try:
            yield Fleet(net, nodes, watcher)
        finally:
            watcher.process.kill()
            watcher.process.wait()
            reader.join()


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> Iterator[None]:
    """Each test begins and ends with all five in agreement, and nothing false was ever shown."""
    until(lambda: fleet.watcher.agree(*NAMES))
    yield
    fleet.check()


def test_five_nodes_that_joined_converge(fleet: Fleet) -> None:
    until(lambda: fleet.watcher.agree(*NAMES))
    said = fleet.nodes["n3"].status()
    assert [node["node_id"] for node in said["nodes"]] == list(NAMES)
    assert [node["addresses"] for node in said["nodes"]] == [[f"{fleet.net.address(name)}:8154"] for name in NAMES]


def test_a_partition_and_its_healing(fleet: Fleet) -> None:
    sides = (frozenset({"n1", "n2"}), frozenset({"n3", "n4", "n5"}))
    fleet.net.sides = sides
    until(lambda: all(fleet.watcher.agree(*side) for side in sides))
    watcher = fleet.watcher
    parted = len(watcher.samples) - 1
    fleet.net.sides = ()
    until(lambda: watcher.agree(*NAMES))
    whole_again = next(at for at in range(parted + 1, len(watcher.samples)) if watcher.agree(*NAMES, at=at))
    before, after = watcher.rounds(parted), watcher.rounds(whole_again)
    # Three whole ones, and the one that was under way when the partition ended.
    assert max(after[name] - before[name] for name in NAMES) <= 3 + 1


def test_power_cuts_under_latency_and_loss(fleet: Fleet) -> None:
    fleet.net.delay_s, fleet.net.loss = 0.2, 0.05
    try:
        fleet.kill("n5")
        alive = NAMES[:4]
        until(lambda: fleet.watcher.sees({name: set(alive) for name in alive}))
        assert fleet.net.dropped > 0
        fleet.check()
        del fleet.killed["n5"]
        fleet.nodes["n5"].up()
        until(lambda: fleet.watcher.agree(*NAMES))
    finally:
        fleet.net.delay_s, fleet.net.loss = 0.0, 0.0
