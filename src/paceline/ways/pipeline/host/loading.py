"""From a digest to layers in memory: where weights come from, what of them is loaded, and how far a load is.

Laws:
- Weights are never taken by name. What can't be had is said in a pipeline's terms, and everything that was begun is undone.
- Bytes done only rise, over those examined, fetched and put into memory, and those of the loads waited for: so a caller can tell a load that goes
  on from one that hangs. Counted on the event loop and in threads.
- Layers that could not be loaded a moment ago are not loaded again for callers that may come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from paceline.backends import table
from paceline.backends.memory import free_what_failed, give_memory_back
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.table import Kernels
from paceline.core.background import end_tasks
from paceline.core.backoff import LeftOut
from paceline.core.clock import Clock
from paceline.core.errors import BadPipelineRequest, ModelNotFound, PacelineError, PipelineError, ShardUnavailable, WeightsMismatch
from paceline.core.manifest import ModelPart
from paceline.core.model import LayerRange, ModelRef, ModelSpec, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner
from paceline.fleet.eligibility import MayGiveWeights
from paceline.fleet.placement import sources_of
from paceline.machine import devices
from paceline.machine.fetch import Dial, Fetch, fetch_part, in_thread
from paceline.machine.setup import load_runner
from paceline.store.catalog import ModelLocation, find_whole, list_models
from paceline.store.home import Home
from paceline.store.partial import Arrivals, open_arriving, open_part, read_note
from paceline.ways.pipeline.executor.route import StageRequest


@dataclass(slots=True)
class LoadPhase:
    """One thing that is done with all bytes."""

    done: int = 0
    total: int = 0

    def show(self, done: int, total: int) -> None:
        self.done, self.total = max(self.done, done), max(self.total, total)


@dataclass(slots=True)
class LoadMeter:
    examined: LoadPhase = field(default_factory=LoadPhase)
    """Files that a source reads, to describe them for the first time."""
    fetched: LoadPhase = field(default_factory=LoadPhase)
    packed: LoadPhase = field(default_factory=LoadPhase)
    _fetches: list[LoadPhase] = field(default_factory=list[LoadPhase])
    _ahead: list[LoadMeter] = field(default_factory=list["LoadMeter"])

    def wait_for(self, other: LoadMeter) -> None:
        """Another load comes first: its bytes count as this one's."""
        self._ahead.append(other)

    def wait_for_fetch(self, other: LoadMeter) -> None:
        """Another load's fetch comes first: its bytes count as this one's."""
        self._fetches += (other.examined, other.fetched)

    def end(self) -> None:
        """Nothing more is fetched or packed: the load is over, or was given up."""
        for phase in (self.examined, self.fetched, self.packed):
            phase.done = phase.total

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes done, of bytes; 0 of 0 while nothing is known. What is fetched is packed afterwards, so it counts twice.

        Between the two, kernels that pack are compiled: then all bytes that count are done.
        """
        phases = (self.examined, self.fetched, self.packed, *self._fetches)
        done = sum(phase.done for phase in phases)
        is_fetching = self.fetched.done < self.fetched.total and not self.packed.total
        total = sum(phase.total for phase in phases) + (self.fetched.total if is_fetching else 0)
        for other in self._ahead:
            more_done, more_total = other.progress
            done, total = done + more_done, total + more_total
        return done, total


RETRY_S = 120.0
"""For so long. A caller that is there has them tried at once."""


class FailedLoads:
    """Layers that could not be loaded, and why."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_out: LeftOut[tuple[ModelRef, LayerRange], PipelineError] = LeftOut()

    def check(self, request: StageRequest) -> None:
        """Raise ShardUnavailable where its layers could not be loaded, and that is not long ago."""
        error = self._left_out.now(self._clock.monotonic()).get((request.model, request.layers))
        if error is not None:
            raise ShardUnavailable(error.message, error.hint)

    def note(self, request: StageRequest, error: PipelineError) -> PipelineError:
        """They could not be loaded. Returns `error`, to be raised."""
        self._left_out.add((request.model, request.layers), self._clock.monotonic() + RETRY_S, error)
        return error

    def forget(self, request: StageRequest) -> None:
        self._left_out.remove((request.model, request.layers))


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights on this machine, or on their way, enough of them for what was asked."""

    name: str
    source: WeightSource
    stop: Callable[[], None] = lambda: None
    """Ends what is still on its way, and reads that wait for it. On the event loop; idempotent."""


class FindsWeights(Protocol):
    """Where a host's weights come from."""

    async def find(self, request: StageRequest, meter: LoadMeter) -> FoundWeights:
        """Weights of that digest with all tensors of those layers; `meter` is told what is examined and fetched for that.

        Raises:
            WeightsMismatch: only others of that name are to be had.
            PipelineError: none are.
        """
        ...


