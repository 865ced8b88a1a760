"""Engines of other makers that this node offers: one `core.inference.Inference` over all.

Laws:
- The owner is not disturbed. Looks only read; a model is tested with one token only if it is loaded and a request to it failed. Engines are never stopped here.
- If an engine failed a request for a model, it is offered again once the engine has answered a test.
- An engine outside of the home network never answers for one at home, even while that one is away: it is offered under names that no engine at home has.
- A name that means another model than at the last look is never answered with: each request looks first, unless the last look is `FRESH_S` old or younger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from paceline.core.background import end_tasks, in_background
from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.errors import EngineGone, ModelAway, PacelineError, UnknownModel, WayNotAllowed
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.inference import ChunkStream, Progress, ServedModel
from paceline.core.stats import EngineStats
from paceline.core.via import leads_back, new_mark, outside, through
from paceline.engines.contract import Ask, Busy, EngineIdentity, EngineModel, ForeignEngine, Takes
from paceline.engines.sense import made_sense
from paceline.fleet.card import ModelOffer
from paceline.machine.foreign.answer import ForeignAnswer, Timed
from paceline.machine.foreign.model import ForeignModel, learn_digest, served, take_in
from paceline.machine.foreign.state import EngineState, SharedModel
from paceline.store.home import Home

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at an engine. Raising it: a model that an engine gains or loses is noticed later."""
FRESH_S = 2.0
"""Seconds for which a look counts as new. Raising it: an engine that changed its model gets prompts of the one before for longer; lowering it: more looks."""
TEST_S, MOST_TEST_S = 1.0, 60.0
"""Seconds from a failed request to a test of its model: the first pause, doubled with each failed test, and the longest. Raising them: a model comes back later."""
HANGS = 3
"""Failed looks in a row until an engine that this node started is started again. Raising it: an engine that hangs stays away for longer."""
NEWER = 0.3
"""Weight of the newest answer in a measured rate. Raising it: rates follow sooner, and flap more."""
LEAST_READ, LEAST_WRITTEN = 64, 8
"""Tokens from which a prompt's or an answer's time counts as a rate."""


Revive = Callable[[str], Awaitable[None]]
"""Starts an engine again, with the reason."""


@dataclass(frozen=True, slots=True)
class Offering:
    """A person's settings for an engine."""

    name: str = ""
    """Name of its only model for clients; empty: the model's own."""
    models: Collection[str] = ()
    """Models to offer, as the engine names them; empty: all."""
    is_here: bool = True
    """It runs on this machine."""
    plain_http: bool = False
    leaves_network: bool = False


@dataclass(slots=True)
class Rates:
    """Rates of the answers that passed."""

    tokens_per_s: float = 0.0
    prompt_per_s: float = 0.0

    def learn(self, timed: Timed) -> None:
        if timed.read_tokens >= LEAST_READ and timed.first_s > 0:
            self.prompt_per_s = _newer(self.prompt_per_s, timed.read_tokens / timed.first_s)
        if timed.tokens >= LEAST_WRITTEN and timed.rest_s > 0:
            self.tokens_per_s = _newer(self.tokens_per_s, (timed.tokens - 1) / timed.rest_s)


def _newer(known: float, seen: float) -> float:
    return seen if not known else (1 - NEWER) * known + NEWER * seen


@dataclass(eq=False, slots=True)
class Offered:
    """A model of an engine, and what was seen of it."""

    model: ForeignModel
    rates: Rates = field(default_factory=Rates)
    live: int = 0
    """Sequences of this node that run there."""
    test: asyncio.Task[None] | None = None
    """A request failed: what finds out when the model answers again."""
    learns: bool = False
    """Its digest is being computed. Until then the fleet does not see it: an answer could not move to a holder that knows the digest already."""


