"""Serves a model as the plan says: the first choice of this node's plan is what is built.

Law: what a person asks for is a constraint of the plan, and no second planner. What memory does not allow after all is planned again without it,
and said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from paceline.backends.memory import free_what_failed
from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock
from paceline.core.errors import (
    ExecutorUnavailable,
    ImpossiblePin,
    NoRoom,
    OutOfMemory,
    PacelineError,
    PipelineDisabled,
    PipelineError,
    PlacementError,
    UserError,
)
from paceline.core.model import LayerSpan
from paceline.fleet.choices import Standing, is_same
from paceline.fleet.placement import headline
from paceline.fleet.plan import ALONE, Choice, Plan, Way
from paceline.machine.host import EngineHost
from paceline.machine.settings import NodeSettings, PrefillRole
from paceline.node.build import BuiltNode, build_node
from paceline.node.planning import Constraints, Idle, brief, in_words, plan_here, plan_once_shown
from paceline.node.serving import FleetServing
from paceline.node.ways import SPREAD
from paceline.store.catalog import ModelLocation, resolve
from paceline.store.home import Home
from paceline.ways.draft.sources import NodeDrafts
from paceline.ways.kv.source import PeerKv
from paceline.ways.pipeline.executor.route import Opening
from paceline.ways.pipeline.host.ends import tensor_ends
from paceline.ways.pipeline.meter import MeteredEngine, PipelineMeter
from paceline.ways.pipeline.routes.build import BuiltPipeline, build_engine_over, plan_in_time
from paceline.ways.pipeline.routes.fleet_access import NodeFleetAccess
from paceline.ways.pipeline.splits import PIPELINE
from paceline.ways.tensor.hosting import places_of
from paceline.ways.tensor.price import TENSOR

logger = logging.getLogger(__name__)

REPLANNED_S = 5.0
"""From one plan of a model that is served to the next. Raising it: what changed is seen later; a plan takes some ms of a core."""


@dataclass(frozen=True, slots=True)
class LoadTold:
    """Who is told how far loads are, from threads."""

    reading: LoadProgress
    """Of computing the model's digest, where it is not known."""
    loading: Callable[[str], LoadProgress]
    """Of this machine's part, which is named."""
    opening: Callable[[Opening], None]
    """Of the others'."""
    say: Callable[[str], None]
    """What is built now, and what is waited for; from any thread."""


async def serve_planned(whole: FleetServing, settings: NodeSettings, asked: Constraints, clock: Clock, told: LoadTold) -> BuiltNode:
    """Plan a model on this node, and serve it so. Close what it returns before the node stops.

    Raises:
        UserError: it can't be had, and why.
    """
    access, alone = _access(whole, asked), partial(_build_here, whole, settings, told)
    node, follow = await _built_as_planned(whole, settings, asked, access, clock, told, alone)
    try:
        await whole.attach(node)
    except PacelineError:
        node.close()
        raise
    follow()
    return node


def plan_loads(whole: FleetServing, asked: Constraints, named: Collection[str], clock: Clock) -> None:
    """From now on, have what is loaded by name served as the plan says, too.

    Args:
        named: models that pins and layers were meant for.
    """
    access = _access(whole, asked)

    async def bring(
        place: ModelLocation, settings: NodeSettings, progress: LoadProgress, alone: Callable[[], Awaitable[BuiltNode]]
    ) -> BuiltNode:
        meant = await asyncio.to_thread(names_of, named, whole.home)
        order = asked.order if place.name in meant else replace(asked.order, pins=(), own_layers=None)
        told = LoadTold(progress, lambda _: progress, lambda opening: progress(opening.bytes_done, opening.bytes_total), logger.info)
        idle = set(whole.models.idle)
        makes_way = [
            (node.warm.model.weights, node.use().taken_bytes) for node in whole.models.nodes if node.warm and node.model.name in idle
        ]
        node, follow = await _built_as_planned(whole, settings, replace(asked, order=order), access, clock, told, alone, makes_way)
        follow()
        return node

    whole.models.by_plan = bring


