"""Engines of other makers that this node offers: one `core.inference.Inference` over all. For each of them see `machine.foreign.watched`.

Law: an engine outside of the home network never answers for one at home, even while that one is away: it is offered under names that no engine at home has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from paceline.core.background import end_tasks, in_background
from paceline.core.clock import Clock
from paceline.core.errors import ModelAway, UnknownModel, WayNotAllowed
from paceline.core.generation import GenerationRequest
from paceline.core.inference import ChunkStream, Progress, ServedModel
from paceline.core.stats import EngineStats
from paceline.core.via import new_mark, outside, through
from paceline.engines.contract import EngineIdentity, ForeignEngine
from paceline.fleet.card import ModelOffer
from paceline.machine.foreign.model import served
from paceline.machine.foreign.state import EngineState
from paceline.machine.foreign.watched import LOOK_S, Offered, Offering, Revive, WatchedEngine
from paceline.store.home import Home


class ForeignEngines:
    """Implements `core.inference.Inference`. For one event loop; `models` and `expects` for any thread."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home, self._clock = home, clock
        self._engines: dict[WatchedEngine, asyncio.Task[None]] = {}
        """With the tasks that look at them. Their addresses are no keys: that of an engine that this node started changes."""
        self._by_name: dict[str, tuple[WatchedEngine, Offered]] = {}
        self._encoding: dict[str, tuple[WatchedEngine, Offered]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self.mark = new_mark()
        """This process's mark on requests that leave it, as its owner draws it; see `core.via`."""
        self.silent: Sequence[EngineState] = ()
        """Engines that are shared and have not answered since, as their owner keeps it."""

    # ------------------------------------------------------------------------------------------------------------ for its owner

    @property
    def engines(self) -> tuple[WatchedEngine, ...]:
        return tuple(self._engines)

    @property
    def offered(self) -> tuple[Offered, ...]:
        """Models that answer chats, one for each name."""
        return tuple(one for _, one in self._by_name.values())

    @property
    def encoding(self) -> Collection[tuple[WatchedEngine, Offered]]:
        """Models that make vectors or rank texts, one for each name, with their engines."""
        return self._encoding.values()

    def offers(self) -> tuple[ModelOffer, ...]:
        """Return what the node's card says of them."""
        encoders = ((engine, one) for engine, one in self._encoding.values() if not one.model.writes)
        return tuple(engine.offer(one) for engine, one in (*self._by_name.values(), *encoders) if not one.learns)

    def states(self) -> list[EngineState]:
        """Return all engines that are shared, those that have never answered last."""
        urls = {engine.url for engine in self._engines}
        return [*(engine.state for engine in self._engines), *(state for state in self.silent if state.url not in urls)]

    def listen(self, changed: Callable[[], None]) -> None:
        """Have `changed` called on the event loop when a model comes or goes."""
        self._on_change = changed

    async def add(self, engine: ForeignEngine, identity: EngineIdentity, sharing: Offering, revive: Revive | None = None) -> WatchedEngine:
        """Offer an engine from now on. One at the same URL is replaced.

        Args:
            revive: starts it again if it hangs; None: this node did not start it.
        """
        watched = WatchedEngine(engine, identity, sharing, self._home, self._clock, self._changed, revive, lambda: self.mark)
        await self.remove(watched.url)
        try:
            await watched.look()
        except BaseException:
            await watched.close()
            raise
        self._engines[watched] = in_background(self._watch(watched), f"looks at {watched.url}")
        self._changed()
        return watched

    async def remove(self, url: str) -> bool:
        """Offer an engine no more. Return whether it was offered. Engines that this node started stay: another may be at their old address."""
        watched = next((each for each in self._engines if each.url == url and not each.is_own), None)
        if watched is None:
            return False
        await end_tasks(self._engines.pop(watched))
        await watched.close()
        self._changed()
        return True

    async def close(self) -> None:
        """Close all connections. The engines go on. Idempotent."""
        await end_tasks(*self._engines.values())
        for watched in self._engines:
            await watched.close()
        self._engines.clear()
        self._by_name, self._encoding = {}, {}

    async def _watch(self, watched: WatchedEngine) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await watched.look()

    def _changed(self) -> None:
        by_name: dict[str, tuple[WatchedEngine, Offered]] = {}
        encoding: dict[str, tuple[WatchedEngine, Offered]] = {}
        at_home = {one.model.name for engine in self._engines if not engine.sharing.leaves_network for one in engine.known}
        for engine in self._engines:
            for one in engine.offered:
                if not engine.sharing.leaves_network or one.model.name not in at_home:
                    if one.model.writes:
                        by_name.setdefault(one.model.name, (engine, one))
                    if one.model.tasks:
                        encoding.setdefault(one.model.name, (engine, one))
        self._by_name, self._encoding = by_name, encoding
        self._on_change()

    # ------------------------------------------------------------------------------------------------------------ for the server

    def models(self) -> Sequence[ServedModel]:
        return [served(one.model) for _, one in self._by_name.values()]

    def expects(self, model: str) -> bool:
        """See `Inference.expects`: an engine that is being tested or is away may come back with it."""
        return any(one.model.name == model and one.model.writes for engine in self._engines for one in engine.known)

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """See `Inference.generate`."""
        if request.exact:
            raise WayNotAllowed(
                f"exact: {model} runs in an engine of another maker, which does not promise its bytes", "Leave it out.", field="exact"
            )
        found = self._by_name.get(model)
        if found is None:
            if self.expects(model):
                raise ModelAway(f"The engine of {model!r} does not answer now", "Try again in a few seconds.")
            raise UnknownModel(f"The model {model[:200]!r} is not served here")
        via = through(request.via, self.mark)
        leaves = found[0].sharing.leaves_network
        return found[0].answer(found[1], replace(request, via=outside(via) if leaves else via))

    def stats(self) -> EngineStats:
        return EngineStats(running=sum(one.live for _, one in self._by_name.values()))

    def progress(self) -> Progress:
        return Progress(busy=False, seconds_since_step=0.0)
