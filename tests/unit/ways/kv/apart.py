"""A sharer in a process of its own, which is killed or stopped in the middle of the blocks that it gives or takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count as count_from
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals, pthread_kill
from threading import get_ident
from types import SimpleNamespace
from typing import Any

from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import make_node, until
from tests.unit.ways.kv.sharers import Sharer

from paceline.core.ids import NodeId
from paceline.ways.kv import fetching, giving, prefilling

APART = NodeId("apart")


def _run(root: Path, address: str, speed: float, pipe: Connection) -> None:
    async def go() -> None:
        here = Sharer(TestFleet(), root, APART, SimpleNamespace(addresses=(address,)), speed=speed, nixl=True)  # type: ignore[arg-type]
        await here.start()
        await until(lambda: here.sharing.nixl.agent is not None)
        n, most, sends = 0, 1 << 30, Signals.SIGKILL
        send_block, fill = fetching.send_block, fetching.PeerFetch.fill

        def count() -> None:
            nonlocal n
            n += 1
            if n > most:
                n = -1 << 30
                pthread_kill(get_ident(), sends)  # to this thread: it goes no further

        giving.send_block = prefilling.send_block = lambda *of: (count(), send_block(*of))[1]
        fetching.PeerFetch.fill = lambda *of: (count(), fill(*of))[1]  # type: ignore[method-assign]
        pipe.send("ready")
        for asked in count_from(1):
            what, *values = await asyncio.to_thread(pipe.recv)
            if what == "blocks":
                most, sends = values
            else:
                if what == "fetch":
                    await until(lambda: bool(here.sharing.meter.least_tokens and here.sharing.meter.marks))
                await here.answer(str(asked), values[0])
            pipe.send(what)

    asyncio.run(go())


class Apart:
    """What the test has of it."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self._pipe = process, pipe

    def ask(self, *words: Any) -> None:
        """To `answer` a prompt, or `fetch` it once it knows of it, or to have so many `blocks` sent or taken, and then send itself a signal."""
        self._pipe.send(words)

    async def hear(self) -> None:
        """It is done."""
        assert await asyncio.to_thread(self._pipe.poll, 60)
        self._pipe.recv()


@asynccontextmanager
async def apart(root: Path, speed: float, other_speed: float) -> AsyncGenerator[tuple[Apart, Sharer]]:
    """One of two nodes in a process of its own, and the other here."""
    fleet = TestFleet()
    make_node(fleet, root, APART)  # its folder
    here = Sharer(fleet, root, "here", speed=other_speed, nixl=True)
    await here.start()
    pipe, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_run, args=(root, here.node.addresses[0], speed, theirs))
    process.start()
    theirs.close()
    try:
        there = Apart(process, pipe)
        await there.hear()
        await until(lambda: len(here.node.view().ids) == 2 and here.sharing.nixl.agent is not None)
        yield there, here
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        pipe.close()
        await here.stop()
