"""Brings a model, or some of its layers, from other nodes to this one.

Sources are asked in turn. One that goes away is followed by the next, which sends what is still missing; one that sends wrong bytes is
asked no more. What arrived stays on disk, whatever happens, and the next fetch goes on from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from paceline.core.errors import DownloadError, SourceLost, WeightsError, WrongBytes
from paceline.core.manifest import ModelManifest, ModelPart, PieceRun, files_digest, pieces_needed
from paceline.fleet.placement import WeightsSource
from paceline.net.weights_client import WeightsClient
from paceline.store.catalog import LocalModel, describe, find_whole
from paceline.store.home import Home
from paceline.store.hub import Listed
from paceline.store.partial import Arrivals, covers
from paceline.store.pull import Progress
from paceline.store.staging import Staging, staged

if TYPE_CHECKING:
    import grpc.aio

Dial = Callable[[WeightsSource, str], AbstractAsyncContextManager["grpc.aio.Channel"]]
"""Opens a channel to one address of a node, on which no other node can answer."""
Result = TypeVar("Result")
End = Callable[[Staging, Sequence[PieceRun], Callable[[], None]], Result]

ROUNDS: Final = 3
"""Times in a row that all sources may bring nothing. Raising it waits longer for nodes that are away."""
_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Fetch:
    """What is fetched, and by which means."""

    sources: Sequence[WeightsSource]
    """Nodes that have it, the best first; all of one digest. At least one."""
    dial: Dial
    home: Home
    progress: Progress
    """Told after every piece; called in any thread."""
    announce: Callable[[str], None]
    """Told in words who sends, and who did not go on."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    examined: Progress | None = None
    """Told how far a source is that reads its files first, to describe them."""
    listed: Listed | None = None
    """What the hub says the model is made of; None: the nodes alone say so, and that is noted."""
    wall: Callable[[], float] = time.time


async def fetch_model(fetch: Fetch) -> LocalModel:
    """Bring a whole model here; afterwards it is like a pulled one. Layers that are here already are not fetched again.

    Raises:
        DownloadError: no source could finish it, or the disk does not take it; what arrived is kept.
        FetchInProgress: another process of this machine is at it.
        ModelFileError, UnsupportedModel: what came can't be run here.
        ConfigError: the model's name can't be had here.
    """
    here = None if fetch.listed else await in_thread(partial(find_whole, fetch.sources[0].digest, fetch.home))
    if here is not None:
        return await in_thread(partial(describe, here[0], fetch.home))
    return await _from_any(fetch, None, lambda staging, _, checked: staging.finish(checked), None)


async def fetch_part(fetch: Fetch, part: ModelPart, arrivals: Arrivals | None = None) -> None:
    """Bring some layers of a model here; `store.partial.open_part` opens them, and `store.partial.open_arriving` while they come.

    Args:
        arrivals: told of each piece that is here.

    Raises:
        DownloadError, FetchInProgress, ModelFileError, UnsupportedModel, ConfigError: as `fetch_model`.
    """
    digest = fetch.sources[0].digest
    if await in_thread(partial(covers, digest, part, fetch.home)):
        return

    def seal(staging: Staging, needed: Sequence[PieceRun], checked: Callable[[], None]) -> None:
        del checked
        staging.seal(needed)
        if not covers(digest, part, fetch.home):
            raise WrongBytes("what was described as those layers holds others")

    await _from_any(fetch, part, seal, arrivals)


async def in_thread(work: Callable[[], Result], give_up: Callable[[], None] | None = None) -> Result:
    """Run what blocks, apart from the loop. Cancelled, it still waits for the thread: nothing may be closed under it.

    Args:
        give_up: tells `work` to end soon.
    """
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            if give_up is not None:
                give_up()
            await asyncio.wait({task})
            task.exception()


class _GivenUp(Exception):
    """Ends a thread whose caller was cancelled."""


class _Tally:
    """Bytes that are here, of those needed."""

    def __init__(self, fetch: Fetch, manifest: ModelManifest, needed: Sequence[PieceRun]) -> None:
        self._progress: Final = fetch.progress
        self._total: Final = sum(manifest.files[run.file].piece_size(piece) for run in needed for piece in range(run.first, run.stop))
        self._here = 0
        self.gained = 0
        self._stopped = False

    def stop(self) -> None:
        """Who tells more from now on is ended."""
        self._stopped = True

    def found(self, here: int) -> None:
        if self._stopped:
            raise _GivenUp
        self._here = here
        self._progress(here, self._total)

    def arrived(self, n: int) -> None:
        self.gained += n
        self.found(self._here + n)

    def checked(self) -> None:
        self.found(self._total)


