"""What `paceline up` serves: this machine's engine alone, or, on a member of a fleet, the whole fleet.

Law: a caller that enters `serving` gets an `Inference` that works, and on leaving everything it started has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from prometheus_client.registry import Collector

from paceline.backends.options import LoadProgress
from paceline.core.background import in_background
from paceline.core.clock import Clock
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.machine.capability import LOOKUP, SelfPortrait
from paceline.machine.offers import WarmModel, learn_digest, learn_digests
from paceline.machine.weights import give_weights
from paceline.net.member.metrics import FleetMetrics
from paceline.net.member.node import FleetNode
from paceline.net.member.settings import FleetSettings
from paceline.net.member.state import Claim
from paceline.net.server import Service
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.node.build import BuiltNode
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.draft.service import DraftService, LoadedProposer, lookup
from paceline.ways.forward.inference import FleetInference
from paceline.ways.forward.service import LoadedModel, LocalModels, generate_service
from paceline.ways.forward.tokenizers import TokenizerStore
from paceline.ways.pipeline.host.serving import Hosting, ShardServing
from paceline.ways.pipeline.routes.meter import PipelineMeter, PipelineMetrics
from paceline.ways.pipeline.routes.order import PipelineSlots


class Portrait:
    """`SelfPortrait` with what is loaded.

    Args:
        drafts: what this node proposes tokens with.
        beside: models that lie elsewhere than in the home. More may be added while this lives.
    """

    def __init__(
        self,
        portrait: SelfPortrait,
        warm: tuple[WarmModel, ...],
        drafts: tuple[ModelOffer, ...] = (LOOKUP,),
        beside: Sequence[ModelLocation] = (),
    ) -> None:
        self._portrait, self._warm, self._drafts, self._beside = portrait, warm, drafts, beside
        self._offers_warm = True
        self.load: Callable[[], int] = lambda: 0
        """Sequences that run and wait."""

    def add(self, warm: WarmModel) -> None:
        """A model was loaded; the next look says so."""
        self._warm = (*self._warm, warm)

    def offer(self, *, warm: bool) -> None:
        """Whether what is loaded can be had; the next look says so."""
        self._offers_warm = warm

    def look(self) -> bool:
        """Measure."""
        return self._portrait.look(self._warm if self._offers_warm else (), self._drafts, tuple(self._beside))

    def show_shards(self, shards: tuple[ModelOffer, ...], memory_bytes: Sequence[int] | None) -> bool:
        """Say from now on which layers are loaded for others."""
        return self._portrait.show_shards(shards, memory_bytes)

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        """As of the last look."""
        card, load = self._portrait.card(addresses, links), shown_load(self.load())
        if not load:
            return card
        return replace(card, models=tuple(replace(offer, under_way=load) if is_whole(offer) else offer for offer in card.models))


def is_whole(offer: ModelOffer) -> bool:
    """Whether a model answers here."""
    return offer.role is Role.VERIFIER and offer.warm


def shown_load(sequences: int) -> int:
    """As a card says it: roughly, so that requests which come and go make no new card."""
    return 4 ** ((sequences.bit_length() - 1) // 2) if sequences >= 4 else 0


class FleetServing:
    """A node of a fleet and its API's `Inference`."""

    def __init__(
        self,
        node: BuiltNode | None,
        settings: FleetSettings,
        home: Home,
        clock: Clock,
        hosting: Hosting | None = None,
        proposers: Sequence[LoadedProposer] = (),
        beside: Sequence[ModelLocation] = (),
    ) -> None:
        """Put together; nothing runs yet. On the event loop.

        Args:
            node: this machine's engine; None for a node that serves no model.
            hosting: how layers are run for other members; None: they are not.
            proposers: models to draft with, for others and for this node itself; closed with it.
            beside: models that lie elsewhere than in the home, for others to fetch and for layers that run here.

        Raises:
            MembershipError, IdentityError: this machine is in no fleet, or not any more.
        """
        folder = FleetFolder(home.fleet)
        warm = () if node is None or node.warm is None else (node.warm,)
        drafters = (lookup(clock), *proposers)
        offers = tuple(one.offer for one in drafters)
        self._beside = [*beside, *([] if node is None or node.location is None else [node.location])]
        portrait = self._portrait = Portrait(SelfPortrait(folder.identity().node_id, home), warm, offers, self._beside)
        self.fleet = FleetNode(settings, folder, portrait, clock)
        self.drafting = DraftService(self.fleet, drafters)
        loaded = () if node is None else tuple(_loaded(node, model) for model in warm)
        self._local = LocalModels(None if node is None else node.host, loaded, self.fleet.meter)
        self.inference = FleetInference(self.fleet, self._local, TokenizerStore(home), clock)
        portrait.load = self.inference.own_load
        self.metrics = FleetMetrics(self.fleet)
        self.shards = None if hosting is None else ShardServing(self.fleet, portrait, hosting, home, clock, self._beside)
        self.pipelines = PipelineMeter()
        self.slots = PipelineSlots()
        self._pipeline_metrics = PipelineMetrics(self.pipelines, None if self.shards is None else self.shards.meter)
        self.home, self._node = home, node
        self._ending = threading.Event()
        self._learning: asyncio.Task[None] | None = None
        self._showing: asyncio.Task[None] | None = None

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """What it counts, for the metrics' page."""
        always = (self.metrics, self._pipeline_metrics, self.drafting.metrics)
        return always if self.shards is None else (*always, self.shards.metrics)

    async def start(self, claim: Claim | None = None) -> None:
        """Listen and be seen.

        Args:
            claim: as of `FleetNode.start`.

        Raises:
            ConfigError: the port can't be used.
        """
        services: list[Callable[[PeerGuard], Service]] = [
            lambda _: generate_service(self._local),
            self.drafting.service,
            lambda guard: give_weights(self.home, guard, self.fleet.trust, self._beside),
        ]
        if self.shards is not None:
            services.append(self.shards.service)
        await self.fleet.start(*services, claim=claim)
        if self.shards is not None:
            self.shards.start()
        if self._node is not None:
            self._attach_drafts(self._node)
            self._node.host.listen(partial(self._engine_changed, self._node))
        self._learning = asyncio.create_task(self._learn())

    async def offer(self, location: ModelLocation, progress: LoadProgress) -> None:
        """Have other nodes see, and fetch, a model that is about to be served, wherever it lies. Its digest is computed if it is not known.

        Args:
            progress: of computing it, told from a thread.

        Raises:
            UserError: it can't be read, or run.
        """
        await asyncio.to_thread(learn_digest, location, self.home, progress)
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

    async def attach(self, node: BuiltNode) -> None:
        """Serve a model that was built while this node ran already: a pipeline's."""
        assert node.warm is not None, "who is in a fleet says what it has loaded"
        self._portrait.add(node.warm)
        await asyncio.to_thread(self._portrait.look)
        self._local.attach(node.host, _loaded(node, node.warm))
        self.inference.look_again()
        self.fleet.look_again()
        self._attach_drafts(node)
        node.host.listen(partial(self._engine_changed, node))

    def _attach_drafts(self, node: BuiltNode) -> None:
        self.drafting.attach(node.drafts, node.warm, node.model.tokenizer, node.host.stats)

    def _engine_changed(self, node: BuiltNode) -> None:
        """What an engine that failed had loaded is offered to no one until there is another."""
        is_up = node.host.is_up
        self._local.is_up = is_up
        self._portrait.offer(warm=is_up)
        self.inference.look_again()
        self._showing = in_background(self._show_offers(self._showing), "engine-offer")

    async def _show_offers(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # one after the other, the latest last
        await asyncio.to_thread(self._portrait.look)
        self.fleet.look_again()

    async def _learn(self) -> None:
        """Only a model whose digest is known can be fetched from here: a new one is announced at once."""
        if await asyncio.to_thread(learn_digests, self.home, self._ending.is_set):
            await asyncio.to_thread(self._portrait.look)

    async def stop(self) -> None:
        """Say goodbye and end. Bounded; idempotent."""
        self._ending.set()
        await self.drafting.stop()
        await asyncio.gather(self.fleet.stop(), *([] if self.shards is None else [self.shards.stop()]))
        await self.inference.close()
        await asyncio.gather(*(task for task in (self._learning, self._showing) if task is not None), return_exceptions=True)


def _loaded(node: BuiltNode, model: WarmModel) -> LoadedModel:
    return LoadedModel(
        model.name,
        model.digest,
        str(model.weights),
        model.speed.numerics_id,
        node.model.created,
        model.context,
        model.tokenizer,
        model.speed.holds_identity,
    )


@asynccontextmanager
async def serving(
    node: BuiltNode | None,
    settings: FleetSettings,
    home: Home,
    clock: Clock,
    stop: asyncio.Event,
    hosting: Hosting | None = None,
    proposers: Sequence[LoadedProposer] = (),
    beside: Sequence[ModelLocation] = (),
    claim: Claim | None = None,
) -> AsyncGenerator[FleetServing]:
    """A node of the fleet, for as long as the block runs; it says goodbye as soon as `stop` is set.

    Raises:
        UserError: it can't be one.
    """
    whole = FleetServing(node, settings, home, clock, hosting, proposers, beside)
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
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await whole.stop()
