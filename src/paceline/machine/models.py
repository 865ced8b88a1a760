"""The models of this machine: an engine each, behind one `core.inference.Inference`, by name.

Law: a model that answers, or that requests wait for, is never taken away. Models are loaded one after the other, in threads; a request for one that
is being loaded waits for as long as that advances. Where models are loaded on demand, idle ones make way, the one that is idle for longest first, and
only as far as the one asked for needs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Generic, TypeVar

from paceline.backends.memory import free_what_failed, free_what_was_frozen
from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock, silence_allowed
from paceline.core.errors import ConfigError, ExecutorUnavailable, ModelAway, NodeStopping, OutOfMemory, Overloaded, UnknownModel, UserError
from paceline.core.generation import GenerationRequest
from paceline.core.inference import ChunkStream, ModelFacts, Progress, ServedModel, fingerprint_of
from paceline.core.model import LayerRange, ModelRef
from paceline.core.stats import EngineStats
from paceline.machine.answer_once_loaded import AnswerOnceLoaded
from paceline.machine.host import EngineHost
from paceline.machine.memory_budget import HostedModel, ModelUse, bound_beside, make_room
from paceline.machine.settings import MemoryBound, NodeSettings
from paceline.machine.setup import set_up
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import LocalModel, ModelLocation, describe, locations, resolve
from paceline.store.home import Home, identity_key

PATIENCE_S = 120.0
"""Seconds without a further byte of a load until requests that wait for it are refused, while bytes are counted. Raising it: clients wait longer for
a load that hangs."""
LOOK_S = 0.05
"""Between two looks whether a model's answers have ended."""
TOKENIZER_IDLE_S = 60
"""Until the process of a tokenizer ends whose model is not loaded."""
LOAD_FAILED = "load_failed"
"""What clients are told of a model that can't be loaded."""


Hosted = TypeVar("Hosted", bound=HostedModel)
BuildsAsPlanned = Callable[[ModelLocation, NodeSettings, LoadProgress, Callable[[], Awaitable[Hosted]]], Awaitable[Hosted]]


