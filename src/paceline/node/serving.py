"""What `paceline up` serves: this machine's engine alone, or, on a member of a fleet, the whole fleet.

Law: a caller that enters `serving` gets an `Inference` that works, and on leaving everything it started has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.registry import Collector

from paceline.backends.options import LoadProgress
from paceline.core.background import end_tasks, in_background
from paceline.core.clock import Clock
from paceline.core.via import new_mark
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import Use
from paceline.fleet.presets import FleetSettings
from paceline.machine.capability import CapabilityReport, WarmModel, as_served, learn_digest, learn_digests
from paceline.machine.encoders import LocalEncoders
from paceline.machine.foreign.engines import ForeignEngines
from paceline.machine.foreign.model import ForeignModel
from paceline.machine.foreign.together import Together
from paceline.machine.models import Models
from paceline.machine.settings import NodeSettings, PrefillRole
from paceline.machine.weights import give_weights
from paceline.net.member.metrics import fleet_metrics
from paceline.net.member.node import FleetNode
from paceline.net.member.state import Claim
from paceline.net.server import Service
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context
from paceline.node.build import BuiltNode, build_node
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.draft.service import DraftService, LoadedProposer
from paceline.ways.forward.client import TokenizerStore
from paceline.ways.forward.encode_service import encode_service
from paceline.ways.forward.encoding import FleetEncoders
from paceline.ways.forward.inference import FleetInference
from paceline.ways.forward.service import LoadedModel, LocalModels, generate_service
from paceline.ways.kv.service import KvSharing
from paceline.ways.pipeline.host.serving import Hosting, ShardServing
from paceline.ways.pipeline.meter import PipelineMeter, pipeline_metrics
from paceline.ways.pipeline.routes.build import PipelineSlots
from paceline.ways.tensor.hosting import RankHost

logger = logging.getLogger(__name__)

LEARN_S = 60.0
"""Between two looks for models that were not read yet, as often as a card is made anew. Where they could not be read, they are tried after twice as
long each time. Raising it: a model that came is shared later."""
LEARN_MOST_S = 3600.0
"""Then it stays so. Raising it: one that could not be read for long is shared later; lowering it: it is read for nothing more often."""


class Portrait:
    """`CapabilityReport` with what is loaded.

    Args:
        drafts: what this node proposes tokens with.
        beside: models that lie elsewhere than in the home. More may be added while this lives.
        load: returns the number of sequences that run and wait.
        prefills: returns the names of models that are there to compute prompts for other nodes.
        served: returns a loaded model with the figures seen while it served.
        engines: returns the models of foreign engines.
        left_bytes: returns the memory that further models may take, as a person bounded it (`--models-memory`); None: what is free.
    """

    def __init__(
        self,
        portrait: CapabilityReport,
        warm: tuple[WarmModel, ...] = (),
        drafts: tuple[ModelOffer, ...] = (),
        beside: Sequence[ModelLocation] = (),
        *,
        load: Callable[[], int] = lambda: 0,
        prefills: Callable[[], Collection[str]] = tuple,
        served: Callable[[WarmModel], WarmModel] = lambda model: model,
        engines: Callable[[], tuple[ModelOffer, ...]] = tuple,
        left_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._load, self._prefills, self._served, self._engines, self._left_bytes = load, prefills, served, engines, left_bytes
        self._portrait, self._warm, self._drafts, self._beside = portrait, warm, drafts, beside

    def show(self, warm: tuple[WarmModel, ...]) -> None:
        """What is loaded and can be had changed; the next look says so."""
        self._warm = warm

    def look(self) -> bool:
        return self._portrait.look(
            tuple(map(self._served, self._warm)), (*self._engines(), *self._drafts), tuple(self._beside), is_busy=self._load() > 0
        )

    @property
    def unread(self) -> tuple[ModelLocation, ...]:
        """Models whose digest was not known at the last look."""
        return self._portrait.unread

    def show_shards(self, shards: tuple[ModelOffer, ...], memory_bytes: Sequence[int] | None) -> bool:
        """Say from now on which layers are loaded for others."""
        return self._portrait.show_shards(shards, memory_bytes)

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        """As of the last look."""
        card, load, prefills = self._portrait.card(addresses, links), shown_load(self._load()), self._prefills()
        if (left := self._left_bytes()) is not None:
            devices = tuple(replace(device, memory_free_bytes=min(device.memory_free_bytes, max(0, left))) for device in card.devices)
            card = replace(card, memory_free_bytes=min(card.memory_free_bytes, max(0, left)), devices=devices)
        if not load and not prefills:
            return card

        def said(offer: ModelOffer) -> ModelOffer:
            if not is_whole(offer) or offer.engine is not None:
                return offer
            return replace(offer, under_way=load, role=Role.PREFILL if offer.model_id in prefills else offer.role)

        return replace(card, models=tuple(map(said, card.models)))


def is_whole(offer: ModelOffer) -> bool:
    """Whether a model answers here."""
    return offer.runs_whole and offer.warm


def shown_load(sequences: int) -> int:
    """As a card says it: roughly, so that requests which come and go make no new card."""
    return 4 ** ((sequences.bit_length() - 1) // 2) if sequences >= 4 else 0


def shown_at_engine(sequences: int) -> int:
    """Return how many sequences a card says are at an engine: a power of two, never more than there are."""
    return 1 << (sequences.bit_length() - 1) if sequences > 0 else 0


class FleetServing:
    """A node of a fleet and its API's `Inference`."""

    def __init__(
        self,
        models: Models[BuiltNode] | None,
        settings: FleetSettings,
        home: Home,
        clock: Clock,
        hosting: Hosting | None = None,
        proposers: Sequence[LoadedProposer] = (),
        beside: Sequence[ModelLocation] = (),
        engines: ForeignEngines | None = None,
        encoders: LocalEncoders | None = None,
    ) -> None:
        """Put together; nothing runs yet. On the event loop.

        Args:
            models: this machine's; None for a node that loads none.
            hosting: how layers are run for other members; None: they are not.
            proposers: models to draft with, for others and for this node itself; closed with it.
            beside: models that lie elsewhere than in the home, for others to fetch and for layers that run here.
            engines: foreign engines that this node offers; None: it offers none.
            encoders: this machine's, with those engines; None: it has no encoder of its own.

        Raises:
            MembershipError, IdentityError: this machine is in no fleet, or not any more.
        """
        folder = FleetFolder(home.fleet)
        self.models = models or Models(build_node, NodeSettings(), home, clock)
        self.engines = engines or ForeignEngines(home, clock)
        self.engines.mark = new_mark(folder.identity().node_id)
        self._encoders = encoders or LocalEncoders(None, self.engines)
        offers = (*(one.offer for one in proposers), *self._encoders.offers)
        self._beside = list(beside)
        portrait = self._portrait = Portrait(
            *(CapabilityReport(folder.identity().node_id, home), (), offers, self._beside),
            load=lambda: self.inference.own_load(),
            prefills=self._prefilling,
            served=self._as_served,
            engines=self._engine_offers,
            left_bytes=lambda: self.models.bound.most_bytes,
        )
        self.fleet = FleetNode(settings, folder, portrait, clock)
        self.drafting = DraftService(self.fleet, proposers)
        self.kv = KvSharing(self.fleet, clock)
        self._local = LocalModels(None, (), self.fleet.meter)
        self._show_models()
        self.inference = FleetInference(
            self.fleet, self._local, TokenizerStore(home), clock, held=self.kv.shares, legs=self.kv.legs.stream, mark=self.engines.mark
        )
        self.encoders = FleetEncoders(self.fleet, self._encoders, clock, self.engines.mark)
        self.metrics = fleet_metrics(self.fleet)
        self.shards: ShardServing | None = None
        self.ranks: RankHost | None = None
        if hosting is not None:
            self.shards = ShardServing(self.fleet, portrait, hosting, home, clock, self._beside, self.kv.moves, self._bytes_of_ranks)
            self.ranks = RankHost(self.fleet, home, hosting.threads, self._beside, self.shards.left_bytes)
        self.pipelines = PipelineMeter()
        self.slots = PipelineSlots()
        self.planning: dict[str, object] = {}
        """What plans each again."""
        self._kept: list[asyncio.Task[None]] = []
        self._pipeline_metrics = pipeline_metrics(self.pipelines, None if self.shards is None else self.shards.meter)
        self.home = home
        self._ending = threading.Event()
        self._clock = clock
        self._showing: asyncio.Task[None] | None = None

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """What it counts, for the metrics' page."""
        always = (self.metrics, self._pipeline_metrics, self.kv.metrics, self.kv.legs.metrics, *self.drafting.metrics)
        return always if self.shards is None else (*always, self.shards.metrics)

    async def start(self, claim: Claim | None = None) -> None:
        """Listen and be seen.

        Args:
            claim: as of `FleetNode.start`.

        Raises:
            ConfigError: the port can't be used.
        """
        services: list[Callable[[PeerGuard], Service]] = [
            lambda guard: generate_service(self._local, partial(self._allows, guard)),
            lambda guard: encode_service(self._encoders, self.fleet.meter, partial(self._allows, guard)),
            self.drafting.service,
            self.kv.service,
            lambda guard: give_weights(self.home, guard, self.fleet.trust, self._beside),
        ]
        if self.shards is not None:
            services.append(self.shards.service)
        if self.ranks is not None:
            services.append(self.ranks.service)
        await self.fleet.start(*services, claim=claim)
        if self.shards is not None:
            self.shards.start()
        for node in self.models.nodes:
            self._attach(node)
        self.models.listen(self._models_changed)
        self.engines.listen(self._models_changed)
        self.keep(self._learn, "digests of models")

    async def offer(self, location: ModelLocation, progress: LoadProgress | None) -> None:
        """Have other nodes see, and fetch, a model that is about to be served, wherever it lies. Its digest is computed if it is not known.

        Args:
            progress: of computing it, told from a thread; None: it is not computed, and what has no digest is not fetched.

        Raises:
            UserError: it can't be read, or run.
        """
        if progress is not None:
            await asyncio.to_thread(learn_digest, location, self.home, progress)
        if location.path not in {known.path for known in self._beside}:
            self._beside.append(location)
        await asyncio.to_thread(self._portrait.look)
        self.fleet.look_again()

    async def settle(self, stop: asyncio.Event) -> None:
        """Wait until the fleet was looked at, for a moment at most, or until `stop` is set."""
        settling, stopping = asyncio.create_task(self.inference.settle()), asyncio.create_task(stop.wait())
        await asyncio.wait({settling, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if settling.done():
            settling.result()
        settling.cancel()

    def show_plan(self, model: str, words: str) -> None:
        """Say how a model is served, and what would be rather."""
        self.fleet.plans[model] = words

    def forget_plan(self, model: str) -> None:
        """It is served no more."""
        for known in (self.fleet.plans, self.planning):
            known.pop(model, None)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Work that goes on until this node stops."""
        self._kept = [task for task in self._kept if not task.done()] + [self.fleet.background.keep(work, name)]

    async def attach(self, node: BuiltNode) -> None:
        """Serve a model that was built while this node ran already: a pipeline's."""
        self.models.add(node)
        if self._showing is not None:
            await asyncio.wait([self._showing])

    def _attach(self, node: BuiltNode) -> None:
        self.drafting.attach(node.drafts, node.warm, node.model.tokenizer, self.models.stats)
        if node.peer_kv is not None:
            self.kv.attach(node.peer_kv, partial(node.host.generate, node.model.name))

    def _allows(self, guard: PeerGuard, context: Context, use: Use) -> bool:
        return self.fleet.trust.allows(guard.peer(context).trust, use)

    def _bytes_of_ranks(self) -> tuple[int, int]:
        return (0, 0) if self.ranks is None else (self.ranks.used_bytes, self.ranks.coming_bytes)

    def _prefilling(self) -> Collection[str]:
        nodes = self.models.nodes
        return {node.model.name for node in nodes if node.peer_kv is not None and node.peer_kv.role is PrefillRole.PREFILL}

    def _as_served(self, model: WarmModel) -> WarmModel:
        """With what its engine saw. Steps over several machines are not this one's, and their numerics may change."""
        node = next((node for node in self.models.nodes if node.warm is model), None)
        if node is None:
            return model
        stats = node.host.stats()
        if node.is_shared:
            now = model.speed.numerics_id if stats.numerics_id is None else stats.numerics_id
            return replace(model, speed=replace(model.speed, numerics_id=now, holds_identity=model.speed.holds_identity and bool(now)))
        return as_served(model, stats, () if node.drafts is None else node.drafts.measured(stats))

    def _show_models(self) -> None:
        """What an engine that failed had loaded is offered to no one until there is another."""
        nodes = self.models.nodes
        warm = [(node, node.warm) for node in nodes if node.warm is not None]
        up = [one for node, one in warm if node.host.is_up]
        own = {one.model.name for _, one in warm}
        foreign = [one.model for one in self.engines.offered if one.model.name not in own and not one.learns]
        serves = Together(self.models, self.engines) if nodes or self.models.on_demand or foreign else None
        loaded = [*(_loaded(node, one) for node, one in warm), *map(_foreign, foreign)]
        self._local.show(serves, loaded, {one.model.name for one in up} | {one.name for one in foreign})
        self._portrait.show(tuple(up))
        known = {location.path for location in self._beside}
        self._beside += [node.location for node in nodes if node.location is not None and node.location.path not in known]

    def _engine_offers(self) -> tuple[ModelOffer, ...]:
        own = {node.model.name for node in self.models.nodes}
        # An engine may run only a few requests at once, so its card says more exactly how many there are.
        return tuple(
            replace(offer, under_way=shown_at_engine(offer.under_way)) for offer in self.engines.offers() if offer.model_id not in own
        )

    def _models_changed(self) -> None:
        self._show_models()
        self.drafting.keep({node.drafts for node in self.models.nodes if node.drafts is not None})
        self.kv.keep({node.peer_kv for node in self.models.nodes if node.peer_kv is not None})
        for node in self.models.nodes:
            self._attach(node)
        self.inference.look_again()
        self.encoders.look_again()
        self._showing = in_background(self._show_offers(self._showing), "engine-offer")

    async def _show_offers(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # one after the other, the latest last
        await asyncio.to_thread(self._portrait.look)
        self.fleet.look_again()

    async def _learn(self) -> None:
        """Only a model whose digest is known can be shared with others: each is read once it was seen, and later again where it could not be."""
        tried, pause_s, until_s = (), LEARN_S, 0.0
        while True:
            unread, now = self._portrait.unread, self._clock.monotonic()
            if not unread:
                self.fleet.troubles = ()
            if unread and (unread != tried or now >= until_s):
                pause_s = LEARN_S if unread != tried else min(2 * pause_s, LEARN_MOST_S)
                tried = unread
                missing = await asyncio.to_thread(learn_digests, unread, self.home, self._ending.is_set)
                for what in set(missing) - set(self.fleet.troubles):
                    logger.warning("%s", what)
                self.fleet.troubles = missing
                if len(missing) < len(unread):
                    await asyncio.to_thread(self._portrait.look)
                    self.fleet.look_again()
                until_s = self._clock.monotonic() + pause_s
            await asyncio.sleep(LEARN_S)

    async def stop(self) -> None:
        """Say goodbye and end. Bounded; idempotent."""
        self._ending.set()
        await end_tasks(*self._kept)
        await self.drafting.stop()
        await self.kv.stop()
        await asyncio.gather(self.fleet.stop(), *([] if self.shards is None else [self.shards.stop()]))
        if self.ranks is not None:
            await self.ranks.stop()
        await self.inference.close()
        if self._showing is not None:
            await asyncio.gather(self._showing, return_exceptions=True)


def _foreign(model: ForeignModel) -> LoadedModel:
    has_tokenizer = model.tokenizer is not None
    return LoadedModel(model.ref, "", model.created, model.context, model.tokenizer_sha256, has_tokenizer=has_tokenizer)


def _loaded(node: BuiltNode, warm: WarmModel) -> LoadedModel:
    speed = warm.speed
    return LoadedModel(warm.model, speed.numerics_id, node.model.created, warm.context, warm.tokenizer, speed.holds_identity)


@asynccontextmanager
async def serving(
    models: Models[BuiltNode] | None,
    settings: FleetSettings,
    home: Home,
    clock: Clock,
    stop: asyncio.Event,
    hosting: Hosting | None = None,
    proposers: Sequence[LoadedProposer] = (),
    beside: Sequence[ModelLocation] = (),
    claim: Claim | None = None,
    engines: ForeignEngines | None = None,
    encoders: LocalEncoders | None = None,
) -> AsyncGenerator[FleetServing]:
    """A node of the fleet, for as long as the block runs; it says goodbye as soon as `stop` is set.

    Raises:
        UserError: it can't be one.
    """
    whole = FleetServing(models, settings, home, clock, hosting, proposers, beside, engines, encoders)
    await whole.start(claim)

    async def leave() -> None:
        await stop.wait()
        await whole.stop()

    leaving = asyncio.create_task(leave())
    try:
        yield whole
    finally:
        if stop.is_set():
            await leaving
        else:
            await end_tasks(leaving)
            await whole.stop()
