"""mDNS where anybody may say anything: a flood is not followed, and what is heard is only an address."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys

import pytest
from tests.fleet.network import why_not
from zeroconf import ServiceStateChange, Zeroconf

from paceline.core.background import Background
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.net import discovery
from paceline.net.discovery import MOST_HEARD, MOST_RESOLVING, SERVICE, Discovery, _hear_zeroconf, rank


def test_of_a_flood_of_services_only_some_are_looked_at() -> None:
    async def main() -> None:
        discovery = Discovery("f" * 16, NodeId("a"), "127.0.0.1", lambda _: None, Background(SystemClock()))
        zeroconf = Zeroconf(interfaces=["127.0.0.1"])
        try:
            before = len(asyncio.all_tasks())
            for number in range(5000):
                discovery._changed(zeroconf, SERVICE, f"n\x1b{number}.{SERVICE}", ServiceStateChange.Added)
            assert len(asyncio.all_tasks()) - before == MOST_RESOLVING
            await discovery.close()
            await asyncio.sleep(0)
            discovery._changed(zeroconf, SERVICE, f"after.{SERVICE}", ServiceStateChange.Added)
            assert len(asyncio.all_tasks()) - before == 1
            await discovery.close()
        finally:
            await zeroconf._async_close()

    asyncio.run(main())


NO_NETWORKS = why_not()
FROM_NO_NETWORK = """
import asyncio, ctypes, fcntl, os, struct, subprocess, sys
from paceline.core.background import Background
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.net import discovery

assert not ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET: a machine of its own, whose network is not up yet

async def main(is_told):
    discovery.AGAIN_S = 60.0 if is_told else 0.1
    found, background = {name: asyncio.Event() for name in "ab"}, Background(SystemClock())
    nodes = {
        name: discovery.Discovery("f" * 16, NodeId(name), "", lambda _, name=name: found[name].set(), background) for name in "ab"
    }
    for port, node in enumerate(nodes.values(), 1):
        node.start(() if is_told else [f"10.98.0.1:{port}"])
    while not all(node.trouble for node in nodes.values()):
        await asyncio.sleep(0.01)
    assert all("give other nodes' addresses with --peer" in node.trouble for node in nodes.values())
    card = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(card, 0x400454CA, struct.pack("16sH", b"card", 0x1002))  # TUNSETIFF, IFF_TAP | IFF_NO_PI
    for command in ("addr add 10.98.0.1/24 dev card", "link set card up multicast on"):
        subprocess.run(["ip", *command.split()], check=True)
    for port, node in enumerate(nodes.values() if is_told else (), 1):
        node.moved([f"10.98.0.1:{port}"])
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in found.values()))
        while any(node.trouble for node in nodes.values()):
            await asyncio.sleep(0.01)
    for node in nodes.values():
        await node.close()
    print("found")

asyncio.run(main(sys.argv[1] == "told"))
"""


@pytest.mark.skipif(bool(NO_NETWORKS), reason=NO_NETWORKS)
@pytest.mark.parametrize("how", ["told", "tried again"])
def test_nodes_that_start_before_their_network_is_up_find_one_another_once_it_is(how: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FROM_NO_NETWORK, how], capture_output=True, text=True, check=False)
    assert ran.stdout == "found\n", ran.stderr


def test_the_longest_node_id_can_be_announced() -> None:
    async def main() -> None:
        info = Discovery("f" * 16, NodeId("n" * 63), "127.0.0.1", lambda _: None, Background(SystemClock()))._service(["127.0.0.1:8154"])
        assert all(len(label) <= 63 for label in (*info.name.split("."), *(info.server or "").split(".")))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("127.0.0.1", "::1", "169.254.9.1", "fe80::1"), ("169.254.9.1",)),
        (
            ("169.254.9.1", "fd00::1", "8.8.8.8", "10.0.0.1", "2001:4860::1"),
            ("10.0.0.1", "8.8.8.8", "fd00::1", "2001:4860::1", "169.254.9.1"),
        ),
        (("::1", "127.0.0.1", "0.0.0.0", "fe80::1"), ("127.0.0.1", "::1")),
        (("10.0.0.1", "10.0.0.1"), ("10.0.0.1",)),
        ((), ()),
    ],
)
def test_a_machine_announces_what_others_can_reach_and_cables_last(hosts: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert rank(hosts) == expected


SAID = ["169.254.9.2", "fe80::2", "10.0.0.2", "0.0.0.0"]
LOOPBACK = ["127.0.0.1", "::1", "127.8.0.1", "::ffff:127.0.0.1", "::"]


@pytest.mark.parametrize(
    ("host", "own", "said", "expected"),
    [
        ("", ("169.254.9.1",), SAID, ["169.254.9.2:8154", "10.0.0.2:8154"]),
        ("", ("10.0.0.1", "169.254.9.1"), SAID, ["169.254.9.2:8154", "10.0.0.2:8154"]),
        ("", ("10.0.0.1",), SAID, ["10.0.0.2:8154"]),
        ("", ("10.0.0.1",), LOOPBACK, []),
        ("10.0.0.1", ("10.0.0.1",), LOOPBACK, []),
        ("127.0.0.1", ("10.0.0.1",), LOOPBACK[:2], ["127.0.0.1:8154", "[::1]:8154"]),
        ("", ("127.0.0.1",), LOOPBACK[:2], ["127.0.0.1:8154", "[::1]:8154"]),
        ("", ("10.0.0.1",), [f"10.0.1.{number}" for number in range(200)], [f"10.0.1.{number}:8154" for number in range(MOST_HEARD)]),
    ],
)
def test_only_addresses_that_may_lead_to_another_node_are_heard(
    host: str, own: tuple[str, ...], said: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Info:
        def __init__(self, *_: object) -> None:
            self.port, self.decoded_properties = 8154, {"fleet": "f" * 16, "node": "b"}

        async def async_request(self, *_: object) -> bool:
            return True

        def parsed_addresses(self) -> list[str]:
            return said

    found: list[str] = []
    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceInfo", Info)
    monkeypatch.setattr(discovery, "own_hosts", lambda: own)
    here = Discovery("f" * 16, NodeId("a"), host, found.append, Background(SystemClock()))
    asyncio.run(here._resolve(None, SERVICE, f"b.{SERVICE}"))  # type: ignore[arg-type]
    assert found == expected


def test_what_the_library_says_of_sockets_is_said_once_and_in_our_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    root, everywhere = logging.getLogger(), io.StringIO()
    root.addHandler(handler := logging.StreamHandler(everywhere))
    try:
        for _ in range(2):
            _hear_zeroconf()
            logging.getLogger("zeroconf").warning("Error with socket 12 (%s): %s", ("::", 5353), "Network is unreachable")
    finally:
        root.removeHandler(handler)
    ours = [record for record in caplog.records if "mDNS does not work on all networks" in record.getMessage()]
    assert [(record.name, record.levelname) for record in ours] == [("paceline.net.discovery", "INFO")]
    assert "Network is unreachable" in ours[0].getMessage()
    assert "Error with socket" not in everywhere.getvalue().replace(ours[0].getMessage(), "")
