"""Samples what nodes see, ten times a second, as lines of JSON: run where they can be reached, with their PACELINE_HOMEs as arguments."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio

from paceline.core.errors import PacelineError
from paceline.net.member.state import RunningNode, control_channel, read_running, read_sight
from paceline.net.trust.folder import FleetFolder

EVERY_S = 0.1


class Watched:
    """One node, or the one that runs in its place."""

    def __init__(self, home: Path) -> None:
        self._folder = FleetFolder(home / "fleet")
        self._running: RunningNode | None = None
        self._channel: grpc.aio.Channel | None = None

    async def sample(self) -> dict[str, Any] | None:
        """What it sees; None where it does not answer."""
        try:
            running = read_running(self._folder)
            if running != self._running:
                if self._channel is not None:
                    await self._channel.close()
                self._running, self._channel = running, None
                if running is not None:
                    self._channel = control_channel(self._folder.identity(), running.address)
            if self._channel is None:
                return None
            sight = await read_sight(self._channel, 1.0)
        except PacelineError:
            return None
        seen = {live.card.node_id: [live.card.version, round(live.age_s, 3), live.card.ttl_s] for live in sight.view.nodes}
        return {"seen": seen, "rounds": sight.rounds}


async def main(homes: list[Path]) -> None:
    watched = [Watched(home) for home in homes]
    while True:
        at = time.monotonic()
        samples = await asyncio.gather(*(one.sample() for one in watched))
        line = json.dumps({"at": at, "views": dict(zip([home.name for home in homes], samples, strict=True))})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        await asyncio.sleep(EVERY_S)


asyncio.run(main([Path(home) for home in sys.argv[1:]]))