class WatchedEngine:
    """One engine, looked at every few seconds."""

    def __init__(
        self,
        engine: ForeignEngine,
        identity: EngineIdentity,
        sharing: Offering,
        home: Home,
        clock: Clock,
        changed: Callable[[], None],
        revive: Revive | None = None,
        mark: str = "",
    ) -> None:
        self.engine, self.identity, self.sharing, self._revive = engine, identity, sharing, revive
        self._failed_looks = 0
        self._home, self._clock, self._changed, self._mark = home, clock, changed, mark
        self._known: dict[str, Offered] = {}
        """By the engine's own name, also of models that failed."""
        self._looked_s: float | None = None
        self._looking = asyncio.Lock()
        self._learning: asyncio.Task[None] | None = None
        self._tried: set[EngineModel] = set()
        """Models that need no further attempt: the digest was computed, or can't be."""
        self._is_up = asyncio.Event()
        self.trouble = ""
        """Why the last look failed; empty: it did not."""
        self.busy = Busy()

    @property
    def url(self) -> str:
        """The engine's address. Engines that this node started may differ in their Unix sockets alone."""
        door = self.engine.door
        return door.url if door.socket is None else str(door.socket)

    @property
    def is_own(self) -> bool:
        """This node started the engine."""
        return self._revive is not None

    @property
    def offered(self) -> list[Offered]:
        """Models that requests may be sent to."""
        return [] if self.trouble else [one for one in self._known.values() if one.test is None]

    @property
    def known(self) -> list[Offered]:
        return list(self._known.values())

    async def look(self, *, fresh_s: float | None = None) -> None:
        """See what the engine has now. Its failure is remembered, not raised.

        Args:
            fresh_s: do nothing if the last look is at most this many seconds old; None: look in any case.
        """
        async with self._looking:
            if fresh_s is not None and self._looked_s is not None and self._clock.monotonic() - self._looked_s <= fresh_s:
                return
            before = [one.model for one in self.offered]
            try:
                if (identity := await made_sense(self.url, self.engine.identify())) is None:
                    raise EngineGone(f"What answers at {self.url} is no {self.identity.name} any more")
                is_ready = await made_sense(self.url, self.engine.is_ready())
                told = await made_sense(self.url, self.engine.models()) if is_ready else ()
                self.busy = await made_sense(self.url, self.engine.busy())
                await made_sense(self.url, self._take(identity, told))
                self.trouble = ""
                self._failed_looks = 0
                self._is_up.set()
            except PacelineError as error:
                if not self.trouble:
                    logger.warning("%s at %s: %s", self.identity, self.url, error)
                self.trouble = str(error)
                self._is_up.clear()
                self._failed_looks += 1
                if self._revive is not None and self._failed_looks == HANGS:
                    self._failed_looks = 0
                    await self._revive(self.trouble)
            self._looked_s = self._clock.monotonic()
        if before != [one.model for one in self.offered]:
            self._changed()

    async def _take(self, identity: EngineIdentity, told: Sequence[EngineModel]) -> None:
        wanted = [
            one
            for one in told
            if one.takes and (not self.sharing.models or one.name in self.sharing.models) and not leads_back(one.via, self._mark)
        ]
        known, self.identity = self._known, identity
        found: dict[str, Offered] = {}
        for one in wanted:
            same = known.get(one.name)
            if same is not None and same.model.identity == identity and same.model.is_as(one):
                same.model = replace(same.model, told=one, context=one.context or same.model.context)
                found[one.name] = same
            else:
                model = await asyncio.to_thread(self._take_in, one, len(wanted))
                learns = self.sharing.is_here and model.tokenizer is not None and not model.ref.has_digest and one not in self._tried
                found[one.name] = Offered(model, learns=learns)
        for name, gone in known.items():
            if found.get(name) is not gone:
                await end_tasks(gone.test)
        self._known = found
        if self._learning is None or self._learning.done():
            self._learning = in_background(self._learn(), f"digests of models at {self.url}")

    async def _learn(self) -> None:
        """Compute digests, so that other machines that have the same weights may continue answers."""
        for name, one in tuple(self._known.items()):
            told = one.model.told
            if not one.learns:
                continue
            self._tried.add(told)
            if await asyncio.to_thread(learn_digest, told, self._home) and self._known.get(name) is one:
                one.model = await asyncio.to_thread(self._take_in, told, len(self._known))
            one.learns = False
            self._changed()

    def _take_in(self, told: EngineModel, n_models: int) -> ForeignModel:
        sharing, created = self.sharing, int(self._clock.wall())
        return take_in(
            self.identity,
            told,
            self._home,
            created,
            name=sharing.name if n_models == 1 else "",
            is_here=sharing.is_here,
            plain_http=sharing.plain_http,
            leaves=sharing.leaves_network,
        )

    def answer(self, offered: Offered, request: GenerationRequest) -> ChunkStream:
        model = offered.model

        async def still_there() -> None:
            await self.look(fresh_s=FRESH_S)
            now = self._known.get(model.told.name)
            if self.trouble:
                raise EngineGone(self.trouble)
            if now is None or now.model.ref != model.ref:
                raise ModelAway(f"{self.identity} has no {model.name} any more", "Try again in a few seconds.")

        def ended(error: BaseException | None) -> None:
            offered.live -= len(request.indices)
            if isinstance(error, EngineGone):
                self._failed(offered, error)

        offered.live += len(request.indices)
        return ForeignAnswer(self.engine, model, request, self._clock, before=still_there, ended=ended, timed=offered.rates.learn)

    def _failed(self, offered: Offered, error: EngineGone) -> None:
        """Offer a model no more until it has answered a test."""
        if offered.test is None and self._known.get(offered.model.told.name) is offered:
            logger.warning("%s is offered no more until it answers a test: %s", offered.model.name, error)
            offered.test = in_background(self._tested(offered), f"test of {offered.model.name}")
            self._changed()

    async def _tested(self, offered: Offered) -> None:
        backoff = Backoff(TEST_S, MOST_TEST_S)
        while True:
            await self.look()
            await self._is_up.wait()
            if not offered.model.told.loaded:
                break  # a test would make the engine load it, which only a request may
            await asyncio.sleep(backoff.fail(self._clock.monotonic()))
            try:
                await made_sense(self.url, self._test(offered.model))
                break
            except PacelineError as error:
                logger.info("%s failed a test: %s", offered.model.name, error)
        offered.test = None
        self._changed()

    async def _test(self, model: ForeignModel) -> None:
        """Have a model write one token."""
        prompt: tuple[int, ...] | str | dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
        if model.tokenizer is not None and model.form is not Takes.MESSAGES:
            ids = await asyncio.to_thread(model.tokenizer.encode, "Hi")
            prompt = tuple(ids) if model.form is Takes.IDS else "Hi"
        async with aclosing(self.engine.generate(Ask(model.told.name, prompt, 1, SamplingParams(temperature=0.0)))) as pieces:
            async for piece in pieces:
                if piece.finish is not None:
                    return
        raise EngineGone(f"{self.identity} ended a test of {model.name} before its end")

    def offer(self, one: Offered) -> ModelOffer:
        """Return what the node's card says of a model."""
        under_way = max(one.live, (self.busy.running or 0) + (self.busy.waiting or 0))
        return one.model.offer(one.rates.tokens_per_s, one.rates.prompt_per_s, under_way)

    @property
    def state(self) -> EngineState:
        """The engine as its owner sees it."""
        tested = "a request failed, and it is being tested"
        return EngineState(
            self.url,
            str(self.identity),
            tuple(SharedModel(self.offer(one), one.model.context, one.live, tested if one.test else "") for one in self.known),
            self.busy.running,
            self.busy.waiting,
            self.trouble,
            self.sharing.leaves_network,
            self.sharing.plain_http,
        )

    async def close(self) -> None:
        """Look no more, and close the connections. The engine goes on."""
        await end_tasks(self._learning, *(one.test for one in self._known.values()))
        await self.engine.close()


