"""From a digest to layers in memory: where weights come from, and what of them is loaded.

Law: weights are never taken by name. What can't be had is said in a pipeline's terms, and everything that was begun is undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from paceline.backends import table
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.errors import BadPipelineRequest, ModelNotFound, PacelineError, PipelineError, ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId
from paceline.core.manifest import ModelPart
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner
from paceline.fleet.card import NodeCard
from paceline.fleet.sources import weights_sources
from paceline.node import accelerator
from paceline.node.fetch import Dial, Fetch, fetch_part, in_thread
from paceline.node.setup import load_runner
from paceline.parallel.sessions import StageRequest
from paceline.store.catalog import ModelLocation, find_whole, list_models
from paceline.store.home import Home
from paceline.store.partial import open_part, read_note


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights on this machine, enough of them for what was asked."""

    name: str
    source: WeightSource


class FindsWeights(Protocol):
    """Where a host's weights come from."""

    async def find(self, request: StageRequest, progress: LoadProgress) -> FoundWeights:
        """Weights of that digest with all tensors of those layers.

        Raises:
            WeightsMismatch: only others of that name are to be had.
            PipelineError: none are.
        """
        ...


class FleetWeights:
    """Weights of this machine, and of its fleet.

    Args:
        own: this node.
        home: where models are, and where layers that are fetched go.
        cards: the fleet as it is now.
        dial: reaches its members.
        beside: models that lie elsewhere than in `home`. More may be added while this lives.
    """

    def __init__(
        self,
        own: NodeId,
        home: Home,
        cards: Callable[[], Iterable[NodeCard]],
        dial: Dial,
        beside: Sequence[ModelLocation] = (),
    ) -> None:
        self._own, self._home, self._cards, self._dial, self._beside = own, home, cards, dial, beside

    async def find(self, request: StageRequest, progress: LoadProgress) -> FoundWeights:
        """As `FindsWeights`; layers that are not here are fetched, and stay on disk."""
        part = ModelPart(request.layers, edges=False)
        try:
            return await in_thread(partial(self._here, request.digest, part))
        except ModelNotFound:
            await self._fetch(request, part, progress)
        return await in_thread(partial(self._here, request.digest, part))

    def _here(self, digest: str, part: ModelPart) -> FoundWeights:
        whole = find_whole(digest, self._home, self._beside)
        if whole is not None:
            return FoundWeights(whole[0].name, whole[1])
        source = open_part(digest, part, self._home)
        note = read_note(self._home.partial / digest)
        return FoundWeights(digest[:12] if note is None else note.name, source)

    async def _fetch(self, request: StageRequest, part: ModelPart, progress: LoadProgress) -> None:
        sources = weights_sources(self._own, self._cards(), request.digest)
        if not sources:
            await in_thread(partial(self._refuse, request))
        await fetch_part(Fetch(sources, self._dial, self._home, progress, _say_nothing), part)

    def _refuse(self, request: StageRequest) -> None:
        offers = [(offer.model_id, offer.digest) for card in self._cards() for offer in card.models if offer.digest]
        known = [*offers, *((model.name, model.digest or "") for model in list_models(self._home))]
        others = sorted({digest[:12] for name, digest in known if name.lower() == request.model_id.lower() and digest})
        if others:
            raise WeightsMismatch(
                f"{request.model_id} is known here with digest {', '.join(others)}, and {request.digest[:12]} was asked for"
            )
        raise BadPipelineRequest(f"Neither this machine nor its fleet has {request.model_id} with digest {request.digest[:12]}")


def _say_nothing(words: str) -> None:
    """Callers see bytes, not words."""
    del words


LoadsLayers = Callable[[WeightSource, LoadOptions, LoadProgress], LayerRunner[Any]]
"""Blocks; it is called in a thread."""


def load_layers(source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
    """Load layers into the kernels that this machine has for them.

    Raises:
        UserError: it has none, or they don't fit.
    """
    kernels = table.choose(source.spec, options.weights, cuda=accelerator.has_cuda())
    return load_runner(kernels, source, options, progress)


class _GivenUp(Exception):
    """Ends a load whose callers have all gone."""


async def load_in_thread(load: LoadsLayers, source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
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

    def work() -> None:
        made.append(load(source, options, show))

    try:
        await in_thread(work, give_up)
    except asyncio.CancelledError:
        for runner in made:
            runner.close()
        raise
    return made[0]


def in_pipelines_terms(error: PacelineError) -> PipelineError:
    """Why layers can't be had, for whoever asked for them."""
    match error:
        case PipelineError():
            return error
        case ModelNotFound():
            return BadPipelineRequest(error.message, error.hint)
        case _:
            return ShardUnavailable(error.message, error.hint)
