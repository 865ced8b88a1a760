"""Puts a pipeline together as a person asked for it: this node's part of the model, the router to the others, the executor, the engine.

Law: what a person asked for is built, or an error says why not. The plan decides how many layers stay here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError, OutOfMemory, PipelineDisabled, PlacementError, ShardUnavailable
from paceline.core.ids import NodeId
from paceline.core.inference import fingerprint_of
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK, ActivationDtype, LayerRange, LayerSpan
from paceline.engine.config import context_of
from paceline.engine.drafts import MoreSources
from paceline.engine.kv_source import KvLoans
from paceline.engine.local import LayerRunner
from paceline.fleet.placement import plan
from paceline.fleet.plan import LEAST_ROWS, Choice
from paceline.machine.build import EngineAssembly
from paceline.machine.capability import WarmModel
from paceline.machine.kv_spans import ClosableKv, SpreadKvBeside
from paceline.machine.kv_tier import KvDiskLimits, part_of
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import Setup, set_up
from paceline.machine.sizing import KvPlan
from paceline.machine.speed import Speed, vocabulary_id
from paceline.store.home import Home
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.route import SESSION_ID_BYTES, Opening, PipelineFault, StageRequest
from paceline.ways.pipeline.executor.search import Fallback, LocalRoute, PipelineLimits
from paceline.ways.pipeline.host.ends import TensorEnds
from paceline.ways.pipeline.meter import PipelineMeter
from paceline.ways.pipeline.order import PipelineOrder, request_of, typical_request
from paceline.ways.pipeline.price import Pipelined
from paceline.ways.pipeline.routes.fleet_access import FleetAccess, Wanted
from paceline.ways.pipeline.routes.opening import RouteOpener
from paceline.ways.pipeline.routes.router import FleetRouter, SpareKeeper, begin_loads
from paceline.ways.pipeline.routes.spot_check import Holders, SpotCheck
from paceline.ways.pipeline.routes.stage_kv import StagesKv


class PipelineSlots:
    """Counts those that are open. Taken on the event loop; given back from any thread."""

    def __init__(self) -> None:
        self._taken: set[object] = set()

    @property
    def taken(self) -> int:
        """Those open, or opening."""
        return len(self._taken)

    def take(self, most: int) -> Callable[[], None]:
        """One more pipeline. Returns what gives its place back; calling that again does nothing.

        Raises:
            ShardUnavailable: there are as many already.
        """
        if len(self._taken) >= most:
            raise ShardUnavailable(
                f"{len(self._taken)} pipelines begin on this machine, and no more are allowed at once", "Raise max_concurrent_pipelines."
            )
        place = object()
        self._taken.add(place)
        return lambda: self._taken.discard(place)


logger = logging.getLogger(__name__)

Planned = TypeVar("Planned")

LOOK_S = 0.5
"""Between two looks at a view in which no node can take part yet."""


def check_layers(order: PipelineOrder, model: str, n_layers: int) -> None:
    """What no machine that may yet come could mend.

    Raises:
        ConfigError: layers were asked for that the model has not, or none are left for others.
    """
    if order.own_layers is not None and order.own_layers >= n_layers:
        raise ConfigError(
            f"--own-layers {order.own_layers} leaves none of the {n_layers} layers of {model} to others",
            f"Ask for {n_layers - 1} at most; without --pipeline this machine runs them all.",
        )
    for pin in order.pins:
        if pin.layers is not None and not pin.layers.start < pin.layers.stop <= n_layers:
            raise ConfigError(
                f"--pin gives {pin.node_id} layers {pin.layers.words}, and {model} has {n_layers}",
                f"Layers are 0 to {n_layers - 1}.",
            )


def fitting(fleet: FleetAccess, order: PipelineOrder, setup: Setup, clock: Clock) -> tuple[Choice, LayerRange, KvPlan]:
    """What the plan says, the layers that this machine runs of it, and room for their KV: fewer where the plan, which rounds, gives it too many.

    Raises:
        PlacementError: others can't run the rest.
        OutOfMemory: the layers asked for, or none at all, don't fit here, or fewer would, and others can't run the rest.
    """
    asked, short = order, None
    while True:
        try:
            planned = asked.planned or _planned(fleet, asked, setup, clock)
        except PlacementError as error:
            if short is None:
                raise
            raise OutOfMemory(f"{short.message}, and others can't take more: {error.message}", short.hint) from error
        own = LayerRange(0, asked.own_layers if asked.own_layers is not None else len(planned.stages[0].layers))
        try:
            return planned, own, setup.room(own)
        except OutOfMemory as error:
            if order.own_layers is not None or not own:
                raise
            short = error
            asked = replace(asked, own_layers=len(own) - 1, planned=None)


def longest_context(setup: Setup) -> int:
    """Tokens of the longest request that is asked for."""
    return setup.settings.context or setup.opened.spec.max_context


def _planned(fleet: FleetAccess, order: PipelineOrder, setup: Setup, clock: Clock) -> Choice:
    """What the plan says of a pipeline that begins here; waits for machines that could take part.

    Raises:
        PlacementError: none came in time.
    """
    name = setup.opened.name
    request = replace(
        request_of(order, setup.digest, setup.weights, fleet.node_id, typical_request(longest_context(setup))),
        kv_tokens=setup.settings.context or 0,
        rows=max(LEAST_ROWS, setup.most.max_rows),
        called=name,
    )

    def plan_now() -> Choice:
        return plan(fleet.cards(), request, (Pipelined(),), fleet.trust()).chosen

    return plan_in_time(plan_now, fleet, name, order.settings.search_seconds, clock, logger.info)


def plan_in_time(
    plan_now: Callable[[], Planned], fleet: FleetAccess, name: str, search_s: float, clock: Clock, say: Callable[[str], None]
) -> Planned:
    """What `plan_now` plans for a model, as soon as there are machines that could take part. Says what it waits for. Not on the event loop.

    Raises:
        PlacementError: none came in time.
    """
    until, said = inf, ""
    while True:
        try:
            return plan_now()
        except PlacementError as error:
            if until == inf:  # the first plan reads files, which is no wait for machines
                until = clock.monotonic() + search_s
            if clock.monotonic() >= until:
                raise
            if (awaited := error.awaited or error.message) != said:
                said = awaited
                say(f"Waiting for machines that {name} could run on, for up to {search_s:g} s: {said}")
        fleet.wait_for_change(LOOK_S)


def loads_the_rest(own: NodeId, setup: Setup, head: LayerRunner[Any], max_rows: int) -> Callable[[], LocalRoute]:
    """What a `Fallback` loads.

    Args:
        setup: the head's, so that bytes are the same; the model is whole on this machine.
        head: embedding, head and first layers.
    """
    spec = setup.opened.spec
    layers = LayerRange(head.layers.stop, spec.n_layers)

    def load() -> LocalRoute:
        """The route.

        Raises:
            OutOfMemory: it does not fit.
        """
        kv = setup.room(layers, edges=False, unasked=True)
        runner = setup.load(layers, min(kv.n_blocks, head.n_blocks * head.block_size // BLOCK_TOKENS), max_rows, edges=False)
        return LocalRoute(own, setup.opened.name, runner, max_rows=max_rows, max_context=spec.max_context, width=spec.hidden)

    return load


LEAST_TOKENS = 256
"""Of KV, for which machines are worth asking where no context was asked for. Raising it leaves out machines that are nearly full."""


@dataclass(slots=True, kw_only=True)
class BuiltPipeline(EngineAssembly[PipelineExecutor]):
    """Over several machines."""

    router: FleetRouter
    warm: WarmModel
    summary: str
    prompts_per_s: float
    """Tokens of prompts, as the plan expects."""


def build_engine_over(
    settings: NodeSettings,
    order: PipelineOrder,
    fleet: FleetAccess,
    ends: TensorEnds,
    loop: asyncio.AbstractEventLoop,
    clock: Clock,
    *,
    meter: PipelineMeter | None = None,
    progress: LoadProgress | None = None,
    on_opening: Callable[[Opening], None] | None = None,
    drafts: MoreSources | None = None,
    kv_beside: SpreadKvBeside | None = None,
) -> BuiltPipeline:
    """Load this machine's part and open a route through the others. Blocks: it is called in a thread.

    Args:
        loop: its event loop, which must run meanwhile.
        kv_beside: KV of other nodes; None: there is none.
        on_opening: as of `PipelineExecutor`.

    Raises:
        PipelineDisabled: this machine's settings don't allow it.
        ExecutorUnavailable: no node can run the other layers.
        UserError: something asked for can't be had.
    """
    asked = order.settings
    if not asked.enabled:
        raise PipelineDisabled(
            "Pipelines are switched off here", "Start with --pipeline, or set enabled = true in [pipeline] of config.toml."
        )
    setup = set_up(settings, spread=True)
    opened, spec, weights, digest = setup.opened, setup.opened.spec, setup.weights, setup.digest
    check_layers(order, opened.name, spec.n_layers)
    planned, own, kv = fitting(fleet, order, setup, clock)
    config = replace(setup.config(kv), step_timeout_s=1e6)  # the pipeline has bounds of its own
    max_rows = config.max_rows
    n_blocks = _whole_blocks(kv.tokens)
    least_blocks = _whole_blocks(settings.context or min(kv.context, LEAST_TOKENS))
    others = LayerRange(len(own), spec.n_layers)
    wanted = Wanted(
        replace(
            request_of(replace(order, own_layers=len(own)), digest, weights, fleet.node_id, typical_request(longest_context(setup))),
            kv_tokens=least_blocks * BLOCK_TOKENS,
            rows=max(LEAST_ROWS, max_rows),
            called=opened.name,
        ),
        others,
    )
    request = StageRequest(
        bytes(SESSION_ID_BYTES),
        opened.name,
        digest,
        weights,
        others,
        n_blocks=n_blocks,
        least_blocks=least_blocks,
        max_rows=max_rows,
        dtype=asked.activation_dtype,
        report_s=asked.report_ms / 1000,
    )
    # Others fetch and load theirs meanwhile.
    as_planned = tuple(LayerSpan(stage.node_id, stage.layers) for stage in planned.stages[1:]) if planned is order.planned else ()
    ahead = begin_loads(fleet, request, wanted, loop, as_planned)
    head = setup.load(own, n_blocks, max_rows, progress)
    if order.exact:
        wanted = replace(wanted, request=replace(wanted.request, numerics_id=head.numerics_id))
    opener = RouteOpener(fleet, ends, request, spec.hidden, head.block_size, loop)
    opener.numerics_id = wanted.request.numerics_id
    meter = meter or PipelineMeter()
    spares = SpareKeeper(fleet, request, wanted, loop) if asked.keep_spares else None
    router = FleetRouter(fleet, opener, wanted, loop, clock, meter, spares, ahead, head.numerics_id)
    fallback = None
    if asked.fallback_to_local:
        rest = loads_the_rest(fleet.node_id, setup, head, max_rows)
        fallback = Fallback(rest, asked.fallback_to_local_after_failures, clock)
    check = None
    if asked.spot_check_every and head.holds_identity and request.dtype is ActivationDtype.BF16:
        holders = Holders(fleet.cards, fleet.trust, wanted, router.excluded)

        def leave_out(fault: PipelineFault) -> None:
            router.quarantine(fault)
            if fault.node_id is not None:
                fleet.found_wrong(fault.node_id, fault.message)

        check = SpotCheck(asked.spot_check_every, opener, holders, head.numerics_id, leave_out, loop)
    limits = PipelineLimits(
        stall_s=asked.stall_seconds,
        search_s=asked.search_seconds,
        row_s=planned.estimate.ttft_s / wanted.request.prompt_tokens,
        max_rows=max_rows,
        max_context=spec.max_context,
    )
    try:
        promises = request.dtype is ActivationDtype.BF16
        executor = PipelineExecutor(
            *(head, spec.n_layers, router, limits, clock, check, fallback, meter, on_opening), exact=order.exact, promises=promises
        )
    except BaseException:
        router.close()
        head.close()
        raise
    with ExitStack() as undo:
        undo.callback(executor.close)
        # An answer that began goes on with less, where machines that take over have less.
        opener.least_blocks = min(request.least_blocks, _whole_blocks(LEAST_TOKENS))
        model = replace(setup.served(head, kv, clock), fingerprint=fingerprint_of(setup.model, executor.numerics_id))
        # The engine tells of numerics that change later (`EngineStats.numerics_id`).
        holds_identity = head.holds_identity and executor.numerics_id != ""
        speed = Speed(planned.estimate.tokens_per_s, 0.0, executor.numerics_id, holds_identity, vocabulary_id(opened.tokenizer))
        stages = ", ".join(map(str, executor.stages))
        here = f"layers {own.words} here" if own else "no layers here"
        context = context_of(config, executor)
        summary = f"{model.name}, {weights} weights, {setup.kernels} kernels, context {context}, {here}, {stages}, pipeline {executor.pipeline_id}"

        def beside_pool(loans: KvLoans, came: Callable[[], None]) -> ClosableKv | None:
            shares = kv_beside is not None and head.holds_identity
            if not (config.prefix_cache and (settings.kv_disk_bytes or shares)):
                return None
            kept = KvDiskLimits(settings.kv_disk_bytes) if settings.kv_disk_bytes else None
            disks = StagesKv(executor, head, digest, request.dtype, Home.from_environment().kv, kept, clock, fleet.trust, loop, came)
            if kv_beside is None or not shares:
                return disks
            size = head.block_size
            layer_bytes = size * spec.kv_bytes_per_token(LayerRange(0, 1))
            whole = part_of(digest, head.numerics_id, head.kv_layout, size, spec.all_layers, layer_bytes, spec.n_layers)
            return kv_beside(head, digest, disks, loans, came, whole)

        built = BuiltPipeline(
            setup=setup,
            executor=executor,
            runner=head,
            config=config,
            kv=kv,
            model=model,
            clock=clock,
            # Whether the others' kernels allow for them may change with each route, and the executor says so.
            drafts=drafts,
            kv_beside=beside_pool,
            router=router,
            warm=replace(setup.warm(kv, speed), context=context),
            summary=summary,
            prompts_per_s=wanted.request.prompt_tokens / planned.estimate.ttft_s if planned.estimate.ttft_s > 0 else 0.0,
        )
        undo.pop_all()
        return built


def _whole_blocks(tokens: int) -> int:
    """Blocks of 16 tokens that hold so many, whatever the other machines keep together."""
    return -(-tokens // WIDEST_BLOCK) * (WIDEST_BLOCK // BLOCK_TOKENS)
