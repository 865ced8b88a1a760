"""Has the machines of a pipeline begin to load their layers while this one still loads its own: neither waits for the other.

What is asked for is what a spare is asked for: nothing is leased, and a machine that has not the room, or does not answer, is found out when the
route is opened.

Has spare machines load the spans of a pipeline before they are needed, as the plan says, so that a loss costs no load.

Law: a spare leases nothing, and its host decides whether it has the memory. While a route is looked for, spares are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from paceline.core.background import in_background_of
from paceline.core.errors import FleetError, PipelineError, PlacementError
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.card import NodeCard
from paceline.ways.pipeline.client import warm_layers
from paceline.ways.pipeline.cover import spares_for
from paceline.ways.pipeline.executor.sessions import StageLoading, StageRequest
from paceline.ways.pipeline.routes.choosing import Wanted, choose, plan_request
from paceline.ways.pipeline.routes.opening import SeesFleet

logger = logging.getLogger(__name__)


def begin_loads(
    fleet: SeesFleet, request: StageRequest, wanted: Wanted, loop: asyncio.AbstractEventLoop, planned: tuple[LayerSpan, ...] = ()
) -> tuple[LayerSpan, ...]:
    """Ask the machines that will run a pipeline, as things are now, to load their layers. For any thread.

    Args:
        fleet: this node.
        request: what every stage is asked for, but for its layers.
        wanted: what the pipeline is for.
        loop: the node's.
        planned: which these are; none: it is planned now.

    Returns:
        What they were asked for; nothing where no machine can take part now.
    """
    try:
        parts = planned or tuple(choose(fleet.cards(), fleet.trust(), fleet.node_id, wanted, frozenset()))
    except PipelineError as error:
        logger.info("no machine loads ahead: %s", error.message)
        return ()

    async def ask(part: LayerSpan) -> None:
        try:
            await ask_to_load(fleet, request, part.node_id, part.layers)
        except FleetError as error:
            logger.info("%s does not load ahead: %s", part.node_id, error.message)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, parts))

    in_background_of(loop, ask_all(), f"loads of {request.model_id} ahead")
    return parts


async def ask_to_load(fleet: SeesFleet, request: StageRequest, node_id: NodeId, layers: LayerRange) -> StageLoading | None:
    """Ask a machine to load layers that it may be asked to run. On the event loop.

    Args:
        request: what every stage is asked for, but for its layers.

    Returns:
        How far it is; None: it has them.

    Raises:
        FleetError: it does not, or can't be asked.
    """
    return await warm_layers(fleet.channel(node_id), node_id, replace(request, layers=layers))


def still_there(parts: Iterable[LayerSpan], cards: Sequence[NodeCard], wanted: Wanted, exclude: Collection[NodeId]) -> bool:
    """Whether all machines that load ahead may run a pipeline, now that it is known what kernels compute here."""
    by_id = {card.node_id: card for card in cards}
    return all(part.node_id in by_id and part.node_id not in exclude and _same_bytes(by_id[part.node_id], wanted) for part in parts)


def _same_bytes(card: NodeCard, wanted: Wanted) -> bool:
    own = {offer.numerics_id for offer in card.models if (offer.digest, offer.weights) == (wanted.digest, wanted.weights)}
    return own <= {"", wanted.numerics_id}


ASK_S = 10.0
"""Between two asks of a spare, which keep its layers from being idle. Raising it: a machine that joins becomes a spare later."""


class SpareKeeper:
    """Of one pipeline.

    Args:
        request: what every stage is asked for, but for its layers.
        wanted: what the pipeline is for.
    """

    def __init__(self, fleet: SeesFleet, request: StageRequest, wanted: Wanted, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet, self._request, self._wanted, self._loop = fleet, request, wanted, loop
        self._keeping: asyncio.Task[None] | None = None
        """The event loop's alone."""
        self._said: dict[NodeId, str] = {}

    def keep(self, parts: Sequence[LayerSpan], excluded: Callable[[], frozenset[NodeId]]) -> None:
        """There is a route over these machines. For any thread.

        Args:
            excluded: machines that may be no spares now; called on the event loop.
        """
        self._on_loop(lambda: self._begin(tuple(parts), excluded))

    def stop(self) -> None:
        """There is none. For any thread; idempotent."""
        self._on_loop(self._end)

    async def look(self, parts: Sequence[LayerSpan], exclude: frozenset[NodeId] = frozenset()) -> dict[NodeId, bool]:
        """Ask the spares for a route over these machines to have its spans loaded. On the event loop.

        Args:
            exclude: machines that may be no spares.

        Returns:
            Whether each has.
        """
        own, taken = self._fleet.node_id, frozenset(part.node_id for part in parts)
        request = plan_request(own, self._wanted, exclude)
        try:
            spares = spares_for(self._fleet.cards(), request, [part.layers for part in parts], taken, self._fleet.trust())
        except PlacementError as error:
            logger.debug("no spares: %s", error)
            return {}
        have: dict[NodeId, bool] = {}
        for spare in spares:
            try:
                loading = await ask_to_load(self._fleet, self._request, spare.node_id, spare.layers)
            except FleetError as error:
                self._say(spare.node_id, f"is no spare for layers {spare.layers.words}: {error.message}")
                continue
            have[spare.node_id] = loading is None
            self._say(spare.node_id, f"{'has' if loading is None else 'loads'} layers {spare.layers.words} as a spare")
        return have

    def _say(self, node_id: NodeId, words: str) -> None:
        if self._said.get(node_id) != words:
            self._said[node_id] = words
            logger.info("%s %s", node_id, words)

    def _on_loop(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # a loop that is closed keeps no spares
            self._loop.call_soon_threadsafe(work)

    def _begin(self, parts: Sequence[LayerSpan], excluded: Callable[[], frozenset[NodeId]]) -> None:
        self._end()
        self._keeping = self._fleet.background.keep(lambda: self._keep(parts, excluded), f"spares of {self._request.model_id}")

    def _end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _keep(self, parts: Sequence[LayerSpan], excluded: Callable[[], frozenset[NodeId]]) -> None:
        while True:
            await self.look(parts, excluded())
            await asyncio.sleep(ASK_S)
