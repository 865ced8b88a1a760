"""The fleet's encoders as one `core.encoding.Encoders`: this node's own first, then other nodes'.

Laws:
- One holder computes all of a request. If it fails, the whole request goes to the next one that has the same weights: see `core.following`.
- A name keeps its meaning for as long as a node offers it, since vectors of two models can't be compared.
- Texts leave the home network only as prompts do: see `ways.forward.inference`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from paceline.core.clock import Clock
from paceline.core.encoding import Encoded, EncodeRequest, EncoderModel, Task, joined
from paceline.core.errors import ContextOverflow, FleetError, ModelAway, PacelineError, goes_elsewhere
from paceline.core.ids import NodeId
from paceline.core.inference import ModelFacts
from paceline.core.via import through
from paceline.fleet.card import ModelOffer, Role
from paceline.fleet.eligibility import MayAnswer, Use
from paceline.machine.encoders import LocalEncoders
from paceline.net.member.node import FleetNode
from paceline.net.wire.encode_pb2_grpc import EncodeServiceStub
from paceline.ways.forward.client import PeerCall
from paceline.ways.forward.encode_service import MAX_PART_BYTES, MAX_TEXT_BYTES, MAX_TEXTS, read_encoded, write_encode_request
from paceline.ways.forward.known import KnownRoutes
from paceline.ways.forward.routes import AnswerRoute, Meaning, Prompt, RouteStop, Sharing, routes

logger = logging.getLogger(__name__)


class FleetEncoders:
    """Implements `core.encoding.Encoders` over this node's encoders and every other node's. On the event loop.

    Args:
        mark: this process's mark on requests that leave it; see `core.via`.
    """

    def __init__(self, fleet: FleetNode, local: LocalEncoders, clock: Clock, mark: str) -> None:
        self._fleet, self._local, self._clock, self._mark = fleet, local, clock, mark
        self._known = {task: KnownRoutes(clock) for task in Task}
        self._shown: dict[str, EncoderModel] = {}
        """Encoders of routes, by name."""
        self._sharing = Sharing(fleet.node_id, lambda: 0, self._heard_s, clock)
        self._stale = False
        fleet.listen(lambda _: self._changed())
        self._changed()

    def look_again(self) -> None:
        """Read the view again, because this node's encoders changed."""
        self._stale = True
        self._refresh()

    def _changed(self) -> None:
        self._stale = True
        asyncio.get_running_loop().call_soon(self._refresh)  # once for all that one message brought

    def encoders(self) -> Sequence[EncoderModel]:
        own = {model.name: model for model in self._local.encoders() if not self._yields(model)}
        return (*own.values(), *(model for name, model in self._shown.items() if name not in own))

    def expects(self, name: str) -> bool:
        return self._local.expects(name) or any(known.expects(name) for known in self._known.values())

    async def encode(self, name: str, request: EncodeRequest) -> Encoded:
        """See `Encoders.encode`.

        Raises:
            RequestLoop: the request would pass through this node a second time.
        """
        self._refresh()
        known = self._known[request.task]
        route = known.routes.get(name)
        if route is None or (name == self._local.own_name and request.task is Task.EMBED):
            if route is None and known.expects(name) and self._local.ref_of(name, request.task) is None:
                raise ModelAway(f"No machine serves the encoder {name!r} at this moment", "Try again in a few seconds.")
            return await self._local.encode(name, request)
        known.check_home(route)
        left: set[NodeId] = set()
        trouble: PacelineError | None = None
        while (stop := self._choose(route, left)) is not None:
            self._sharing.began(stop.node_id, NO_PROMPT)
            failed: PacelineError | None = None
            try:
                return await self._encode_at(stop, name, request)
            except PacelineError as error:
                failed = error
                if not goes_elsewhere(error):
                    raise
                logger.info("texts for %s leave %s: %s", name, stop.node_id, error)
                self._fleet.meter.retried += 1
                trouble = trouble or error
                left.add(stop.node_id)
            finally:
                self._sharing.ended(stop, failed)
        assert trouble is not None, "a route has a stop"
        raise trouble

    def _choose(self, route: AnswerRoute, left: set[NodeId]) -> RouteStop | None:
        own = self._fleet.node_id
        if own not in left and (here := next((stop for stop in route.stops if stop.node_id == own), None)) is not None:
            return here
        return self._sharing.choose(route.stops, NO_PROMPT, left)

    async def _encode_at(self, stop: RouteStop, name: str, request: EncodeRequest) -> Encoded:
        if stop.node_id == self._fleet.node_id:
            return await self._local.encode(name, request)
        via = through(request.via, self._mark)
        self._fleet.meter.forwarded += 1
        parts = [await self._call(stop, name, part, via) for part in [*parts_of(request)]]
        if len({part.values.shape[1:] for part in parts}) > 1:
            raise FleetError(f"{stop.node_id} changed the length of its vectors during an answer")
        return joined(parts)

    async def _call(self, stop: RouteStop, name: str, part: EncodeRequest, via: tuple[str, ...]) -> Encoded:
        message = write_encode_request(replace(stop.model, name=name), replace(part, via=via))
        call = PeerCall(
            lambda: EncodeServiceStub(self._fleet.channel(stop.node_id, stop.addresses, Use.ANSWER)).Encode(message), stop.node_id
        )
        found: list[Encoded] = []
        try:
            while (answer := await call.read()) is not None:
                if answer.ByteSize():  # an empty one says that the node works
                    found.append(read_encoded(answer, part, stop.node_id))
                    if sum(len(each.values) for each in found) > len(part.inputs):
                        break
        finally:
            call.hang_up()
        if sum(len(each.values) for each in found) != len(part.inputs) or len({each.values.shape[1:] for each in found}) > 1:
            raise FleetError(f"{stop.node_id} sent results for other texts than those it was asked for", "Look at its log.")
        return joined(found)

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        answerers: MayAnswer = self._fleet.eligible(Use.ANSWER)
        names = [model.name for model in self._local.encoders()]
        for task, known in self._known.items():
            here = {name: ref for name in names if (ref := self._local.ref_of(name, task)) is not None}
            loaded = {name: Meaning(ref) for name, ref in here.items()}
            known.read(routes(answerers, loaded, known.meanings, partial(does, task=task), self._mark))
        shown: dict[str, EncoderModel] = {}
        offers = {
            (card.node_id, offer.model_id): offer
            for card in answerers.cards
            for offer in card.models
            if any(does(offer, task=task) for task in Task)
        }
        for task, known in self._known.items():
            for name, route in known.routes.items():
                shown[name] = self._described(route, offers[route.stops[0].node_id, name], task, shown.get(name))
        self._shown = shown

    def _described(self, route: AnswerRoute, offer: ModelOffer, task: Task, same: EncoderModel | None) -> EncoderModel:
        if same is not None:
            return replace(same, tasks=same.tasks | {task})
        known = self._shown.get(route.name)
        created = int(self._clock.wall()) if known is None else known.created
        model, engine = route.meaning.model, route.engine
        facts = ModelFacts(model.digest if model.has_digest else "", route.size_bytes)
        if engine is not None:
            facts = replace(facts, stored_as=engine.quantisation, engine=engine.engine, leaves_network=route.leaves, via=route.via)
        dimensions, most = (0, 0) if offer.shape is None else (offer.shape.hidden, offer.shape.max_context)
        return EncoderModel(route.name, created, frozenset({task}), most, dimensions, replace(facts, hidden=dimensions))

    def _yields(self, model: EncoderModel) -> bool:
        """Return whether a node at home has an encoder by the name of this one, which an engine outside of the home network runs here."""
        found = [known.routes[model.name] for known in self._known.values() if model.name in known.routes]
        return model.facts.leaves_network and any(not route.leaves for route in found)

    def _heard_s(self, node_id: NodeId) -> float | None:
        live = self._fleet.view().get(node_id)
        return None if live is None else self._clock.monotonic() - live.age_s