class Models(Generic[Hosted]):
    """Implements `core.inference.Inference`. `open`, `loadable` and `models` are for any thread; all else for the event loop, once there is one.

    Args:
        build: loads a model; called in threads, one after the other. What its progress raises ends it.
        settings: of every model that is loaded later, but for its name.
        on_demand: whether a request loads what it names, and what is idle makes way.
        budget_bytes: that all models may take together; None: what is free.
    """

    def __init__(
        self,
        build: Callable[[NodeSettings, LoadProgress], Hosted],
        settings: NodeSettings,
        home: Home,
        clock: Clock,
        *,
        on_demand: bool = False,
        budget_bytes: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._build, self._settings, self._home, self._clock = build, settings, home, clock
        self.on_demand = on_demand
        self._budget_bytes, self._patience_s = budget_bytes, patience_s
        self._loaded: dict[str, Hosted] = {}
        self._served: dict[str, ServedModel] = {}
        """What is loaded, and what was or was asked for and is loaded again on demand; the first of all stays the first."""
        self._places: dict[str, ModelLocation] = {}
        self._described: dict[str, LocalModel] = {}
        """By what the files are, so that a list opens each once."""
        self._waiting = Counter[str]()
        """Requests that wait for a model."""
        self._leaving: dict[str, asyncio.Event] = {}
        """Models that the owner has unloaded, until each has left or stays after all."""
        self._loading: dict[str, asyncio.Task[bool]] = {}
        self._read: dict[str, tuple[int, int]] = {}
        """Of a model that is being loaded: bytes, and of how many."""
        self._turn, self._stopped, self._counting = asyncio.Lock(), asyncio.Event(), asyncio.Lock()
        """The last is held while room is made or counted, so that a load counts on memory that is free, or taken."""
        self._opening = threading.Lock()
        self._sign_s = clock.monotonic()
        self._past = EngineStats()
        """Counters of engines that are gone."""
        self._on_change: Callable[[], None] | None = None
        self.by_plan: BuildsAsPlanned[Hosted] | None = None
        """Decides how a model that is loaded by name is served, and builds it; the last argument builds it on this machine alone. None: that is done."""

    # ------------------------------------------------------------------------------------------------------ for the server

    def models(self) -> Sequence[ServedModel]:
        """The first one first. With on demand, what makes way stays in the list, as long as it is on the disk."""
        loaded, served = dict(self._loaded), tuple(self._served.items())
        there = [(name, model) for name, model in served if name in loaded or self._places[name].path.exists()]
        return tuple(loaded[name].host.models()[0] if name in loaded else model for name, model in there)

    def expects(self, model: str) -> bool:
        """See `Inference.expects`."""
        return model in self._loading or model in self._leaving

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """See `Inference.generate`. A model that is not loaded is, once the first item is asked for.

        Raises:
            NoRoom, ExecutorUnavailable, ModelAway: it can't be loaded, before the first item.
        """
        return AnswerOnceLoaded(self.host_of, model, request)

    def stats(self) -> EngineStats:
        """Of all engines together, and the counters of those that are gone."""
        each = [node.host.stats() for node in self._loaded.values()]
        return each[0] if len(each) == 1 and not self._past.steps else reduce(EngineStats.plus, each, self._past)

    def progress(self) -> Progress:
        """Of the engine that is furthest behind; `error` is of any that failed for good, and `lacks` of any that lost something."""
        each = [node.host.progress() for node in self._loaded.values()]
        if not each:
            return Progress(busy=False, seconds_since_step=0.0)
        worst = max(each, key=lambda one: one.seconds_since_step - one.step_expected_s)
        errors, lacking = filter(None, (one.error for one in each)), filter(None, (one.lacks for one in each))
        return replace(worst, busy=any(one.busy for one in each), error=next(errors, None), lacks=next(lacking, None))

    def open(self, name: str) -> ServedModel | None:
        """A model on this disk that a request names and that would be loaded for it: all that it takes to read the request. Blocks. None: there is
        none, or nothing is loaded on demand.

        Raises:
            ExecutorUnavailable: its files can't be opened.
        """
        place = self._find(name) if self.on_demand else None
        if place is None:
            return None
        with self._opening:
            served = self._served.get(place.name)
            if served is None:
                try:
                    served = self._opened(place)
                except UserError as error:
                    raise _load_failed(place.name, error) from error
                self._places[place.name] = place
                self._served[place.name] = served
        return served

    def loadable(self) -> Sequence[LocalModel]:
        """Models on this disk that a request could name, beside `models`. Blocks."""
        if not self.on_demand:
            return ()
        described = [self._describe(place) for place in locations(self._home) if place.name not in self._served]
        return [model for model in described if model.problem is None]

    # ------------------------------------------------------------------------------------------------------- for its owner

    @property
    def nodes(self) -> tuple[Hosted, ...]:
        """What is loaded, in the order in which it was."""
        return tuple(self._loaded.values())

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded

    @property
    def bound(self) -> MemoryBound:
        """What may be loaded beside what is."""
        return bound_beside([node.use() for node in self.nodes], self._budget_bytes)

    @property
    def live(self) -> int:
        """Requests that have not ended, or wait for a model."""
        return sum(node.host.live for node in self._loaded.values()) + self._waiting.total()

    def add(self, node: Hosted) -> None:
        """Serve a model that is loaded; closed with this.

        Raises:
            ConfigError: one of that name is served.
        """
        name = node.model.name
        if name in self._loaded:
            raise ConfigError(f"Two models are both called {name}", "Clients could not tell them apart: leave one out.")
        self._loaded[name], self._served[name] = node, node.model
        if node.location is not None:
            self._places[name] = node.location
        if self._on_change is not None:
            node.host.listen(self._on_change)
            self._on_change()

    def listen(self, changed: Callable[[], None]) -> None:
        """Have `changed` called on this event loop whenever a model comes or goes, or its engine does."""
        self._on_change = changed
        for node in self._loaded.values():
            node.host.listen(changed)

    def in_use(self) -> list[ModelUse]:
        """What is loaded, and what is being loaded."""
        uses = [replace(node.use(), state="unloading") if name in self._leaving else node.use() for name, node in self._loaded.items()]
        for name in [name for name in self._loading if name not in self._loaded]:
            done, total = self._read.get(name, (0, 0))
            uses.append(ModelUse(name, state="loading", percent=100 * done // total if total else 0))
        return uses

    async def load(self, ref: str) -> str:
        """Load a model that this machine's owner names, as for `paceline up`; returns its name. A model that is being unloaded is loaded again.

        Raises:
            UserError, NoRoom, ModelAway: it can't be had.
        """
        place = await asyncio.to_thread(resolve, ref, self._home)
        while place.name not in self._loaded or place.name in self._leaving:
            if await self._bring(place.name, place):
                break
        if (known := self._loaded.get(place.name)) is not None and known.location is not None and known.location.path != place.path:
            raise ConfigError(f"Another {place.name} is loaded", f"Unload it first: paceline unload {place.name}")
        return place.name

    async def unload(self, name: str, wait_s: float) -> None:
        """Take a model away. Live requests may end. Later ones wait and have it loaded again on demand; without that they are refused, unless the owner
        loads it again meanwhile.

        Raises:
            UnknownModel: it is not loaded.
            Overloaded: its answers did not end in time.
        """
        named = {name, name.removesuffix(":latest")}
        found = next((one for one in self._loaded if one in named), None)
        if found is None or found in self._leaving:
            raise UnknownModel(f"{name[:200]!r} is not loaded here", f"Loaded: {', '.join(self._loaded) or 'none'}.")
        node = self._loaded[found]
        left = self._leaving[found] = asyncio.Event()
        try:
            try:
                async with asyncio.timeout(wait_s):
                    while node.host.live or self._waiting[found]:  # noqa: ASYNC110 - answers end in the engine's thread
                        await asyncio.sleep(LOOK_S)
            except TimeoutError:
                raise Overloaded(f"{found} is in the middle of {node.host.live} answers", "It stays loaded.", retry_after_s=5) from None
            del node
            await asyncio.shield(asyncio.create_task(self._take_out(found)))  # whole, whether or not who asked waits for it
        finally:
            del self._leaving[found]
            left.set()

    async def unload_idle(self, name: str) -> None:
        """Take a model away if nothing uses it now. Requests that come meanwhile are not refused: they have it loaded again."""

        async def leave() -> None:
            if self.on_demand and self._may_go(name):
                await self._take_out(name)

        await asyncio.shield(asyncio.create_task(leave()))

    async def change(self, place: ModelLocation, build: Callable[[], Awaitable[Hosted]]) -> bool:
        """Serve a model that is idle, or not loaded, in another way. Requests that come meanwhile wait for that, as for any load.

        Args:
            build: loads it, once what served it is gone.

        Returns:
            False: it is not idle, or was taken away meanwhile, and nothing was done.

        Raises:
            PacelineError: `build` failed, and it is served no more.
        """
        name = place.name
        if self._stopped.is_set() or name in self._loading or (name in self._loaded and not self._is_idle(name)):
            return False
        self._places[name], self._sign_s = place, self._clock.monotonic()
        task = self._loading[name] = asyncio.create_task(self._change(name, build, name in self._loaded), name=f"change of {name}")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    def drain(self) -> None:
        """Take no more requests and load nothing; what is live goes on. On the event loop."""
        self._stopped.set()
        for node in self._loaded.values():
            node.host.drain()

    def close(self) -> bool:
        """Stop every engine. Idempotent. False if a step outlasted the wait."""
        self._stopped.set()
        closed = [node.close() for node in self._loaded.values()]
        return all(closed)

    # ----------------------------------------------------------------------------------------------------------- for streams

    async def host_of(self, name: str) -> EngineHost:
        """The host of a model, which is loaded first where it is not. Who asks for it admits its request before anything else runs on the loop.

        Raises:
            UnknownModel, NoRoom, ModelAway, ExecutorUnavailable, NodeStopping: see `generate`.
        """
        while True:
            node = await self._found(name)
            if name not in self._leaving:
                return node.host
            if not (self.on_demand or name in self._loading):
                self._check_stays(name)
            del node  # its memory is to come free
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._leaving[name].wait()
            except TimeoutError:
                self._check_stays(name)

    async def _found(self, name: str) -> Hosted:
        """A loaded model; it is loaded first if it is not."""
        self._waiting[name] += 1
        try:
            while (node := self._loaded.get(name)) is None:
                if name not in self._loading and (not self.on_demand or name not in self._places):
                    raise UnknownModel(f"The model {name!r} is not served here", f"Served here: {', '.join(self._loaded) or 'none'}.")
                await self._bring(name)
        except UserError as error:
            raise _load_failed(name, error) from error
        finally:
            self._waiting[name] -= 1
        return node

    @property
    def idle(self) -> list[str]:
        """Those that make way for what is loaded by name, in that order."""
        return sorted(filter(self._may_go, self._loaded), key=lambda one: -self._loaded[one].host.idle_s) if self.on_demand else []

    async def room(self, settings: NodeSettings, layers: LayerRange | None = None) -> MemoryBound:
        """What a load by name may take, once as many have made way as it needs. Arguments and errors are those of `memory_budget.make_room`."""
        while True:
            async with self._counting:
                idle = self.idle
                taken = [self._loaded[one].use() for one in idle], [node.use() for one, node in self._loaded.items() if one not in idle]
                makes_way, bound = await asyncio.to_thread(make_room, settings, *taken, self._budget_bytes, layers)
            if makes_way is None:
                return bound
            if self._may_go(makes_way):  # still
                await self._take_out(makes_way)

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _bring(self, name: str, place: ModelLocation | None = None) -> bool:
        """Wait for a model, which is loaded once for all that wait. Returns whether it was.

        Args:
            place: where its files are from now on; None: where they were.
        """
        task = self._loading.get(name)
        if task is None:
            self._sign_s = self._clock.monotonic()
            task = self._loading[name] = asyncio.create_task(self._load(name, place), name=f"load of {name}")
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a request that still waits raises it
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            while not task.done() and not stopped.done():
                silence_s = silence_allowed(*self._read.get(name, (0, 0)), self._patience_s)
                left_s = self._sign_s + silence_s - self._clock.monotonic()
                if left_s <= 0:
                    raise ModelAway(f"{name} is being loaded, and nothing of it came for {silence_s:g} s", "Try again later.")
                await asyncio.wait({task, stopped}, timeout=min(left_s, self._patience_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if not task.done():
            raise NodeStopping("This machine is being stopped", "Try again in a moment.")
        return task.result()

    async def _load(self, name: str, place: ModelLocation | None) -> bool:
        try:
            while (left := self._leaving.get(name)) is not None:
                await left.wait()
            if name in self._loaded:  # it stayed after all
                return False
            self._places[name] = place or self._places[name]
            async with self._turn:
                self._sign_s = self._clock.monotonic()
                node = await self._built(name)
                if self._stopped.is_set():
                    await asyncio.to_thread(node.close)
                    raise NodeStopping("This machine is being stopped", "Try again in a moment.")
                self.add(node)
                return True
        except UserError as error:
            if not isinstance(error, OutOfMemory):
                self._served.pop(name, None)  # looked for anew when it is asked for again
            raise
        finally:
            self._loading.pop(name)
            self._read.pop(name, None)

    async def _change(self, name: str, build: Callable[[], Awaitable[Hosted]], was_loaded: bool) -> bool:
        try:
            async with self._turn:
                if was_loaded and name not in self._loaded:
                    return False
                if name in self._loaded:
                    if not self._is_idle(name):
                        return False  # it waited for its turn
                    await self._take_out(name)
                self.add(await build())
                return True
        except BaseException:
            if not self.on_demand and name not in self._loaded:
                self._served.pop(name, None)
            raise
        finally:
            self._loading.pop(name)

    async def _built(self, name: str) -> Hosted:
        place = self._places[name]
        settings = await asyncio.to_thread(self._settings_of, place)

        async def alone() -> Hosted:
            return await asyncio.to_thread(self._build_here, name, replace(settings, bound=await self.room(settings)))

        return await (alone() if self.by_plan is None else self.by_plan(place, settings, partial(self._told, name), alone))

    def _build_here(self, name: str, settings: NodeSettings) -> Hosted:
        """In a thread."""
        try:
            return self._build(settings, partial(self._told, name))
        except BaseException as error:
            free_what_failed(error)
            raise

    def _may_go(self, name: str) -> bool:
        node = self._loaded.get(name)
        return node is not None and node.location is not None and self._is_idle(name)

    def _is_idle(self, name: str) -> bool:
        node = self._loaded.get(name)
        return node is not None and not (node.host.live or self._waiting[name] or name in self._leaving)

    def _check_stays(self, name: str) -> None:
        if name in self._leaving:
            raise ModelAway(f"{name} is being unloaded", "Try again in a few seconds.")

    async def _take_out(self, name: str) -> None:
        """Stop a model that nothing waits for, and have its memory back."""
        node = self._loaded.pop(name)
        self._past = self._past.plus(node.host.stats().ended)
        tokenizer = node.model.tokenizer
        if not self.on_demand and name not in self._loading:
            self._served.pop(name)
        elif isinstance(tokenizer, BoundedTokenizer):
            kept = BoundedTokenizer(tokenizer.model, TOKENIZER_IDLE_S)
            self._served[name] = replace(node.host.models()[0], tokenizer=kept)
        if self._on_change is not None:
            self._on_change()
        async with self._counting:
            await asyncio.to_thread(node.close)
            if isinstance(tokenizer, BoundedTokenizer):
                await asyncio.to_thread(tokenizer.close)
            del node  # the last that holds it
            await asyncio.to_thread(free_what_was_frozen)

    def _told(self, name: str, done: int, total: int) -> None:
        """In the thread of a load."""
        if self._stopped.is_set():
            raise NodeStopping("This machine is being stopped", "Try again in a moment.")
        self._read[name], self._sign_s = (done, total), self._clock.monotonic()

    def _find(self, name: str) -> ModelLocation | None:
        """By its name here, as `server.intake.find_model` reads names. Never a path that a client sent."""
        plain, known = name.removesuffix(":latest"), [*self._places.values(), *locations(self._home)]
        exact = next((place for place in known if place.name in {name, plain}), None)
        return exact or next((place for place in known if place.name.lower() == plain.lower()), None)

    def _describe(self, place: ModelLocation) -> LocalModel:
        key = f"{place.name} {identity_key(place.path, 'list')}" if place.path.exists() else place.name
        if key not in self._described:
            self._described[key] = describe(place, self._home)
        return self._described[key]

    def _settings_of(self, place: ModelLocation) -> NodeSettings:
        """A context that was asked for is one of the model given then: another has its own where that is shorter."""
        ref = place.name if place in locations(self._home) else str(place.path)
        asked, own = self._settings.context, self._describe(place).context
        return replace(self._settings, model=ref, context=min(asked, own) if asked and own else asked)

    def _opened(self, place: ModelLocation) -> ServedModel:
        settings = self._settings_of(place)
        setup, known = set_up(settings), self._describe(place)
        digest = known.digest or identity_key(place.path, "fingerprint")
        facts = ModelFacts(known.digest or "", known.nbytes, known.family, stored_as=known.format.rpartition(" ")[2])
        return ServedModel(
            place.name,
            int(self._clock.wall()),
            settings.context or setup.opened.spec.max_context,
            BoundedTokenizer(setup.opened.tokenizer, TOKENIZER_IDLE_S),
            fingerprint_of(ModelRef(digest, setup.weights), ""),  # what its kernels compute is known once it is loaded
            facts,
        )


def _load_failed(name: str, error: UserError) -> ExecutorUnavailable:
    """For clients: what is wrong is the machine's owner's to mend, and not theirs."""
    return ExecutorUnavailable(f"{name} can't be loaded: {error.message}", error.hint, code=LOAD_FAILED)
