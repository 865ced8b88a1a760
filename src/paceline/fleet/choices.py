"""Every way of running a request that the cost model can price, and their order.

Law of the order: weights that are there before weights that must travel; then the whole request's time, to two digits, so that a hair's
breadth moves nothing; then fewer machines; then the time exactly; then the seed's tie-break, more memory and the higher id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet import cost
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.fleet.figures import two_digits
from paceline.fleet.machines import DECODE_SHARE, FREE_SHARE, Machine, memory_rate, sensible
from paceline.fleet.pipelines import Pipeline
from paceline.fleet.plan import Choice, Constraint, Draft, Estimate, Excluded, PlannedStage, PlanRequest, Way

MOST_PROPOSERS = 16
"""Of those that could draft for a machine, the first in the seed's order are priced."""

LinkOf = Callable[[NodeId, NodeId], Link | None]


def alone(machine: Machine, request: PlanRequest) -> Choice:
    """All of it on one machine."""
    return _choice(Way.ALONE, [machine], [machine.shape.n_layers], None, cost.alone(machine, request))


def piped(pipeline: Pipeline) -> Choice:
    """A pipeline as a choice."""
    return _choice(Way.PIPELINE, pipeline.machines, pipeline.layers, None, pipeline.estimate)


def drafted(machine: Machine, cards: Mapping[NodeId, NodeCard], link: LinkOf, request: PlanRequest) -> list[Choice]:
    """One machine with each proposer that can draft for it: others first, itself only where no other can."""
    able = sorted(
        (
            (card, offer)
            for card in cards.values()
            if request.proposer in {None, card.node_id}
            for offer in card.models
            if can_draft(card, offer, machine, request) is None
            and (card is machine.card or link(machine.node_id, card.node_id) is not None)
        ),
        key=lambda pair: (_proposer(pair[0], pair[1], request).tokens_per_s, pair[0].memory_total_bytes, pair[0].node_id, repr(pair[1])),
        reverse=True,
    )
    remote = [pair for pair in able if pair[0] is not machine.card]
    return [_drafted(machine, card, offer, link, request) for card, offer in (remote or able)[:MOST_PROPOSERS]]


def can_draft(card: NodeCard, offer: ModelOffer, machine: Machine, request: PlanRequest) -> str | None:
    """Why an offer can't propose tokens to a machine; None where it can."""
    if offer.role is not Role.PROPOSER:
        return f"{offer.model_id} is not offered for drafting"
    if request.draft_model not in {"", offer.model_id}:
        return f"{offer.model_id} is not the draft model asked for"
    if offer.weights == "":
        return None
    if not offer.vocabulary or offer.vocabulary != machine.offer.vocabulary:
        return f"{offer.model_id} is not known to have the vocabulary of {machine.offer.model_id}"
    if _rate(card, offer) is None:
        return f"nothing is known of its speed with {offer.model_id}"
    shape = offer.shape
    needed = 0 if shape is None or offer.warm else shape.n_layers * shape.layer_bytes + shape.edge_bytes
    if needed > card.running(offer.weights).memory_free_bytes * FREE_SHARE:
        return f"{offer.model_id} does not fit its memory"
    return None


def unfit(machine: Machine, request: PlanRequest) -> Excluded | None:
    """Why a machine can't run all of the model; None where it can."""
    tokens = request.prompt_tokens + request.answer_tokens
    if not machine.runs_whole:
        return Excluded(machine.node_id, "offers layers of the model only", Constraint.NO_CANDIDATE)
    if tokens > machine.shape.max_context:
        why = f"holds a context of {machine.shape.max_context} tokens, and the request has {tokens}"
        return Excluded(machine.node_id, why, Constraint.NO_CANDIDATE)
    # What is warm has its memory already.
    needed = machine.needs(machine.shape.n_layers, edges=True)
    if needed > machine.room_bytes and not machine.offer.warm:
        why = f"needs {gib(needed)} for weights and KV, and has {gib(machine.room_bytes)} to give"
        return Excluded(machine.node_id, why, Constraint.MEMORY)
    return None