class ForeignEngines:
    """Implements `core.inference.Inference`. For one event loop; `models` and `expects` for any thread."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home, self._clock = home, clock
        self._engines: dict[WatchedEngine, asyncio.Task[None]] = {}
        """With the tasks that look at them. Their addresses are no keys: that of an engine that this node started changes."""
        self._by_name: dict[str, tuple[WatchedEngine, Offered]] = {}
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
        """Models that requests may be sent to, one for each name."""
        return tuple(one for _, one in self._by_name.values())

    def offers(self) -> tuple[ModelOffer, ...]:
        """Return what the node's card says of them."""
        return tuple(engine.offer(one) for engine, one in self._by_name.values() if not one.learns)

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
        watched = WatchedEngine(engine, identity, sharing, self._home, self._clock, self._changed, revive, self.mark)
        await self.remove(watched.url)
        await watched.look()
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
        self._by_name = {}

    async def _watch(self, watched: WatchedEngine) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await watched.look()

    def _changed(self) -> None:
        by_name: dict[str, tuple[WatchedEngine, Offered]] = {}
        at_home = {one.model.name for engine in self._engines if not engine.sharing.leaves_network for one in engine.known}
        for engine in self._engines:
            for one in engine.offered:
                if not engine.sharing.leaves_network or one.model.name not in at_home:
                    by_name.setdefault(one.model.name, (engine, one))
        self._by_name = by_name
        self._on_change()

    # ------------------------------------------------------------------------------------------------------------ for the server

    def models(self) -> Sequence[ServedModel]:
        return [served(one.model) for _, one in self._by_name.values()]

    def expects(self, model: str) -> bool:
        """See `Inference.expects`: an engine that is being tested or is away may come back with it."""
        return any(one.model.name == model for engine in self._engines for one in engine.known)

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
