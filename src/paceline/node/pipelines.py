"""A pipeline on a node that runs: built in a thread, then served like a model of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock
from paceline.core.errors import ExecutorUnavailable, PacelineError, PipelineError, PlacementError, UserError
from paceline.machine.settings import NodeSettings
from paceline.node.build import BuiltNode
from paceline.node.serving import FleetServing
from paceline.store.catalog import resolve
from paceline.ways.pipeline.executor.route import Opening
from paceline.ways.pipeline.host.tensor_ends import tensor_ends
from paceline.ways.pipeline.routes.build import build_pipeline
from paceline.ways.pipeline.routes.eyes import FleetEyes
from paceline.ways.pipeline.routes.order import PipelineOrder


async def orchestrate(
    whole: FleetServing,
    settings: NodeSettings,
    order: PipelineOrder,
    clock: Clock,
    *,
    reading: LoadProgress | None = None,
    progress: LoadProgress | None = None,
    on_opening: Callable[[Opening], None] | None = None,
) -> BuiltNode:
    """Open a pipeline that begins on this node, and serve it. Close what it returns before the node stops.

    Args:
        reading: of computing the model's digest, where it is not known, from a thread.
        progress: of loading this machine's part, from a thread.
        on_opening: of the others', from a thread.

    Raises:
        UserError: it can't be had, and why.
    """
    build = partial(build_pipeline, meter=whole.pipelines, progress=progress, on_opening=on_opening)
    try:
        give_back = whole.slots.take(order.settings.max_concurrent_pipelines)
        try:
            # What others are to run layers of, they must be able to see, and to fetch.
            location = await asyncio.to_thread(resolve, settings.model, whole.home)
            await whole.offer(location, reading or _count_unseen)
            eyes, loop = FleetEyes(whole.fleet, order.settings.shard_age_s, order.settings.min_host_trust), asyncio.get_running_loop()
            node = await asyncio.to_thread(partial(build, on_end=give_back), settings, order, eyes, tensor_ends(whole.fleet), loop, clock)
        except BaseException:
            give_back()
            raise
    except UserError:
        raise
    except (ExecutorUnavailable, PipelineError) as error:
        raise PlacementError(error.message, error.hint) from error
    try:
        await whole.attach(node)
    except PacelineError:
        node.close()
        raise
    return node


def _count_unseen(done: int, total: int) -> None:
    del done, total