def ranked(choices: Iterable[Choice], cards: Mapping[NodeId, NodeCard]) -> list[Choice]:
    """Best first."""
    by_id = sorted(choices, key=lambda choice: (choice.node_ids, repr(choice)), reverse=True)
    return sorted(by_id, key=lambda choice: _rank(choice, cards))


def gib(n_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.0f} MiB"


def rate(choice: Choice) -> str:
    """Tokens a second, as a person reads them."""
    return f"{choice.estimate.tokens_per_s:.3g} tokens/s"


def seconds(duration_s: float) -> str:
    """A duration as a person reads it."""
    if duration_s < 1:
        return f"{1000 * duration_s:.3g} ms"
    return f"{duration_s:.3g} s" if duration_s < 1000 else f"{duration_s:.0f} s"


def _rank(choice: Choice, cards: Mapping[NodeId, NodeCard]) -> tuple[bool, float, int, float, int]:
    total_s = choice.estimate.total_s
    memory = cards[choice.stages[0].node_id].memory_total_bytes
    return (choice.fetches, two_digits(total_s), len(choice.node_ids), total_s, -memory)


def _choice(way: Way, machines: Sequence[Machine], layers: Sequence[int], draft: Draft | None, estimate: Estimate) -> Choice:
    stages: list[PlannedStage] = []
    start = 0
    for place, (machine, count) in enumerate(zip(machines, layers, strict=True)):
        card, offer, shape = machine.card, machine.offer, machine.shape
        fetch_bytes = 0
        if machine.fetch_from is not None:
            fetch_bytes = shape.layer_bytes * count + (0 if place else shape.edge_bytes)
        span = LayerRange(start, start + count)
        warm = offer.warm or _is_loaded(machine, span)
        stages.append(PlannedStage(card.node_id, card.instance, span, offer.numerics_id, warm, machine.fetch_from, fetch_bytes))
        start += count
    offer = machines[0].offer
    return Choice(way, offer.model_id, offer.digest, offer.weights, tuple(stages), draft, estimate)


def _is_loaded(machine: Machine, span: LayerRange) -> bool:
    """Whether a shard on that node has these layers."""
    wanted = machine.offer
    return any(
        each.shard is not None
        and each.warm
        and (each.digest, each.weights) == (wanted.digest, wanted.weights)
        and each.shard.layers.start <= span.start
        and span.stop <= each.shard.layers.stop
        for each in machine.card.models
    )


def _drafted(machine: Machine, card: NodeCard, offer: ModelOffer, link: LinkOf, request: PlanRequest) -> Choice:
    proposer = _proposer(card, offer, request)
    between = None if card is machine.card else link(machine.node_id, card.node_id)
    estimate, length = cost.draft(machine, proposer, between, request)
    draft = Draft(card.node_id, card.instance, offer.model_id, offer.digest, length, proposer.acceptance)
    return _choice(Way.DRAFT, [machine], [machine.shape.n_layers], draft, estimate)


def _proposer(card: NodeCard, offer: ModelOffer, request: PlanRequest) -> cost.PricedProposer:
    assumed = cost.MODEL_ACCEPTANCE if offer.weights else cost.LOOKUP_ACCEPTANCE
    acceptance = assumed if request.acceptance is None else min(max(request.acceptance, 0.0), 1.0)
    measured = sensible(offer.tokens_per_second, 1e-6, 1e9) is not None and request.acceptance is not None
    return cost.PricedProposer(_rate(card, offer) or 1e-6, acceptance, measured)


def _rate(card: NodeCard, offer: ModelOffer) -> float | None:
    """Tokens a second that a proposer drafts; None where nothing is known."""
    measured = sensible(offer.tokens_per_second, 1e-6, 1e9)
    if measured is not None:
        return measured
    if offer.weights == "":
        return cost.LOOKUP_RATE
    memory, shape = memory_rate(card.running(offer.weights)), offer.shape
    if memory is None or shape is None or shape.n_layers * shape.layer_bytes + shape.edge_bytes <= 0:
        return None
    return memory * DECODE_SHARE / (shape.n_layers * shape.layer_bytes + shape.edge_bytes)