def names_of(models: Collection[str], home: Home) -> set[str]:
    """Of those models that are there: one may have been removed since it was named."""
    found = set[str]()
    for model in models:
        with suppress(UserError):
            found.add(resolve(model, home).name)
    return found


def _access(whole: FleetServing, asked: Constraints) -> NodeFleetAccess:
    return NodeFleetAccess(whole.fleet, asked.order.settings.shard_age_s, asked.order.settings.min_host_trust)


async def _built_as_planned(
    whole: FleetServing,
    settings: NodeSettings,
    asked: Constraints,
    access: NodeFleetAccess,
    clock: Clock,
    told: LoadTold,
    alone: Callable[[], Awaitable[BuiltNode]],
    makes_way: Sequence[Idle] = (),
    failed: Sequence[Choice] = (),
    tried: frozenset[Way] = frozenset(),
) -> tuple[BuiltNode, Callable[[], None]]:
    """A model as this node's plan has it; and what is to be called once it is served, which shows its plan and goes on planning.

    Args:
        alone: builds all of it on this machine.
        makes_way: what is loaded here and makes way for it.
        failed: could not be had; later plans may try them again, but not soon.
        tried: ways that are left out therefore.

    Raises:
        UserError: it can't be had, and why.
    """
    location = await asyncio.to_thread(resolve, settings.model, whole.home)
    wanted, asked = asked, _with_free_slots(whole, replace(asked, ways=asked.ways - tried))
    await whole.offer(location, None)
    made: Plan | None = None
    if asked.ways - SPREAD or settings.tensor_on:
        try:
            plan_now = partial(plan_once_shown, access, location.name, settings, asked, clock, makes_way)
            if settings.draft_on is not None:  # it may come later than this node
                plan_now = partial(plan_in_time, plan_now, access, location.name, asked.order.settings.search_seconds, clock, told.say)
            made = await asyncio.to_thread(plan_now)
        except ImpossiblePin:
            if not settings.tensor_on:  # ranks that were named are tried all the same: a load knows best what fits
                raise
        except PlacementError as error:
            logger.info("no plan yet for %s: %s", location.name, error.message)
        if made is None or made.chosen.way not in SPREAD or settings.tensor_on:
            if made is not None:
                told.say(f"Plan for {settings.model}: {in_words(made)}")
            try:
                node = await alone()
            except OutOfMemory as error:
                if not asked.ways & SPREAD:
                    raise
                free_what_failed(error)
                told.say(f"{settings.model} does not fit this machine alone: {error.message}. Looking for machines to share it with")
                failed, tried = (*failed, *([made.chosen] if made else [])), tried | wanted.ways - SPREAD
                asked, made = replace(asked, ways=asked.ways & SPREAD), None
            else:
                return node, partial(_follow, node, whole, settings, wanted, access, location, made, clock, failed)
    if not asked.order.settings.enabled:
        raise PipelineDisabled(
            "Pipelines are switched off here", "Start with --pipeline, or set enabled = true in [pipeline] of config.toml."
        )
    if made is None:
        # What others are to run layers of, they must be able to see, and to fetch.
        await whole.offer(location, told.reading)
        plan_now = partial(plan_here, access, location.name, settings, asked, makes_way=makes_way)
        search_s = asked.order.settings.search_seconds
        made = await asyncio.to_thread(plan_in_time, plan_now, access, location.name, search_s, clock, told.say)
    told.say(f"Plan for {settings.model}: {in_words(made)}")
    if makes_way:
        with suppress(NoRoom, OutOfMemory):  # then fewer layers stay here
            await whole.models.room(settings, made.chosen.stages[0].layers)
    try:
        node = await _build_spread(whole, settings, asked, access, made.chosen, clock, told)
    except PacelineError as error:
        way, others = made.chosen.way, asked.ways - {made.chosen.way}
        if not others or (way == PIPELINE and not others & {each.way for each in made.runners_up}):
            raise
        free_what_failed(error)
        without = "tensor ranks" if way == TENSOR else way
        told.say(f"{settings.model} can't be served as planned, {headline(made.chosen)}: {error.message}. Planning without {without}")
        return await _built_as_planned(
            whole, settings, wanted, access, clock, told, alone, makes_way, (*failed, made.chosen), tried | {way}
        )
    return node, partial(_follow, node, whole, settings, wanted, access, location, made, clock, failed)