async def _from_any(fetch: Fetch, part: ModelPart | None, end: End[Result], arrivals: Arrivals | None) -> Result:
    """Ask one source after the other until the model is here."""
    faults: dict[str, WeightsError] = {}
    said: dict[str, str] = {}
    left, idle = list(fetch.sources), 0
    while left and idle < ROUNDS:
        if faults:
            await fetch.sleep(_WAIT_S)
        idle += 1
        for source in list(left):
            attempt = _Attempt(fetch, source, part, end, arrivals)
            try:
                return await attempt.run()
            except WrongBytes as error:
                left.remove(source)
                faults[source.node_id] = error
            except SourceLost as error:
                faults[source.node_id] = error
            why = faults[source.node_id].message
            if said.get(source.node_id) != why or attempt.gained:
                fetch.announce(f"{source.node_id} did not go on: {why}")
            said[source.node_id] = why
            idle = 0 if attempt.gained else idle
    told = "; ".join(f"{node}: {fault.message}" for node, fault in faults.items())
    raise DownloadError(
        f"no node of the fleet could give all of {fetch.sources[0].model_id} ({told})",
        "What arrived is kept: run the same command again to go on from there",
    ) from list(faults.values())[-1]


@dataclass(slots=True)
class _Attempt(Generic[Result]):
    """One source asked, once."""

    fetch: Fetch
    source: WeightsSource
    part: ModelPart | None
    end: End[Result]
    arrivals: Arrivals | None
    gained: int = 0
    """Bytes that it brought."""

    async def run(self) -> Result:
        """At one address after the other until one answers."""
        *others, last = self.source.addresses
        for address in others:
            try:
                return await self._at(address)
            except SourceLost:
                if self.gained:
                    raise
        return await self._at(last)

    async def _at(self, address: str) -> Result:
        fetch, source = self.fetch, self.source
        async with fetch.dial(source, address) as channel:
            client = WeightsClient(channel, source.node_id)
            manifest = await client.describe(
                source.digest, _examined(fetch, f"{source.node_id} reads its files of {source.model_id} first")
            )
            if self.part is None and fetch.listed is None and source.files not in {"", files_digest(manifest.files)}:
                raise WrongBytes(f"{source.node_id} describes other files than its card says")
            needed = pieces_needed(manifest, self.part)
            name = source.model_id if fetch.listed is None else fetch.listed.ref.folder
            at = datetime.fromtimestamp(fetch.wall(), UTC).isoformat(timespec="seconds")
            origin, for_others = {"from": source.node_id, "at": at}, self.part is not None
            with staged(name, manifest, fetch.home, fetch.listed, origin, for_others=for_others) as staging:
                fetch.announce(f"{name} comes from {source.node_id}")
                tally = _Tally(fetch, manifest, needed)
                lacking = await in_thread(partial(staging.missing, needed, tally.found), tally.stop)
                if self.arrivals is not None:
                    self.arrivals.described(manifest)
                    self.arrivals.came(_without(needed, lacking))
                try:
                    await _receive(client, manifest, lacking, staging, tally, self.arrivals)
                finally:
                    self.gained += tally.gained
                return await in_thread(partial(self.end, staging, needed, tally.checked), tally.stop)


def _examined(fetch: Fetch, words: str) -> Progress:
    """What is told of a source that reads its files: each time how far it is, and once in words."""
    said = False

    def say(done: int, total: int) -> None:
        nonlocal said
        if fetch.examined is not None:
            fetch.examined(done, total)
        if not said:
            said = True
            fetch.announce(words)

    return say


def _without(needed: Sequence[PieceRun], lacking: Sequence[PieceRun]) -> Iterator[PieceRun]:
    """The pieces of some runs that are in none of others."""
    gone = {(run.file, piece) for run in lacking for piece in range(run.first, run.stop)}
    for run in needed:
        yield from (PieceRun(run.file, piece, piece + 1) for piece in range(run.first, run.stop) if (run.file, piece) not in gone)


async def _receive(
    client: WeightsClient,
    manifest: ModelManifest,
    lacking: Sequence[PieceRun],
    staging: Staging,
    tally: _Tally,
    arrivals: Arrivals | None,
) -> None:
    """Take pieces in, each written while the next one is on its way."""

    def write(file: int, piece: int, data: bytes) -> None:
        staging.write(file, piece, data)
        if arrivals is not None:
            arrivals.came([PieceRun(file, piece, piece + 1)])

    writing: asyncio.Task[None] | None = None
    try:
        async with aclosing(client.fetch(manifest, lacking)) as pieces:
            async for piece in pieces:
                if writing is not None:
                    await writing
                writing = asyncio.create_task(in_thread(partial(write, piece.file, piece.piece, piece.data)))
                tally.arrived(len(piece.data))
        if writing is not None:
            await writing
    finally:
        if writing is not None and not writing.done():
            await asyncio.wait({writing})
            writing.exception()
