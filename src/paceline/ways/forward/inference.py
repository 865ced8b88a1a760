"""The whole fleet as one `Inference`: a request arrives here and runs where the plan says, and its answer streams back through here.

Law: a request keeps the node it started with for as long as that advances; then it moves on to another node of its route, one that gives the same bytes
if there is one, and continues there from the tokens so far. An exact request moves to no other. A prompt leaves the home network only if, when it came, no node at home
had served a model of that name lately. A missing seed is drawn here. What this node runs itself, where no other could, costs nothing more than before.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import grpc.aio

from paceline.core.background import end_tasks
from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.errors import InvalidRequest, PacelineError, WayNotAllowed
from paceline.core.following import Holding, promises_bytes
from paceline.core.generation import GenerationRequest
from paceline.core.ids import NodeId
from paceline.core.inference import ChunkStream, Progress, ServedModel, fingerprint_of
from paceline.core.model import ModelRef
from paceline.core.stats import EngineStats
from paceline.core.via import new_mark, through
from paceline.fleet.card import ModelOffer
from paceline.fleet.eligibility import MayAnswer, Use
from paceline.net.member.node import FleetNode
from paceline.ways.forward.client import Described, RemoteStream, TokenizerStore
from paceline.ways.forward.forwarded import Forwarded, Leg
from paceline.ways.forward.known import KnownRoutes
from paceline.ways.forward.proofs import PROBE, Again, Proofs, probe
from paceline.ways.forward.routes import (
    MESSAGES,
    AnswerRoute,
    Meaning,
    Prompt,
    RouteStop,
    Sharing,
    may_be_loading,
    open_to,
    routes,
    with_room,
)
from paceline.ways.forward.service import LoadedModel, LocalModels

logger = logging.getLogger(__name__)

Key = tuple[str, Meaning]
"""A model by name, and what it is."""

RETRY_S = 5.0
MOST_RETRY_S = 300.0
"""After a tokenizer could not be had, it is asked for again, each time later. Raising them: a model of another node appears later."""
MOST_SHOWN = 64
"""Models of other nodes whose tokenizers are held. Raising it: what other nodes can make this one hold."""

CONTEXT_S = 30.0
"""Between two looks at the context of another node's model, which changes where machines lease it KV. Raising it: requests are refused for longer that
would fit by now."""
SETTLE_S = 3.0
"""How long a start waits for a first look at the fleet. Raising it: a node whose fleet does not answer is ready later."""


class FleetInference:
    """Implements `core.inference.Inference` over this node's engine and every other node's."""

    def __init__(
        self,
        fleet: FleetNode,
        local: LocalModels,
        tokenizers: TokenizerStore,
        clock: Clock,
        draw: Callable[[], float] = random.random,
        held: Callable[[str, str, Sequence[int], str], Mapping[NodeId, float]] = lambda *_: {},
        legs: Callable[[str, str, GenerationRequest], ChunkStream] | None = None,
        mark: str = "",
    ) -> None:
        """On the event loop.

        Args:
            held: what part of a prompt each node has KV of, from a model's digest, its numerics id, the prompt and its salt.
            legs: runs a request that a router sent to two nodes, from a model's digest and its numerics id; None: there are none.
            mark: this process's mark on requests that leave it, see `core.via`; empty: one is drawn.
            draw: numbers in [0, 1): which answers of others are computed again here.
        """
        self._fleet, self._local, self._tokenizers, self._clock = fleet, local, tokenizers, clock
        self._held, self._legs = held, legs
        self._mark = mark or new_mark(fleet.node_id)
        self._sharing = Sharing(fleet.node_id, self.own_load, self._heard_s, clock)
        self._proofs = Proofs(clock, self._changed, fleet.found_wrong, draw)
        self._known = KnownRoutes(clock)
        self._described: OrderedDict[Key, Described] = OrderedDict()
        """That used last at the end."""
        self._set_aside: set[Key] = set()
        """Made way for others; fetched again when asked for."""
        self._fetching: dict[Key, asyncio.Task[None]] = {}
        self._following: dict[Key, asyncio.Task[None]] = {}
        """Looks at what is described."""
        self._stale = self._closed = False
        self._unsettled_until = clock.monotonic() + SETTLE_S
        """The fleet may have more than was seen yet."""
        fleet.listen(lambda _: self._changed())
        self._changed()

    # -------------------------------------------------------------------------------------------------------------- for the server

    def models(self) -> Sequence[ServedModel]:
        """This node's own first, then those of others by name, as soon as their tokenizers are here. As the view was read last."""
        local = [] if self._local.inference is None else self._local.inference.models()
        own = [self._shown(model) for model in local if not self._yields(model)]
        names = {model.name for model in own}
        others = [
            described.served(route)
            for name, route in self._routes.items()
            if name not in names and (described := self._described.get((name, route.meaning))) is not None
        ]
        return (*own, *others)

    def expects(self, model: str) -> bool:
        """See `Inference.expects`: its tokenizer may be on its way, or a machine may start anew; and at a start, the first look is still to come."""
        return self._clock.monotonic() < self._unsettled_until or self._known.expects(model)

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        self._refresh()
        if request.leg is not None:
            return self._leg_here(model, request)
        route = self._routes.get(model)
        if route is not None:
            self._wanted(route)
            self._known.check_home(route)
        if self._local.inference is not None and (route is None or [stop.node_id for stop in route.stops] == [self._fleet.node_id]):
            return self._local.inference.generate(model, request)
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))
        return Forwarded(request, _Nodes(self, model, route, exact=request.exact), self._clock)

    def stats(self) -> EngineStats:
        return EngineStats() if self._local.inference is None else self._local.inference.stats()

    def progress(self) -> Progress:
        own = Progress(busy=False, seconds_since_step=0.0) if self._local.inference is None else self._local.inference.progress()
        return replace(own, failing=self._fleet.failing)

    # ------------------------------------------------------------------------------------------------------------- for its owner

    def look_again(self) -> None:
        """What this node has loaded changed."""
        self._stale = True
        self._refresh()

    async def settle(self) -> None:
        """Wait for a first look at the fleet, and for the tokenizers of what it has, as long as members answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._fleet.gossip.first_look()
                self._refresh()
                if self._fetching:
                    await asyncio.wait(self._fetching.values())
        self._unsettled_until = self._clock.monotonic()

    async def close(self) -> None:
        """Stop asking others for tokenizers. Idempotent."""
        self._closed = True
        await self._proofs.close()
        await end_tasks(*self._fetching.values(), *self._following.values())

    # ------------------------------------------------------------------------------------------------------------------- inside

    @property
    def _routes(self) -> Mapping[str, AnswerRoute]:
        return self._known.routes

    def _changed(self) -> None:
        self._stale = True
        # Soon, so that all that one message brought is planned with once.
        asyncio.get_running_loop().call_soon(self._refresh)

    def _refresh(self) -> None:
        """Read the view again if it changed: rarely, so a request costs a look at a flag."""
        if not self._stale:
            return
        self._stale = False
        loaded = {one.model.name: Meaning(one.model, one.tokenizer) for one in self._local.all}
        answerers: MayAnswer = self._fleet.eligible(Use.ANSWER)
        self._known.read(routes(self._proofs.as_seen(answerers), loaded, self._known.meanings, mark=self._mark))
        local = [] if self._local.inference is None else self._local.inference.models()
        loaded = {name: one for name, one in loaded.items() if name not in {model.name for model in local if self._yields(model)}}
        shown = {(name, route.meaning) for name, route in self._routes.items() if name not in loaded}
        self._described = OrderedDict((key, described) for key, described in self._described.items() if key in shown)
        self._set_aside &= shown
        for name, route in self._routes.items():
            if name not in loaded:
                self._fetch(route)
        if not self._closed:
            for stop, offer in self._proofs.to_prove(answerers):
                self._prove(stop, offer)

    def _prove(self, stop: RouteStop, offer: ModelOffer) -> None:
        """Have another node, which claims to be faster than this one, show it."""
        served, loaded = self._local.served(offer.model_id), self._local.find(offer.model_id)
        if served is None or loaded is None:  # it has another name there
            return
        request = probe(served.tokenizer.encode(PROBE))
        remote = LoadedModel(offer.model, offer.numerics_id, 0, 0)
        stream = RemoteStream(lambda: self._fleet.channel(stop.node_id, stop.addresses, Use.ANSWER), stop.node_id, remote, request)
        self._proofs.prove(stop, offer, stream, request, self._again(offer.model_id, stop, offer.model))

    def _again(self, name: str, stop: RouteStop, model: ModelRef) -> Again | None:
        """What computes here what another node answers; None where the bytes are not the same."""
        inference, loaded = self._local.inference, self._local.find(name)
        if inference is None or loaded is None or not loaded.numerics_id or loaded.numerics_id != stop.numerics_id:
            return None
        if loaded.model != model or not loaded.holds_identity:
            return None
        return lambda request: inference.generate(name, request)

    def _yields(self, model: ServedModel) -> bool:
        """Return whether a node at home has a model by the name of this one, which an engine outside of the home network answers here."""
        route = self._routes.get(model.name)
        return model.facts.leaves_network and route is not None and not route.leaves

    def _shown(self, model: ServedModel) -> ServedModel:
        """This node's model, with the fingerprint of the kernels that would answer."""
        route, loaded = self._routes.get(model.name), self._local.find(model.name)
        # What would be loaded here on demand is asked of those that have it loaded.
        described = None if route is None or loaded is not None else self._described.get((model.name, route.meaning))
        if route is not None and described is not None:
            return described.served(route)
        if route is None or loaded is None:
            return model
        largest = max(model.max_context, route.context(self._fleet.node_id))
        if largest != model.max_context or (model.facts.on_disk and not route.on_disk):
            model = replace(model, max_context=largest, facts=replace(model.facts, on_disk=route.on_disk))
        return (
            model
            if route.numerics_id == loaded.numerics_id
            else replace(model, fingerprint=fingerprint_of(loaded.model, route.numerics_id))
        )

    def _own_context(self, name: str) -> Callable[[RouteStop], int]:
        """Return what tells the context of own kernels at a stop: this node's is known, another node refuses by itself."""
        loaded = self._local.find(name)
        return lambda stop: loaded.max_context if loaded is not None and stop.node_id == self._fleet.node_id else 0

    def _leg_here(self, model: str, request: GenerationRequest) -> ChunkStream:
        """A router chose this node for it."""
        loaded = self._local.find(model)
        if loaded is None or self._legs is None:
            raise InvalidRequest(f"kv_transfer_params: {model} does not run at this machine", field="kv_transfer_params")
        return self._legs(loaded.model.digest, loaded.numerics_id, request)

    def leg(
        self, name: str, meaning: Meaning, request: GenerationRequest, left: Collection[NodeId], after: Holding | None, *, may_leave: bool
    ) -> Leg | None:
        """See `Nodes.leg`.

        Args:
            meaning: what the name stood for when the request came.
            may_leave: only engines outside of the home network had the model then.
        """
        self._refresh()
        route = self._routes.get(name)
        if route is None or route.meaning != meaning:
            return None
        prompt = Prompt(request.prompt_ids, f"{meaning.model.digest}:{meaning.model.weights}", request.cache_salt)
        stops = with_room([stop for stop in route.stops if _can_take(stop, request)], request, self._own_context(name))
        following = dict(open_to(stops, after, left, exact=request.exact, may_leave=may_leave))

        def held() -> Mapping[NodeId, float]:
            found: dict[NodeId, float] = {}
            for numerics_id in {stop.numerics_id for stop in following} - {""}:
                found |= self._held(meaning.model.digest, numerics_id, request.prompt_ids, request.cache_salt)
            return found

        stop = self._sharing.choose(tuple(following), prompt, left, held)
        if stop is None:
            return None
        self._sharing.began(stop.node_id, prompt)
        return Leg(stop, self._stream(name, stop, request), following[stop])

    def is_coming(self, digest: str, left: Mapping[NodeId, bytes]) -> bool:
        """See `Nodes.is_coming`.

        Args:
            left: which instance of a node the request left.
        """
        return may_be_loading(self._fleet.eligible(Use.ANSWER).cards, digest, left)

    def ended(self, leg: Leg, error: PacelineError | None) -> None:
        self._sharing.ended(leg.stop, error)
        if error is not None:
            self._fleet.meter.retried += 1
            logger.info("a request leaves %s: %s", leg.node_id, error)

    def own_load(self) -> int:
        """Sequences that run and wait here."""
        stats = self.stats()
        return stats.running + stats.waiting

    def _heard_s(self, node_id: NodeId) -> float | None:
        live = self._fleet.view().get(node_id)
        return None if live is None else self._clock.monotonic() - live.age_s

    def _stream(self, name: str, stop: RouteStop, request: GenerationRequest) -> ChunkStream:
        if stop.node_id == self._fleet.node_id and self._local.inference is not None:
            return self._local.inference.generate(name, request)
        loaded = LoadedModel(replace(stop.model, name=name), stop.numerics_id, 0, 0)

        def dial() -> grpc.aio.Channel:
            channel = self._fleet.channel(stop.node_id, stop.addresses, Use.ANSWER)
            self._fleet.meter.forwarded += 1
            return channel

        stream = RemoteStream(dial, stop.node_id, loaded, replace(request, via=through(request.via, self._mark)))
        return self._proofs.watched(stop, stop.model, stream, request, self._again(name, stop, stop.model))

    def _wanted(self, route: AnswerRoute) -> None:
        """A model was asked for."""
        key = (route.name, route.meaning)
        if key in self._described:
            self._described.move_to_end(key)
        elif key in self._set_aside:
            self._set_aside.discard(key)
            self._fetch(route)

    def _fetch(self, route: AnswerRoute) -> None:
        """Get what it takes to show and tokenize for a model of others."""
        key = (route.name, route.meaning)
        if key in self._described or key in self._fetching or key in self._set_aside or self._closed:
            return
        task = asyncio.create_task(self._describe(key), name=f"tokenizer of {route.name}")
        self._fetching[key] = task
        task.add_done_callback(lambda _: self._fetching.pop(key, None))

    async def _describe(self, key: Key) -> None:
        name, meaning = key
        backoff = Backoff(RETRY_S, MOST_RETRY_S)
        while (route := self._routes.get(name)) is not None and route.meaning == meaning:
            for stop in route.stops:
                if stop.node_id == self._fleet.node_id:  # its own card, while its engine is down
                    continue
                try:
                    channel = self._fleet.channel(stop.node_id, stop.addresses, Use.ANSWER)
                    self._described[key] = await self._tokenizers.describe(channel, stop.node_id, name, meaning)
                except PacelineError as error:
                    logger.warning("no tokenizer of %s from %s: %s", name, stop.node_id, error)
                    continue
                if len(self._described) > MOST_SHOWN:
                    self._set_aside.add(self._described.popitem(last=False)[0])
                if key not in self._following:
                    task = self._following[key] = asyncio.create_task(self._follow(key), name=f"context of {name}")
                    task.add_done_callback(lambda _: self._following.pop(key, None))
                return
            await asyncio.sleep(backoff.fail(self._clock.monotonic()))

    async def _follow(self, key: Key) -> None:
        """Ask the best node for its context again and again, as long as the model is shown."""
        name, meaning = key
        while True:
            await asyncio.sleep(CONTEXT_S)
            route = self._routes.get(name)
            if route is None or key not in self._described:
                return
            stop = route.stops[0]
            with suppress(PacelineError):  # it is told where a request fails by it
                channel = self._fleet.channel(stop.node_id, stop.addresses, Use.ANSWER)
                described = await self._tokenizers.describe(channel, stop.node_id, name, meaning)
                if key in self._described:
                    self._described[key] = described


