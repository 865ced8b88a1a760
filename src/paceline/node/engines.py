"""Engines that this node offers: those in the home's `engines.json`, followed as the file changes, and those found on loopback if the start allowed it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from paceline.core.background import came_within
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
        self._offered: dict[str, EngineShare] = {}
        self._late: dict[str, Backoff] = {}
        """Engines that did not answer, by URL."""
        self._silent: dict[str, EngineState] = {}
        """The same, for the owner."""
        self._looked = asyncio.Event()

    async def settle(self) -> None:
        """Wait until all shared engines were called once, for a moment at most."""
        await came_within(self._looked, SETTLE_S)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await self.look()
            self._looked.set()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Offer what is shared now, and no longer what is not. An engine that does not answer is called again later."""
        wanted = self._read()
        for url in [url for url, share in self._offered.items() if wanted.get(url) != share]:
            del self._offered[url]
            await self._engines.remove(url)
        for url, share in wanted.items():
            late = self._late.get(url)
            if url not in self._offered and (late is None or self._clock.monotonic() >= late.until_s):
                await self._offer(share)
        self._engines.silent = tuple(self._silent.values())

    def _read(self) -> dict[str, EngineShare]:
        stamp = _stamp(self._home.engines)
        if self._wanted is None or stamp != self._stamp:
            self._stamp = stamp
            self._late.clear()
            self._silent.clear()
            try:
                self._wanted = {share.url: share for share in (*self._found, *read_shares(self._home))}
            except UserError as error:
                logger.warning("%s", error)
                self._wanted = self._wanted or {}
        return self._wanted

    async def _offer(self, share: EngineShare) -> None:
        from paceline.engines.table import identify  # its HTTP library takes a tenth of a second to import, and most nodes share no engine

        try:
            engine, identity = await identify(share.door)
        except (EngineGone, UserError) as error:
            late = self._late.setdefault(share.url, Backoff(AGAIN_S, MOST_AGAIN_S))
            if not late.failures:
                logger.warning("the engine at %s is not offered yet: %s", share.url, error)
            late.fail(self._clock.monotonic())
            sharing = share.sharing
            self._silent[share.url] = EngineState(
                share.url, trouble=str(error), leaves_network=sharing.leaves_network, plain_http=sharing.plain_http
            )
            return
        self._late.pop(share.url, None)
        self._silent.pop(share.url, None)
        self._offered[share.url] = share
        await self._engines.add(engine, identity, share.sharing)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