def _follow(
    node: BuiltNode,
    whole: FleetServing,
    settings: NodeSettings,
    asked: Constraints,
    access: NodeFleetAccess,
    location: ModelLocation,
    made: Plan | None,
    clock: Clock,
    failed: Sequence[Choice] = (),
) -> None:
    name = location.name
    whole.forget_plan(name)  # of how it was served before
    if made is not None:
        whole.show_plan(name, in_words(made) + _called(node))
        _Replanning(whole, settings, asked, access, location, made, clock, failed).start()
        return
    late = whole.planning[name] = object()
    as_it_runs = replace(asked, ways=frozenset({ALONE}), order=replace(asked.order, pins=(), own_layers=None))

    async def plan_late() -> None:
        """Follow what was built here without a plan, once the plan says what that is."""
        while True:
            await asyncio.sleep(REPLANNED_S)
            made, words = None, ""
            try:
                made = await asyncio.to_thread(plan_here, access, name, replace(settings, draft_on=None), as_it_runs)
            except PlacementError as error:
                words = f"{access.node_id} alone, without a plan yet: {error.message}"
            if whole.planning.get(name) is not late:
                return
            if not whole.models.is_loaded(name):
                whole.forget_plan(name)
                return
            if made is not None:
                _follow(node, whole, settings, asked, access, location, made, clock, failed)
                return
            whole.show_plan(name, words)

    whole.keep(plan_late, f"plan of {name}")


def _with_free_slots(whole: FleetServing, asked: Constraints, running: Choice | None = None) -> Constraints:
    """Without pipelines, where as many begin here as may and another way is allowed.

    Args:
        running: how the model is served: a pipeline of its own has a slot.
    """
    full = whole.slots.taken >= asked.order.settings.max_concurrent_pipelines and (running is None or running.way != PIPELINE)
    return replace(asked, ways=asked.ways - {PIPELINE}) if full and asked.ways - {PIPELINE} else asked


async def _build_here(whole: FleetServing, settings: NodeSettings, told: LoadTold) -> BuiltNode:
    """All of the model on this machine, and on those that its tensor ranks are on. Without a plan it is tried all the same: a load knows best what fits.

    Raises:
        UserError: it can't be had, and why.
    """
    places = await places_of(settings, whole.fleet, told.say) if settings.tensor_on else None
    return await asyncio.to_thread(build_node, replace(settings, bound=whole.models.bound), told.loading(settings.model), None, places)


def _as_ranks(settings: NodeSettings, chosen: Choice) -> NodeSettings:
    """With the layers shared as a choice has it."""
    ranks = {stage.node_id: stage.rank for stage in chosen.stages if stage.rank is not None}
    _, *others = ranks
    return replace(
        settings,
        tensor=tuple(rank.speed for rank in ranks.values()),
        tensor_on=(None, *others),
        tensor_tokens=min(ranks[node_id].kv_tokens for node_id in others),
    )


