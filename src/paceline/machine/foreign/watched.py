"""One engine of another maker that this node offers: looked at every few seconds, and tested after a failure.

Laws:
- The owner is not disturbed. Looks only read; a model is tested with one token only if it is loaded and a request to it failed. Engines are never stopped here.
- If an engine failed a request for a model, it is offered again once the engine has answered a test.
- A name that means another model than at the last look is never answered with: each request looks first, unless the last look is `FRESH_S` old or younger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from paceline.core.background import end_tasks, in_background
from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.encoding import Task
from paceline.core.errors import EngineGone, ModelAway, PacelineError
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.inference import ChunkStream
from paceline.core.via import leads_back
from paceline.engines.contract import Ask, Busy, EngineIdentity, EngineModel, ForeignEngine, Takes
from paceline.engines.finding import working_folder
from paceline.engines.sense import MOST_MODELS, made_sense, shown_identity, shown_models
from paceline.fleet.card import ModelOffer
from paceline.fleet.engines import loading
from paceline.machine.foreign.answer import ForeignAnswer
from paceline.machine.foreign.encoding import encode_texts
from paceline.machine.foreign.model import ForeignModel, learn_digest, take_in
from paceline.machine.foreign.rates import Rates, Timed
from paceline.machine.foreign.silence import Silence
from paceline.machine.foreign.state import EngineState, SharedModel
from paceline.store.home import Home

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at an engine. Raising it: a model that an engine gains or loses is noticed later."""
FRESH_S = 2.0
"""Seconds for which a look counts as new. Raising it: an engine that changed its model gets prompts of the one before for longer; lowering it: more looks."""
LOAD_FRESH_S = 0.5
"""The same for a model that was not loaded. Raising it: a load that ended is announced and measured again; lowering it: more looks while a model is loaded."""
TEST_S, MOST_TEST_S = 1.0, 60.0
"""Seconds from a failed request to a test of its model: the first pause, doubled with each failed test, and the longest. Raising them: a model comes back later."""
LEAST_LOAD_S = 0.1
"""Seconds that a measured load counts at least: 0 means that none was measured."""
HANGS = 3
"""Failed looks in a row until an engine that this node started is started again. Raising it: an engine that hangs stays away for longer."""


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
        mark: Callable[[], str] = str,
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
        self._folder: Path | None = None
        """The engine's working folder, once it was looked for. None: it was not found."""
        self._has_folder = False
        self.trouble = ""
        """Why the last look failed; empty: it did not."""
        self.busy = Busy()
        self._others = 0
        """Requests of other programs at the last look, as far as the engine says."""
        self._sent = 0
        """Sequences of this node that the engine was asked for and that have not ended."""
        self._silence = Silence()
        self._load_s: dict[str, float] = {}
        """Seconds of the last load that a request caused, by the engine's own name of the model."""

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
                self._others = max(0, self._at_work - self._sent)
                await made_sense(self.url, self._take(identity, told))
                self.trouble = ""
                self._failed_looks = 0
                self._is_up.set()
            except PacelineError as error:
                if not self.trouble:
                    logger.warning("%s at %s: %s", self.identity, self.url, error)
                self.trouble = str(error)
                self._has_folder = False
                self._is_up.clear()
                self._failed_looks += 1
                if self._revive is not None and self._failed_looks == HANGS:
                    self._failed_looks = 0
                    await self._revive(self.trouble)
            self._looked_s = self._clock.monotonic()
        if before != [one.model for one in self.offered]:
            self._changed()

    async def _take(self, identity: EngineIdentity, told: Sequence[EngineModel]) -> None:
        identity = shown_identity(identity)
        wanted = [
            one
            for one in await self._located(shown_models(self.url, told))
            if (one.takes or one.works)
            and (not self.sharing.models or one.name in self.sharing.models)
            and not leads_back(one.via, self._mark())
        ]
        if len(wanted) > MOST_MODELS and not self._known:
            logger.warning("%s at %s has %d models, and the first %d are offered", identity, self.url, len(wanted), MOST_MODELS)
        known, self.identity = self._known, identity
        found: dict[str, Offered] = {}
        for one in wanted[:MOST_MODELS]:
            same = known.get(one.name)
            if same is not None and same.model.identity == identity and same.model.is_as(one):
                same.model = replace(same.model, told=one, context=one.context or same.model.context)
                found[one.name] = same
            else:
                model = await asyncio.to_thread(self._take_in, one, len(wanted))
                learns = (
                    self.sharing.is_here
                    and (model.tokenizer is not None or not model.writes)
                    and not model.ref.has_digest
                    and one not in self._tried
                )
                found[one.name] = Offered(model, learns=learns)
                if same is not None and same.model.told.loaded != one.loaded:  # some engines say more about a model that is loaded
                    found[one.name].rates = same.rates
        for name, gone in known.items():
            if found.get(name) is not gone and gone.test is not asyncio.current_task():  # a test ends by itself
                await end_tasks(gone.test)
        self._known = found
        if self._learning is None or self._learning.done():
            self._learning = in_background(self._learn(), f"digests of models at {self.url}")

    async def _located(self, told: Sequence[EngineModel]) -> list[EngineModel]:
        """Return models with the paths that the engine means: relative ones lie in its own working folder. Paths that mean nothing here are left out."""
        is_relative = any(one.path is not None and not one.path.is_absolute() for one in told)
        if is_relative and self.sharing.is_here and not self._has_folder:
            port = urlsplit(self.engine.door.url).port
            self._has_folder = True
            self._folder = None if port is None else await asyncio.to_thread(working_folder, port)
        folder = self._folder

        def located(path: Path | None) -> Path | None:
            return path if path is None or path.is_absolute() else None if folder is None else folder / path

        return [replace(one, path=located(one.path)) for one in told]

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

    @property
    def _at_work(self) -> int:
        """Requests that run and wait there, as far as the engine says."""
        return (self.busy.running or 0) + (self.busy.waiting or 0)

    def answer(self, offered: Offered, request: GenerationRequest) -> ChunkStream:
        model, ahead, sent = offered.model, offered.live, 0
        is_first = not offered.live

        async def still_there() -> float | None:
            now = await self.check_same(offered.model)
            nonlocal ahead, sent
            ahead, sent = ahead + self._others, len(request.indices)
            self._sent += sent
            return None if now.model.told.loaded else loading(self.offer(now)).seconds

        def allowed(size: int) -> float | None:
            return None if self._others else offered.rates.silence_s(size)

        async def is_loaded() -> bool:
            await self.look(fresh_s=0.0)
            now = self._known.get(model.told.name)
            return bool(self.trouble) or now is None or now.model.told.loaded

        def timed(one: Timed) -> None:
            if not one.loaded and is_first and not one.place:  # a later request waits for the rest of a load
                self._load_s[model.told.name] = max(LEAST_LOAD_S, one.first_s - offered.rates.prompt_s(one.read_tokens))
            offered.rates.learn(one, ahead + one.place + 1)

        def ended(error: BaseException | None) -> None:
            offered.live -= len(request.indices)
            self._sent -= sent
            if isinstance(error, EngineGone):
                self.failed(offered, error)

        offered.live += len(request.indices)
        return ForeignAnswer(
            *(self.engine, model, request, self._clock),
            before=still_there,
            silence=self._silence,
            allowed=allowed,
            is_loaded=is_loaded,
            ended=ended,
            timed=timed,
        )

    async def check_same(self, model: ForeignModel) -> Offered:
        """Look whether the engine still has a model, and return it as it is there now.

        Raises:
            EngineGone, ModelAway: it does not.
        """
        await self.look(fresh_s=FRESH_S if model.told.loaded else LOAD_FRESH_S)
        now = self._known.get(model.told.name)
        if self.trouble:
            raise EngineGone(self.trouble)
        if now is None or now.model.ref != model.ref:
            raise ModelAway(f"{self.identity} has no {model.name} any more", "Try again in a few seconds.")
        return now

    def failed(self, offered: Offered, error: EngineGone) -> None:
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
            if self._known.get(offered.model.told.name) is not offered:
                return  # the engine has another model by that name now, or none
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
        """Have a model write one token, or work on one word."""
        if not model.writes:
            await encode_texts(self.engine, model, ("Hi",), None if Task.EMBED in model.tasks else "Hi")
            return
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
        return one.model.offer(one.rates, max(one.live, self._at_work), self._load_s.get(one.model.told.name, 0.0))

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
