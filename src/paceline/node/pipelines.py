"""A pipeline on a node that runs: built in a thread, then served like a model of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock
from paceline.core.errors import ExecutorUnavailable, PacelineError, PipelineError, PlacementError, UserError
from paceline.machine.host import EngineHost
from paceline.machine.settings import NodeSettings
from paceline.node.build import BuiltNode
from paceline.node.serving import FleetServing
from paceline.store.catalog import resolve
from paceline.ways.draft.sources import NodeDrafts
from paceline.ways.pipeline.executor.route import Opening
from paceline.ways.pipeline.host.ends import tensor_ends
from paceline.ways.pipeline.routes.build import BuiltPipeline, build_engine_over
from paceline.ways.pipeline.routes.eyes import FleetEyes
from paceline.ways.pipeline.routes.meter import MeteredEngine, PipelineMeter
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
    try:
        give_back = whole.slots.take(order.settings.max_concurrent_pipelines)
        try:
            # What others are to run layers of, they must be able to see, and to fetch.
            location = await asyncio.to_thread(resolve, settings.model, whole.home)
            await whole.offer(location, reading or _count_unseen)
            eyes, loop = FleetEyes(whole.fleet, order.settings.shard_age_s, order.settings.min_host_trust), asyncio.get_running_loop()
            drafts = NodeDrafts(settings.draft, clock, in_fleet=True)
            build = partial(build_engine_over, meter=whole.pipelines, progress=progress, on_opening=on_opening, drafts=drafts)
            built = await asyncio.to_thread(build, settings, order, eyes, tensor_ends(whole.fleet), loop, clock)
            node = _hosted(built, whole.pipelines, drafts, clock, give_back)
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


def _hosted(built: BuiltPipeline, meter: PipelineMeter, drafts: NodeDrafts, clock: Clock, on_end: Callable[[], None]) -> BuiltNode:
    """Behind a host with the engine in a thread of its own. `on_end` is called once the pipeline has ended."""

    def release() -> None:
        try:
            built.close()
        finally:
            on_end()

    def rebuild() -> MeteredEngine:
        return MeteredEngine(built.rebuild(), meter, clock)

    host = EngineHost(MeteredEngine(built.engine, meter, clock), release, built.model, built.config, clock, rebuild, built.grammars)
    return BuiltNode(host, built.model, (), built.summary, built.warm, drafts=drafts if built.drafts is drafts else None)


def _count_unseen(done: int, total: int) -> None:
    del done, total
