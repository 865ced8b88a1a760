"""Machines of a view that can run layers of a requested model, and their speed: cards as placement reads them.

Law: total over any cards. A figure that is impossible (not finite, below zero, absurd) counts as not measured, and the order of cards changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role, StepTime
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.fleet.plan import PlanRequest

DECODE_SHARE = 0.5
"""Share of a machine's memory bandwidth that decoding is assumed to reach where it was not measured. Low on purpose: an estimate should not easily beat
a measurement. bench/placement.py measured 1.2 for a model of which a third fits into the cache; large models can't exceed 1."""
KV_READ_SHARE = 0.65
"""Share of a machine's memory bandwidth that attention reaches while it reads the KV of one row. Source: bench/placement.py, contexts of 16 to 4096
tokens: 0.61 to 0.72."""
PROMPT_KV = 0.15
"""Attention cost of a prompt's row, in relation to a decoded row: neighbouring rows read the same KV. Source: bench/placement.py, 0.13 to 0.16."""
MEASURED_PROMPT = 512
"""Tokens of the prompt that prefill rates were measured with. The rates include its attention."""
PREFILL_PER_DECODE = 8.0
"""Prompt tokens computed in the time of one decoded token, where it was not measured. Source: bench/RESULTS.md (9.8 there), rounded down."""
FREE_SHARE = 0.9
"""Share of a machine's free memory that a plan may use: cards round, and activations and other programs need some too. Raising it: loading fails more
often; lowering it: memory stays unused."""
MAX_LAYERS = 4096
DIGEST_DIGITS = 12
"""Digits of a digest that suffice to name a model."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that can run layers of one model."""

    card: NodeCard
    """The node's card, with memory and speed of the device that runs the offer's weights format."""
    offer: ModelOffer
    """The node's own offer, or that of the node that its weights would come from."""
    shape: ModelShape
    layer_s: float
    """Seconds of a decoded token in a layer, KV included."""
    edge_s: float
    """Seconds of a decoded token in embedding, norm and head."""
    prompt_layer_s: float
    """Seconds of a prompt token in a layer."""
    measured: bool
    room_bytes: int
    """Bytes that weights, KV and working memory may take."""
    kv_layer_bytes: int
    """Bytes of the request's KV in a layer, for all its streams."""
    working_bytes: int = 0
    """Bytes that the rows of a batch take besides, independent of the number of layers."""
    kv_layer_s: float = 0.0
    """Seconds to read one sequence's KV in a layer; part of `layer_s`."""
    edge_row_s: float = 0.0
    """Seconds that each row beyond the first adds in the head."""
    steps: tuple[StepTime, ...] = ()
    """Measured times of steps as this node serves the model, by rows in ascending order."""
    fetch_from: NodeId | None = None
    takes_layers: bool = True
    """False: it may only hold embedding and head, as a pipeline's first stage."""

    @property
    def node_id(self) -> NodeId:
        return self.card.node_id

    @property
    def token_s(self) -> float:
        """Seconds of a decoded token in the whole model."""
        return self.layer_s * self.shape.n_layers + self.edge_s

    def layer_batch_s(self, sequences: float) -> float:
        """Return the seconds of a layer for one decoded token of each of several sequences: weights are read once, KV by each."""
        more, measured = sequences - 1, self._rows_measured_s(sequences - 1)
        rows = more * self.prompt_layer_s if measured is None else measured * (1 - self._edge_share) / self.shape.n_layers
        return self.layer_s + more * self.kv_layer_s + rows

    def edge_batch_s(self, sequences: float) -> float:
        """Return the seconds of embedding, norm and head for one decoded token of each of several sequences."""
        measured = self._rows_measured_s(sequences - 1)
        return self.edge_s + ((sequences - 1) * self.edge_row_s if measured is None else measured * self._edge_share)

    def rows_s(self, rows: int) -> float:
        """Return the seconds that `rows` more rows add to a step of the whole model: as measured, or else as a prompt's rows take."""
        measured = self._rows_measured_s(rows)
        return rows * self.prompt_layer_s * self.shape.n_layers if measured is None else measured

    def _rows_measured_s(self, more: float) -> float | None:
        """Return the seconds that `more` rows add to a step of one row, interpolated between measured steps, and in proportion beyond them. None: steps
        of one row and of several rows were not both measured.
        """
        one = next((step.seconds for step in self.steps if step.rows == 1), None)
        if one is None or len(self.steps) < 2:
            return None
        before, before_s = 0.0, 0.0
        for step in self.steps:
            rows, seconds = step.rows - 1.0, max(before_s, step.seconds - one)
            if rows <= 0:
                continue
            if more <= rows:
                return before_s + (seconds - before_s) * (more - before) / (rows - before)
            before, before_s = rows, seconds
        return before_s * more / before

    @property
    def _edge_share(self) -> float:
        layers = self.shape.n_layers * self.shape.layer_bytes
        return self.shape.edge_bytes / (layers + self.shape.edge_bytes)

    @property
    def runs_whole(self) -> bool:
        """Return whether it may hold the edges: alone, or as a pipeline's first stage."""
        return self.offer.role is Role.VERIFIER

    def needs(self, layers: int, *, edges: bool) -> int:
        """Return the bytes that this number of layers takes, with the request's KV and working memory. With `edges`, embedding and head are included."""
        return layers * (self.shape.layer_bytes + self.kv_layer_bytes) + self.working_bytes + (self.shape.edge_bytes if edges else 0)

    @property
    def holds_edges(self) -> bool:
        return self.room_bytes >= self.needs(0, edges=True)

    def holds(self, *, edges: bool) -> int:
        if not self.takes_layers:
            return 0
        room = self.room_bytes - self.needs(0, edges=edges)
        return max(0, min(self.shape.n_layers, room // (self.shape.layer_bytes + self.kv_layer_bytes)))


def live_cards(view: Iterable[NodeCard]) -> dict[NodeId, NodeCard]:
    """Return one card for each node, by id: the one with the highest version. Leaving nodes are left out."""
    newest: dict[NodeId, NodeCard] = {}
    for card in view:
        other = newest.get(card.node_id)
        if other is None or (card.version, repr(card)) > (other.version, repr(other)):
            newest[card.node_id] = card
    return {node_id: newest[node_id] for node_id in sorted(newest) if not newest[node_id].leaving}


def sensible(figure: float, least: float, most: float) -> float | None:
    """Clamp a figure to a plausible range; None if it is not positive or absurdly large."""
    return min(max(float(figure), least), most) if 0 < figure < 1e300 else None


def memory_rate(card: NodeCard) -> float | None:
    """Return a machine's memory bandwidth in bytes per second; None if its card has none."""
    return sensible(card.memory_bytes_per_s, 1e6, 1e15)


def matching_offers(cards: Mapping[NodeId, NodeCard], request: PlanRequest) -> list[tuple[NodeCard, ModelOffer]]:
    """Return every offer of the requested model: by its id, by its digest, or by the digest of an offer with that id.

    Raises:
        PlacementError: no node has the model, or none has it in the requested weights format.
    """
    layered = [
        (card, offer)
        for card in cards.values()
        for offer in card.models
        if offer.role in {Role.VERIFIER, Role.SHARD} and offer.shard is None and _is_sound(offer.shape)
        if card.node_id == request.orchestrator or not _only_reads_prompts(card, offer)
    ]
    named = [(card, offer) for card, offer in layered if is_named(offer, request.model)]
    digests = {offer.digest for _, offer in named if offer.digest}
    found = [(card, offer) for card, offer in layered if is_named(offer, request.model) or offer.digest in digests]
    if not found:
        others = sorted({offer.model_id for _, offer in layered})
        hint = f"Offered: {', '.join(others[:8])}. " if others else ""
        hint += "On a machine that is to have it: `paceline pull org/name` from the hub, or `paceline pull FILE`, or `paceline up --model FILE`."
        raise PlacementError(f"No machine that is seen here has the model {request.title!r}", hint)
    if request.exact:
        found = [(card, offer) for card, offer in found if offer.numerics_id or not offer.warm]
        if not found:
            raise PlacementError(f"No machine that runs {request.title} promises its bytes", "Leave out --exact.")
    wanted = [(card, offer) for card, offer in found if request.weights in {"", offer.weights}]
    if not wanted:
        formats = ", ".join(sorted({offer.weights for _, offer in found}))
        raise PlacementError(f"No machine offers {request.title} in {request.weights[:40]} weights", f"Offered: {formats}.")
    return wanted


def _only_reads_prompts(card: NodeCard, offer: ModelOffer) -> bool:
    """Return whether a machine computes prompts of the model for others, and answers none: its copies on the disk are then no reason to ask it."""
    prefills = [each for each in card.models if each.role is Role.PREFILL]
    return any(each.model_id == offer.model_id or (each.digest and each.digest == offer.digest) for each in prefills)


def groups(offers: Sequence[tuple[NodeCard, ModelOffer]], request: PlanRequest) -> list[list[Machine]]:
    """Group machines by identical weights, since only those can share a request. The groups and their order are the same for any order of cards."""
    found: dict[tuple[str, ...], dict[NodeId, Machine]] = {}
    for card, offer in sorted(offers, key=lambda pair: (pair[0].node_id, _merit(pair[1]))):
        assert offer.shape is not None
        machine = _machine(card.running(offer.weights), _as_loaded(offer, card), offer.shape, request)
        if machine is None:
            continue
        # Without a digest, two machines' weights may differ, so each is a group of its own. Neither the context that a node serves nor the fields that
        # an older node leaves out separate machines.
        shape = replace(offer.shape, max_context=0, divided=None)
        key = (offer.digest or f"{offer.model_id}@{card.node_id}", offer.weights, repr(shape))
        found.setdefault(key, {})[card.node_id] = machine  # the last offer of a node is its best
    return [list(found[key].values()) for key in sorted(found)]


LinkOf = Callable[[NodeId, NodeId], Link | None]
"""Function that returns the link from one node to another; None if there is none to plan with."""


def could_share(group: Sequence[Machine], cards: Mapping[NodeId, NodeCard], link_of: LinkOf, request: PlanRequest) -> list[Machine]:
    """Return machines outside of a group that could share its weights: they fetch them from a machine of the group, or have them already."""
    if not group or not group[0].offer.digest:
        return []
    has = {machine.node_id for machine in group}
    found: list[Machine] = []
    for card in cards.values():
        if card.node_id in has or not card.backend:
            continue
        reachable = [(link.bytes_per_s, machine) for machine in group if (link := link_of(machine.node_id, card.node_id)) is not None]
        if not reachable:
            continue
        source = max(reachable, key=lambda pair: (pair[0], pair[1].node_id))[1]
        offer = replace(
            source.offer,
            role=Role.VERIFIER,
            tokens_per_second=0.0,
            prefill_tokens_per_second=0.0,
            warm=False,
            numerics_id="",
            steps=(),
            drafts=(),
        )
        offer = _as_loaded(offer, card)
        machine = _machine(card.running(offer.weights), offer, source.shape, request)
        if machine is not None:
            # A node may have the weights and still belong to another group: its weights need another amount of memory as it runs them.
            is_here = any(own.shard is None and own.digest == offer.digest for own in card.models)
            found.append(machine if is_here else replace(machine, fetch_from=source.node_id))
    return found


def _as_loaded(offer: ModelOffer, card: NodeCard) -> ModelOffer:
    """Return an offer with the numerics id and the speeds that are known of this node. Source: its card's entry for the same model, or for layers of
    it, as it was loaded.
    """
    known = (own for own in card.models if own.numerics_id and (own.warm or own.shard is None))
    loaded = next((own for own in known if own.model.is_same(offer.model)), None)
    if loaded is None or offer.numerics_id:
        return offer
    return replace(
        offer, tokens_per_second=offer.tokens_per_second or loaded.tokens_per_second, numerics_id=loaded.numerics_id,
        prefill_tokens_per_second=offer.prefill_tokens_per_second or loaded.prefill_tokens_per_second,
    )  # fmt: skip


def stage_machines(machines: Iterable[Machine], request: PlanRequest, barred: Collection[NodeId] = ()) -> list[Machine]:
    """Return the machines that may be stages of a pipeline, with the memory they may use for it. Empty if the orchestrator is not among them.

    Args:
        machines: machines that have the weights, or would fetch them.
        request: names the orchestrator and the numerics id.
        barred: nodes that may not hold layers for others.
    """
    able = [machine for machine in machines if not request.numerics_id or machine.offer.numerics_id in {"", request.numerics_id}]
    if request.orchestrator is None:
        return [machine for machine in able if machine.node_id not in barred]
    first = [machine for machine in able if machine.node_id == request.orchestrator and machine.runs_whole]
    return first and [*first, *(host for machine in able if machine is not first[0] and (host := _host(machine, barred)) is not None)]


def alike(machines: Sequence[Machine]) -> list[list[Machine]]:
    """Return the sets of machines that may share layers and compute the same bytes: one set for each numerics id. Machines without a known numerics id
    are in every set.
    """
    known = sorted({machine.offer.numerics_id for machine in machines} - {""})
    return [[machine for machine in machines if machine.offer.numerics_id in {"", one}] for one in known or [""]]


def barred_hosts(cards: Iterable[NodeId], request: PlanRequest, trust: Mapping[NodeId, Trust]) -> frozenset[NodeId]:
    """Return the nodes that are not trusted enough to hold layers for others."""
    policy = TrustPolicy(host=request.min_host_trust)
    return frozenset(
        node_id
        for node_id in cards
        if node_id != request.orchestrator and not policy.allows(trust.get(node_id, Trust.MEMBER), Use.HOLD_LAYERS)
    )


def _host(machine: Machine, barred: Collection[NodeId]) -> Machine | None:
    card = machine.card
    if not card.serves_shards or card.node_id in barred:
        return None
    # Idle loaded layers make way for wanted ones, if they use the same memory.
    device = card.device_of(machine.offer.weights)
    idle = sum(
        offer.shard.memory_bytes
        for offer in card.models
        if offer.warm and offer.shard is not None and not offer.shard.streams and card.device_of(offer.weights) == device
    )
    return replace(machine, room_bytes=free_for_layers(card) + idle)


def free_for_layers(card: NodeCard) -> int:
    """Return the bytes that layers for others may take on a machine without unloading anything."""
    return max(0, min(_free_bytes(card), card.shard_memory_bytes))


def speed_order(machine: Machine) -> tuple[float, int, str]:
    """Return a sort key for candidates, best last: speed, memory, id."""
    return (-machine.token_s, machine.card.memory_total_bytes, machine.node_id)


class Links:
    """Links of a view, as either end measured them. The sender's measurement takes precedence."""

    def __init__(self, cards: Mapping[NodeId, NodeCard]) -> None:
        best: dict[tuple[NodeId, NodeId], Link] = {}
        for card in cards.values():
            for link in card.links:
                rate, rtt = sensible(link.bytes_per_s, 1.0, 1e15), sensible(link.rtt_s, 1e-7, 1e4)
                if rate is None or rtt is None or link.to == card.node_id or link.to not in cards:
                    continue
                network = None if link.network_s is None else sensible(link.network_s, 1e-7, rtt)
                said, known = replace(link, bytes_per_s=rate, rtt_s=rtt, network_s=network), best.get((card.node_id, link.to))
                if known is None or (rate, -rtt, link.address) > (known.bytes_per_s, -known.rtt_s, known.address):
                    best[card.node_id, link.to] = said
        self._best = best

    def between(self, sender: NodeId, receiver: NodeId) -> Link | None:
        """Return the link; None if neither end has measured it."""
        return self._best.get((sender, receiver)) or self._best.get((receiver, sender))


def _is_sound(shape: ModelShape | None) -> bool:
    if shape is None:
        return False
    sizes = (shape.hidden, shape.layer_bytes, shape.max_context)
    return 0 < shape.n_layers <= MAX_LAYERS and all(0 < size < 1 << 62 for size in sizes) and 0 <= shape.edge_bytes < 1 << 62 \
        and 0 <= shape.kv_bytes_per_token_per_layer < 1 << 40 and 0 <= shape.row_bytes < 1 << 40  # fmt: skip


def _free_bytes(card: NodeCard) -> int:
    return int(max(0, min(card.memory_free_bytes, 1 << 60)) * FREE_SHARE)


def is_named(offer: ModelOffer, model: str) -> bool:
    """Return whether a request for `model` means this offer: by its id, or by at least `DIGEST_DIGITS` digits of its digest."""
    if offer.model_id == model:
        return True
    return len(model) >= DIGEST_DIGITS and offer.digest.startswith(model.lower())


def _merit(offer: ModelOffer) -> tuple[bool, bool, float, str]:
    """Return a sort key for several offers of one model by one node, best last."""
    return (offer.role is Role.VERIFIER, offer.warm, sensible(offer.tokens_per_second, 1e-6, 1e9) or 0.0, repr(offer))


def _rows(step: StepTime) -> int:
    return step.rows


def _machine(card: NodeCard, offer: ModelOffer, shape: ModelShape, request: PlanRequest) -> Machine | None:
    """Build a machine from a card and an offer; None if nothing is known of its speed."""
    memory = memory_rate(card)
    decode = sensible(offer.tokens_per_second, 1e-6, 1e9)
    prefill = sensible(offer.prefill_tokens_per_second, 1e-6, 1e9)
    measured = decode is not None and prefill is not None
    layers_bytes = shape.n_layers * shape.layer_bytes
    weights_bytes = layers_bytes + shape.edge_bytes
    if decode is None:
        if memory is None:
            return None
        decode = memory * DECODE_SHARE / weights_bytes
    if prefill is None:
        prefill = PREFILL_PER_DECODE * decode
    kv_token = shape.kv_bytes_per_token_per_layer
    kv_token_s = kv_token / (memory * KV_READ_SHARE) if memory is not None else 0.0
    longer = max(0, request.prompt_tokens - MEASURED_PROMPT) / 2
    working = shape.row_bytes * max(0, request.rows)
    held = weights_bytes + working if offer.warm else 0
    kv_layer_s = kv_token_s * (request.prompt_tokens + request.answer_tokens / 2)
    return Machine(
        card=card,
        offer=offer,
        shape=shape,
        layer_s=shape.layer_bytes / weights_bytes / decode + kv_layer_s,
        edge_s=shape.edge_bytes / weights_bytes / decode,
        prompt_layer_s=1 / prefill / shape.n_layers + kv_token_s * PROMPT_KV * longer,
        measured=measured,
        room_bytes=_free_bytes(card) + held,
        kv_layer_bytes=kv_token * max((request.prompt_tokens + request.answer_tokens) * request.streams, request.kv_tokens),
        working_bytes=working,
        kv_layer_s=kv_layer_s,
        edge_row_s=shape.edge_bytes / layers_bytes / prefill,
        steps=tuple(
            sorted({step.rows: step for step in offer.steps if step.rows > 0 and sensible(step.seconds, 0.0, 1e6)}.values(), key=_rows)
        ),
    )