async def _build_spread(
    whole: FleetServing, settings: NodeSettings, asked: Constraints, access: NodeFleetAccess, chosen: Choice, clock: Clock, told: LoadTold
) -> BuiltNode:
    """A pipeline that begins on this node, or tensor ranks of which it has the first.

    Raises:
        UserError: it can't be had, and why.
    """
    if chosen.way == TENSOR:
        return await _build_here(whole, settings if settings.tensor_on else _as_ranks(settings, chosen), told)
    own = chosen.stages[0].layers
    part = f"layers {own.words}" if len(own) else "embedding and head"
    pipelines = asked.order.settings
    if pipelines.fallback_to_local is None:  # one that is as free to run alone is not to lose an answer for having spread
        pipelines = pipelines.overridden(fallback_to_local=ALONE in asked.ways)
    order = replace(asked.order, planned=chosen, settings=pipelines)
    try:
        end = whole.slots.take(order.settings.max_concurrent_pipelines)
        try:
            drafts = NodeDrafts(settings.draft, clock, in_fleet=True, on=settings.draft_on)
            progress = told.loading(f"{part} of {settings.model}")
            build = partial(
                build_engine_over, meter=whole.pipelines, progress=progress, on_opening=told.opening, drafts=drafts, kv_beside=PeerKv
            )
            loop, ends = asyncio.get_running_loop(), tensor_ends(whole.fleet)
            bounded = replace(settings, bound=whole.models.bound)
            built = await asyncio.to_thread(build, bounded, order, access, ends, loop, clock)
            return _hosted(built, whole.pipelines, drafts, clock, end, settings.role)
        except BaseException:
            end()
            raise
    except UserError:
        raise
    except (ExecutorUnavailable, PipelineError) as error:
        raise PlacementError(error.message, error.hint) from error


class _Replanning:
    """Plans one model again whenever the view changes, and moves it to another way once that held."""

    def __init__(
        self,
        whole: FleetServing,
        settings: NodeSettings,
        asked: Constraints,
        access: NodeFleetAccess,
        location: ModelLocation,
        made: Plan,
        clock: Clock,
        failed: Sequence[Choice] = (),
    ) -> None:
        self._whole, self._settings, self._asked, self._access = whole, settings, asked, access
        self._location, self._clock = location, clock
        self._standing = Standing(made.chosen)
        for choice in failed:
            self._standing.failed(choice, clock.monotonic())
        self._serves = made.chosen
        self._is_gone = False
        """It could be served in no way any more, and is tried again."""
        whole.planning[location.name] = self

    def start(self) -> None:
        """From now on, until the node stops."""
        self._whole.keep(self._run, f"plan of {self._location.name}")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPLANNED_S)
            if not self._is_served:
                return
            made = await asyncio.to_thread(self._plan)
            if not self._is_served:
                return
            to = self._standing.look(made, self._clock.monotonic(), is_whole=self._is_whole)
            if (rather := self._standing.rather) is not None and rather.way == PIPELINE and self._spans == _others(rather):
                self._standing.moved(rather)  # its own route went there, after a loss
            elif to is not None or self._is_gone:
                await self._move(to or self._standing.running)
            self._show(made)

    @property
    def _is_whole(self) -> bool:
        """Whether tensor ranks are where they were planned: those of a machine that was lost run here. A pipeline finds others by itself."""
        running = self._standing.running
        return running.way != TENSOR or self._spans == _others(running)

    @property
    def _is_served(self) -> bool:
        """Whether it was not taken away, and maybe loaded anew."""
        name = self._location.name
        is_own = self._whole.planning.get(name) is self
        if is_own and not (self._is_gone or self._whole.models.is_loaded(name)):
            self._whole.forget_plan(name)
            return False
        return is_own

    def _plan(self) -> Plan | None:
        running = self._standing.running
        try:
            asked, there = _with_free_slots(self._whole, self._asked, running), {span.node_id for span in self._spans}
            held = [stage for stage in running.stages if stage.rank is not None and stage.node_id in {self._access.node_id, *there}]
            return plan_here(self._access, self._location.name, self._settings, asked, running, held=held)
        except PlacementError:
            return None

    async def _move(self, to: Choice) -> None:
        before = self._standing.running
        self._serves = to
        if self._is_gone or SPREAD & {to.way, before.way}:
            try:
                if not await self._whole.models.change(self._location, partial(self._built, to, before)):
                    return
            except Exception:
                self._is_gone = not self._whole.models.is_loaded(self._location.name)
                raise
            self._is_gone = False
        if self._serves is not before:
            self._standing.moved(to)
            logger.info("%s is served another way, as planned: %s", self._location.name, brief(to))

    async def _built(self, to: Choice, before: Choice) -> BuiltNode:
        try:
            return await self._build(to)
        except PacelineError as error:
            free_what_failed(error)
            logger.warning(
                "%s could not be served as planned, %s: %s; it is served as before", self._location.name, headline(to), error.message
            )
        self._standing.failed(to, self._clock.monotonic())
        self._serves = before
        return await self._build(before)

    async def _build(self, chosen: Choice) -> BuiltNode:
        quiet = LoadTold(_nothing, lambda _: _nothing, _nothing, _nothing)
        if chosen.way in SPREAD:
            return await _build_spread(self._whole, self._settings, self._asked, self._access, chosen, self._clock, quiet)
        return await _build_here(self._whole, self._settings, quiet)

    def _show(self, made: Plan | None) -> None:
        running, rather, words = self._standing.running, self._standing.rather, brief(self._standing.running)
        if self._spans != _others(running):  # after a loss, say
            over = " -> ".join(f"{span.node_id} [{span.layers.start}..{span.layers.stop - 1}]" for span in self._spans)
            words += f"; now over {over}" if over else "; looks for machines now"
        node = self._node
        if self._spans and node is not None and node.host.stats().numerics_id == "" and not running.is_unlike:
            words += "; its machines compute other bytes than one another"
        if rather is not None:
            words += f"; would rather be {brief(rather)}"
        elif made is not None and (other := next((each for each in (made.chosen, *made.runners_up) if not is_same(each, running)), None)):
            words += f"; otherwise {brief(other)}"
        self._whole.show_plan(self._location.name, words + _called(self._node))

    @property
    def _spans(self) -> tuple[LayerSpan, ...]:
        """What others run of it now."""
        return () if self._node is None else self._node.spans()

    @property
    def _node(self) -> BuiltNode | None:
        return next((node for node in self._whole.models.nodes if node.model.name == self._location.name), None)


