"""Nodes that host shards and can be told to misbehave: several in one process, each with its home, its identity and its ports.

Started with the peer's address and the homes. Each line of standard input is answered by one of output: `start NODE`, `stop NODE` (in an orderly way),
`do NODE DEED`, `gain NODE` (a load that is held, by the deed `load`, gets on by a byte), `sessions NODE` (how many it has, of which something
still runs). What a node does lasts until it is started again. Its sessions are the real ones but for the deed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.fleet.machines import QUICK

from paceline.core.clock import SystemClock
from paceline.core.errors import ShardUnavailable
from paceline.engine.local import WireBits
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.node.serving import FleetServing
from paceline.store.home import Home
from paceline.ways.pipeline.executor.stage import Stage, StageBatch
from paceline.ways.pipeline.host.serving import Hosting
from paceline.ways.pipeline.host.session import HostLimits, Session

SLOW_S = 8.0
"""More than an orchestrator waits for a batch, also where the machine is busy with other programs."""


@dataclass(slots=True)
class Deed:
    """What a node does to whoever uses it."""

    name: str = ""
    never: threading.Event = field(default_factory=threading.Event)
    gained: int = 0
    """Bytes that a load which is held has gained."""


class BadStage:
    """A session's stage, until its node is told to be bad."""

    def __init__(self, stage: Stage, session: Session, deed: Deed) -> None:
        self._stage, self._session, self._deed = stage, session, deed

    def take_blocks_of(self, tokens: int) -> None:
        self._stage.take_blocks_of(tokens)

    def run(self, batch: StageBatch, x_TD: WireBits) -> WireBits:
        out_TD = self._stage.run(batch, x_TD)
        match self._deed.name:
            case "slow":  # it answers each batch, but late
                wait_for_the_end(self._session, self._deed, SLOW_S)
            case "stalled":  # it goes on reporting
                wait_for_the_end(self._session, self._deed)
                raise ShardUnavailable("the session was ended")
            case "nan":
                out_TD = np.array(out_TD)
                out_TD[-1, 3] = 0x7FC0
            case "wrong":  # the last bit of each value
                out_TD = out_TD ^ np.uint16(1)
            case "shape":
                out_TD = np.concatenate([out_TD, out_TD[:1]])
            case _:
                pass
        return out_TD


def wait_for_the_end(session: Session, deed: Deed, most_s: float = float("inf")) -> None:
    end = time.monotonic() + most_s
    while not session.stopping and time.monotonic() < end:
        deed.never.wait(0.02)


class Node:
    """One of them."""

    def __init__(self, home: Home, peer: str) -> None:
        self._home, self._peer = home, peer
        self._running: AsyncExitStack | None = None
        self.host: Any = None
        self.deed = Deed()

    async def start(self) -> None:
        self.deed = deed = Deed()
        settings = FleetSettings(port=0, host="127.0.0.1", peers=(self._peer,), mdns=False, preset=parse_preset(QUICK))
        whole = FleetServing(None, settings, self._home, SystemClock(), Hosting(HostLimits(stall_s=0.5), threads=1))
        assert whole.shards is not None
        host: Any = whole.shards.host
        self.host = host
        begin = host._begin

        def begin_badly(*args: Any) -> Session:
            session: Any = begin(*args)
            session.place = replace(session.place, stage=BadStage(session.place.stage, session, deed))
            receive = session._receive

            def deaf(source: Any) -> Any:
                if deed.name == "deaf":  # what is sent stays in the socket
                    wait_for_the_end(session, deed)
                    raise ShardUnavailable("the session was ended")
                return receive(source)

            session._receive = deaf
            return session

        host._begin = begin_badly
        load = host.warm._load

        def load_slowly(source: Any, options: Any, progress: Any) -> Any:
            while deed.name == "load":
                progress(deed.gained, 1000)
                deed.never.wait(0.02)
            return load(source, options, progress)

        host.warm._load = load_slowly
        stack = AsyncExitStack()
        await whole.start()
        stack.push_async_callback(whole.stop)
        self._running = stack

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.aclose()


async def main(peer: str, homes: list[Path]) -> None:
    nodes = {home.name: Node(Home(home), peer) for home in homes}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order, name, *deed = line.split()
        node, answer = nodes[name], "done"
        match order:
            case "start":
                await node.stop()
                await node.start()
            case "stop":
                await node.stop()
            case "sessions":
                answer = str(node.host.sessions)
            case "gain":
                node.deed.gained += 1
            case _:
                (node.deed.name,) = deed
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for node in nodes.values():
        await node.stop()


asyncio.run(main(sys.argv[1], [Path(home) for home in sys.argv[2:]]))
