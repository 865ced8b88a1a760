"""Has the machines of a pipeline begin to load their layers while this one still loads its own: neither waits for the other.

What is asked for is what a spare is asked for: nothing is leased, and a machine that has not the room, or does not answer, is found out when the
route is opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from paceline.core.background import in_background_of
from paceline.core.errors import FleetError, PipelineError
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.card import NodeCard
from paceline.ways.pipeline.client import warm_layers
from paceline.ways.pipeline.executor.sessions import StageLoading, StageRequest
from paceline.ways.pipeline.routes.choosing import Part, Wanted, choose
from paceline.ways.pipeline.routes.opening import SeesFleet

logger = logging.getLogger(__name__)


def begin_loads(fleet: SeesFleet, request: StageRequest, wanted: Wanted, loop: asyncio.AbstractEventLoop) -> tuple[Part, ...]:
    """Ask the machines that will run a pipeline, as things are now, to load their layers. For any thread.

    Args:
        fleet: this node.
        request: what every stage is asked for, but for its layers.
        wanted: what the pipeline is for.
        loop: the node's.

    Returns:
        What they were asked for; nothing where no machine can take part now.
    """
    try:
        parts = tuple(choose(fleet.cards(), fleet.trust(), fleet.node_id, wanted, frozenset()))
    except PipelineError as error:
        logger.info("no machine loads ahead: %s", error.message)
        return ()

    async def ask(part: Part) -> None:
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


def still_there(parts: Iterable[Part], cards: Sequence[NodeCard], wanted: Wanted, exclude: Collection[NodeId]) -> bool:
    """Whether all machines that load ahead may run a pipeline, now that it is known what kernels compute here."""
    by_id = {card.node_id: card for card in cards}
    return all(part.node_id in by_id and part.node_id not in exclude and _same_bytes(by_id[part.node_id], wanted) for part in parts)


def _same_bytes(card: NodeCard, wanted: Wanted) -> bool:
    own = {offer.numerics_id for offer in card.models if (offer.digest, offer.weights) == (wanted.digest, wanted.weights)}
    return own <= {"", wanted.numerics_id}