class FleetWeights:
    """Weights of this machine, and of its fleet.

    Args:
        home: where models are, and where layers that are fetched go.
        beside: models that lie elsewhere than in `home`. More may be added while this lives.
    """

    def __init__(
        self,
        home: Home,
        givers: Callable[[], MayGiveWeights],
        dial: Dial,
        beside: Sequence[ModelLocation] = (),
    ) -> None:
        self._home, self._givers, self._dial, self._beside = home, givers, dial, beside
        self._fetching: dict[str, tuple[asyncio.Task[None], LoadMeter]] = {}
        """By digest: one fetch of a model at a time."""

    async def find(self, request: StageRequest, meter: LoadMeter) -> FoundWeights:
        """As `FindsWeights`; layers that are not here are fetched, can be read while they come, and stay on disk."""
        part = ModelPart(request.layers, edges=False)
        while True:
            while (other := self._fetching.get(request.digest)) is not None:
                fetching, its_meter = other
                meter.wait_for_fetch(its_meter)
                await asyncio.wait({fetching})
            try:
                return await in_thread(partial(self._here, request.digest, part))
            except ModelNotFound:
                if request.digest not in self._fetching:  # another load may have begun one meanwhile
                    return await self._arriving(request, part, meter)

    def _here(self, digest: str, part: ModelPart) -> FoundWeights:
        whole = find_whole(digest, self._home, self._beside)
        if whole is not None:
            return FoundWeights(whole[0].name, whole[1])
        source = open_part(digest, part, self._home)
        note = read_note(self._home.partial / digest)
        return FoundWeights(digest[:12] if note is None else note.name, source)

    async def _arriving(self, request: StageRequest, part: ModelPart, meter: LoadMeter) -> FoundWeights:
        givers = self._givers()
        sources = sources_of(givers, request.digest)
        if not sources:
            return await in_thread(partial(self._refuse, request, givers))
        # Nothing is awaited between the caller's look at what is being fetched and this fetch's entry there.
        arrivals = Arrivals()
        fetch = Fetch(sources, self._dial, self._home, meter.fetched.show, _words_unseen, examined=meter.examined.show)
        fetching = asyncio.create_task(fetch_part(fetch, part, arrivals), name=f"fetch-{request.model_id}")
        self._fetching[request.digest] = fetching, meter

        def over(task: asyncio.Task[None]) -> None:
            error = ShardUnavailable("The fetch was given up") if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, PacelineError):
                logger.error("a fetch failed", exc_info=error)
                error = PipelineError(f"A fetch failed: {type(error).__name__}")
            arrivals.end(error or ModelNotFound("What came is not all that was asked for", "Ask again"))
            del self._fetching[request.digest]

        def stop() -> None:
            fetching.cancel()

        fetching.add_done_callback(over)
        try:
            source = await in_thread(partial(open_arriving, part, self._home, arrivals), stop)
        except ModelNotFound:  # there was nothing to fetch any more
            return await in_thread(partial(self._here, request.digest, part))
        except BaseException:
            stop()
            raise
        return FoundWeights(sources[0].model_id, source, stop)

    async def close(self) -> None:
        await end_tasks(*(task for task, _ in self._fetching.values()))

    def _refuse(self, request: StageRequest, givers: MayGiveWeights) -> NoReturn:
        offers = [(offer.model_id, offer.digest) for card in givers.cards for offer in card.models if offer.digest and offer.shard is None]
        known = [*offers, *((model.name, model.digest or "") for model in list_models(self._home))]
        others = sorted({digest[:12] for name, digest in known if name.lower() == request.model_id.lower() and digest})
        if others:
            raise WeightsMismatch(
                f"{request.model_id} is known here with digest {', '.join(others)}, and {request.digest[:12]} was asked for"
            )
        raise BadPipelineRequest(f"Neither this machine nor its fleet has {request.model_id} with digest {request.digest[:12]}")


def _words_unseen(words: str) -> None:
    """Callers see bytes, not words."""
    del words


LoadsLayers = Callable[[WeightSource, LoadOptions, LoadProgress], LayerRunner[Any]]
"""Blocks; it is called in a thread."""


def load_layers(source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
    """Load layers into the kernels that this machine has for them.

    Raises:
        UserError: it has none, or they don't fit.
    """
    return load_runner(kernels_for(source.spec, options.weights), source, options, progress)


def kernels_for(spec: ModelSpec, weights: WeightsFormat) -> Kernels:
    """Which kernels run a stage's layers here.

    Raises:
        UserError: none do.
    """
    return table.choose(spec, weights, device=devices.fastest_device())


class _GivenUp(Exception):
    """Ends a load whose callers have all gone."""


async def load_in_thread(load: LoadsLayers, found: FoundWeights, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
    """Load layers apart from the loop. Cancelled, it ends soon and leaves nothing in memory."""
    given_up = False
    made: list[LayerRunner[Any]] = []

    def show(done: int, total: int) -> None:
        if given_up:
            raise _GivenUp
        progress(done, total)

    def give_up() -> None:
        nonlocal given_up
        given_up = True
        found.stop()

    def work() -> None:
        try:
            made.append(load(found.source, options, show))
        except BaseException as error:
            free_what_failed(error)
            raise

    try:
        await in_thread(work, give_up)
    except asyncio.CancelledError:
        await in_thread(partial(free_runners, made))
        raise
    return made[0]


def free_runners(runners: list[LayerRunner[Any]]) -> None:
    """Close runners and give their memory back. The list, which it empties, is the last to hold them. Blocks for as long as freeing takes."""
    while runners:
        runners.pop().close()
    give_memory_back()


def in_pipelines_terms(error: PacelineError) -> PipelineError:
    """Why layers can't be had, in words for the caller."""
    match error:
        case PipelineError():
            return error
        case ModelNotFound():
            return BadPipelineRequest(error.message, error.hint)
        case _:
            return ShardUnavailable(error.message, error.hint)
