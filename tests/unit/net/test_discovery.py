"""mDNS where anybody may say anything: a flood is not followed, and what is heard is only an address."""

from __future__ import annotations

import asyncio
import logging

import pytest
from zeroconf import ServiceStateChange, Zeroconf

from paceline.core.ids import NodeId
from paceline.net.discovery import MOST_RESOLVING, SERVICE, Discovery, _hear_zeroconf


def test_of_a_flood_of_services_only_some_are_looked_at() -> None:
    async def main() -> None:
        discovery = Discovery("f" * 16, NodeId("a"), "127.0.0.1", lambda _: None)
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


def test_the_longest_node_id_can_be_announced() -> None:
    async def main() -> None:
        info = Discovery("f" * 16, NodeId("n" * 63), "127.0.0.1", lambda _: None)._service(["127.0.0.1:8154"])
        assert all(len(label) <= 63 for label in (*info.name.split("."), *(info.server or "").split(".")))

    asyncio.run(main())


def test_what_the_library_says_of_sockets_is_said_once_and_in_our_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        _hear_zeroconf()
        logging.getLogger("zeroconf").warning("Error with socket 12 (%s): %s", ("::", 5353), "Network is unreachable")
    ours = [record for record in caplog.records if "mDNS does not work on all networks" in record.getMessage()]
    assert [(record.name, record.levelname) for record in ours] == [("paceline.net.discovery", "INFO")]
    assert "Network is unreachable" in ours[0].getMessage()
    assert not [record for record in caplog.records if record.name == "zeroconf"]