def _can_take(stop: RouteStop, request: GenerationRequest) -> bool:
    """Return whether a node takes the request's form of prompt: a whole chat goes to engines that take them, and ids to all that hold the tokenizer."""
    if request.chat:
        return stop.engine is not None and MESSAGES in stop.engine.takes
    return stop.engine is None or any(form != MESSAGES for form in stop.engine.takes)


class _Nodes:
    """Implements `Nodes` over the route that a request found at its start.

    Raises:
        WayNotAllowed: the request is exact, and no node of the route promises its bytes.
    """

    def __init__(self, fleet: FleetInference, name: str, route: AnswerRoute | None, *, exact: bool) -> None:
        self._fleet, self._name = fleet, name
        self._meaning = None if route is None else route.meaning
        self._may_leave = route is not None and route.leaves
        self._left: dict[NodeId, bytes] = {}
        self._first: Holding | None = None
        """The holder that an exact answer has the bytes of; None: any may begin."""
        if exact and route is not None:
            self._first = next((stop.holding for stop in route.stops if promises_bytes(stop.holding)), None)
            if self._first is None:
                raise WayNotAllowed(f"exact: no machine that serves {name} promises its bytes", "Leave it out.", field="exact")

    def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
        if self._meaning is None:
            return None
        return self._fleet.leg(self._name, self._meaning, request, left, after or self._first, may_leave=self._may_leave)

    def is_coming(self) -> bool:
        return self._meaning is not None and self._fleet.is_coming(self._meaning.model.digest, self._left)

    def ended(self, leg: Leg, error: PacelineError | None) -> None:
        if error is not None:
            self._left[leg.node_id] = leg.stop.instance
        self._fleet.ended(leg, error)
