"""Fetches one model in a process of its own, to be killed: identity file, node address, digest, name, home."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.unit.machine.weights.nodes import dialer

from paceline.core.ids import NodeId
from paceline.fleet.placement import WeightsSource
from paceline.machine.fetch import Fetch, fetch_model
from paceline.net.trust.identity import Identity
from paceline.store.home import Home


def main() -> None:
    identity, address, digest, name, home = sys.argv[1:]
    source = WeightsSource(NodeId("giver-1"), (address,), name, digest, 1)
    dial = dialer(Identity.from_pem(Path(identity).read_bytes()))
    asyncio.run(fetch_model(Fetch([source], dial, Home(Path(home)), lambda done, total: None, lambda words: None)))


if __name__ == "__main__":
    main()