NO_PROMPT = Prompt(())


def does(offer: ModelOffer, *, task: Task) -> bool:
    """Return whether a model does a task: an own encoder makes vectors, and engines say what theirs do."""
    if offer.engine is None:
        return offer.role is Role.EMBEDDER and task is Task.EMBED
    return offer.role in {Role.EMBEDDER, Role.VERIFIER} and task in offer.engine.capabilities


def parts_of(request: EncodeRequest) -> Iterator[EncodeRequest]:
    """Yield a request in parts that fit one call each.

    Raises:
        ContextOverflow: a text is longer than any call takes.
    """
    query = 0 if request.query is None else size_of(request.query)
    first = held = 0
    for place, (given, name) in enumerate(zip(request.inputs, request.names, strict=True)):
        size = size_of(given)
        if query + size > MAX_TEXT_BYTES:
            raise ContextOverflow(
                f"{name}: {size} bytes, and other machines take {MAX_TEXT_BYTES - query} of a text", "Send it in parts.", field=name
            )
        if place > first and (held + size > MAX_PART_BYTES or place - first == MAX_TEXTS):
            yield request.part(first, place)
            first, held = place, 0
        held += size
    yield request.part(first, len(request.inputs))


def size_of(given: str | Sequence[int]) -> int:
    """Return the bytes that an input takes in a message, or a little more."""
    if not isinstance(given, str):
        return 5 * len(given)
    return len(given) if given.isascii() else len(given.encode("utf-8", "surrogatepass"))