def _others(choice: Choice) -> tuple[LayerSpan, ...]:
    return tuple(LayerSpan(stage.node_id, stage.layers) for stage in choice.stages[1:])


def _called(node: BuiltNode | None) -> str:
    """What a plan's words end with: the id by which logs and metrics know the pipeline."""
    return "" if node is None or not node.pipeline_id else f"; pipeline {node.pipeline_id}"


def _nothing(*_: object) -> None:
    """Where no one is told."""


def _hosted(
    built: BuiltPipeline, meter: PipelineMeter, drafts: NodeDrafts, clock: Clock, on_end: Callable[[], None], role: PrefillRole
) -> BuiltNode:
    """Behind a host with the engine in a thread of its own. `on_end` is called once the pipeline has ended."""
    executor = built.executor
    meter.open[executor.pipeline_id, built.model.name] = lambda: 0 if executor.is_alone else len(executor.stages)

    def release() -> None:
        try:
            built.close()
        finally:
            del meter.open[executor.pipeline_id, built.model.name]
            on_end()

    def rebuild() -> MeteredEngine:
        return MeteredEngine(built.rebuild(), meter, clock)

    def ways() -> frozenset[str]:
        return frozenset({ALONE if executor.is_alone else PIPELINE})

    def spans() -> tuple[LayerSpan, ...]:
        return tuple(LayerSpan(stage.node_id, stage.layers) for stage in executor.stages)

    kept = drafts if built.drafts is drafts else None
    engine = MeteredEngine(built.engine, meter, clock)
    host = EngineHost(engine, release, built.model, built.config, clock, rebuild, built.grammars, ways, lambda: executor.lacks)
    built.loans.wake = host.wake
    peers = built.beside if isinstance(built.beside, PeerKv) else None
    if peers is not None:
        peers.role = role
        peers.prompts_per_s = lambda: host.stats().prefill_per_s or built.prompts_per_s
    return BuiltNode(
        *(host, built.model, (), built.summary, built.warm, built.setup.opened.location, built.kv, kept, peers),
        pipeline_id=executor.pipeline_id,
        spans=spans,
        is_shared=True,
    )
