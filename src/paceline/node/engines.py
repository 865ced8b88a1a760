"""Engines that this node offers: those in the home's `engines.json`, followed as the file changes, and those found on loopback if the start allowed it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from paceline.core.background import came_within, end_tasks, in_background
from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.errors import EngineGone, UserError
from paceline.machine.foreign.engines import ForeignEngines
from paceline.machine.foreign.shares import EngineShare, read_shares
from paceline.machine.foreign.state import EngineState
from paceline.store.home import Home

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the file. Raising it: an engine that is shared while this runs is offered later."""
SETTLE_S = 3.0
"""Seconds for which a start waits for engines. Raising it: a node is ready later if its engines hang."""
AGAIN_S, MOST_AGAIN_S = 2.0, 60.0
"""Seconds until an engine that does not answer is called again: the first pause, doubled each time, and the longest. Raising them: it is offered later."""


class SharedEngines:
    """Keeps `ForeignEngines` as a person shares them.

    Args:
        found: engines that were found on loopback and are offered without being in the file.
    """

    def __init__(self, engines: ForeignEngines, home: Home, clock: Clock, found: Sequence[EngineShare] = ()) -> None:
        self._engines, self._home, self._clock, self._found = engines, home, clock, tuple(found)
        self._stamp: tuple[int, int] | None = None
        self._wanted: dict[str, EngineShare] | None = None
        """By URL; None: the file was not read yet."""
        self._kept: dict[str, tuple[EngineShare, asyncio.Task[None]]] = {}
        """Shares by URL, each with the task that calls its engine until it answers. One that hangs delays no other."""
        self._silent: dict[str, EngineState] = {}
        """Engines that did not answer yet, for the owner."""
        self._uncalled: set[str] = set()
        self._looked = asyncio.Event()

    async def settle(self) -> None:
        """Wait until all shared engines were called once, for a moment at most."""
        await came_within(self._looked, SETTLE_S)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            await end_tasks(*(calling for _, calling in self._kept.values()))

    async def look(self) -> None:
        """Offer what is shared now, and no longer what is not. If the file changed, silent engines are called at once."""
        before = self._stamp
        wanted = self._read()
        for url in [
            url for url, (share, _) in self._kept.items() if wanted.get(url) != share or (self._stamp != before and url in self._silent)
        ]:
            _, calling = self._kept.pop(url)
            await end_tasks(calling)
            self._called(url)
            await self._engines.remove(url)
        for url, share in wanted.items():
            if url not in self._kept:
                self._uncalled.add(url)
                self._kept[url] = share, in_background(self._offer(share), f"calls of the engine at {url}")
        if not self._uncalled:
            self._looked.set()

    def _read(self) -> dict[str, EngineShare]:
        stamp = _stamp(self._home.engines)
        if self._wanted is None or stamp != self._stamp:
            self._stamp = stamp
            try:
                self._wanted = {share.url: share for share in (*self._found, *read_shares(self._home))}
            except UserError as error:
                logger.warning("%s", error)
                self._wanted = self._wanted or {}
        return self._wanted

    async def _offer(self, share: EngineShare) -> None:
        """Call an engine until it answers, and offer it from then on."""
        from paceline.engines.table import identify  # its HTTP library takes a tenth of a second to import, and most nodes share no engine

        backoff, url, sharing = Backoff(AGAIN_S, MOST_AGAIN_S), share.url, share.sharing
        while True:
            try:
                engine, identity = await identify(share.door)
                break
            except (EngineGone, UserError) as error:
                if not backoff.failures:
                    logger.warning("the engine at %s is not offered yet: %s", url, error)
                silent = EngineState(url, trouble=str(error), leaves_network=sharing.leaves_network, plain_http=sharing.plain_http)
                self._called(url, silent)
                await asyncio.sleep(backoff.fail(self._clock.monotonic()))
        await self._engines.add(engine, identity, sharing)
        self._called(url)

    def _called(self, url: str, silent: EngineState | None = None) -> None:
        """Note that an engine was called.

        Args:
            silent: what its owner sees; None: it answered, or is not shared any more.
        """
        self._silent.pop(url, None)
        if silent is not None:
            self._silent[url] = silent
        self._engines.silent = tuple(self._silent.values())
        self._uncalled.discard(url)
        if not self._uncalled:
            self._looked.set()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
