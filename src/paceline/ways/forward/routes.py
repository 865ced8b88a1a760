"""Which nodes could run a request for a model, the best first: this node's view, read by the plan that every node computes.

Law: the nodes of one route have the same weights in the same format, and the same tokenizer and template. Where this node has the model loaded, it is that one; where several
nodes offer different weights under one name, the plan decides, and the name keeps its meaning for as long as a node offers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import MayAnswer
from paceline.fleet.placement import plan
from paceline.fleet.plan import Choice, PlanRequest, Way

MOST_MODELS = 16
"""Of one other node. What its card lists beyond is not looked at. Raising it: what one node can make this one fetch and hold."""
WORTH_A_HOP = 1.25
"""Another node must be faster by so much for a request to leave the node that has the model itself: estimates are rough, and the way there
and back is not in them. Raising it: more requests stay where they arrived."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Equal ones are the same model."""

    digest: str
    format: str
    tokenizer: str = ""
    """SHA-256 of its tokenizer and template: nodes that differ in them don't answer for one another."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A node that can run a model, as its card says."""

    node_id: NodeId
    instance: bytes
    numerics_id: str
    addresses: tuple[str, ...]
    expected_s: float | None = None
    """What a typical request takes there while nothing else does, by the plan; None: not known."""
    under_way: int = 0
    """Sequences that run and wait there, as it said last."""


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes that run requests for a model."""

    name: str
    weights: Weights
    stops: tuple[Stop, ...]
    """The best first; never empty."""
    size_bytes: int = 0
    """Of the weights, as their cards say."""


def routes(answerers: MayAnswer, loaded: Mapping[str, Weights], meanings: Mapping[str, Weights]) -> dict[str, Route]:
    """A route for each model that a node which may answer has loaded, by name.

    Args:
        loaded: what this node itself runs.
        meanings: what names meant before.
    """
    own, cards = answerers.own, answerers.cards
    offered: dict[str, dict[Weights, list[tuple[NodeCard, ModelOffer]]]] = {}
    for card in cards:
        whole = [offer for offer in card.models if offer.role is Role.VERIFIER and offer.warm and offer.digest and offer.model_id]
        for offer in whole if card.node_id == own else whole[:MOST_MODELS]:
            by_weights = offered.setdefault(offer.model_id, {})
            by_weights.setdefault(Weights(offer.digest, offer.weights, offer.tokenizer), []).append((card, offer))
    found: dict[str, Route] = {}
    for name in sorted(offered):
        weights = _meaning(name, offered[name], cards, loaded, meanings)
        holders = offered[name][weights]
        order, times = _order(own, cards, weights, any(card.node_id == own for card, _ in holders))
        stops = {
            card.node_id: Stop(card.node_id, card.instance, offer.numerics_id, card.addresses, times.get(card.node_id), offer.under_way)
            for card, offer in holders
        }
        ranked = [stops.pop(node_id) for node_id in order if node_id in stops]
        # Nodes of which nothing is known but that they have it: this one first, then by id.
        rest = sorted(stops.values(), key=lambda stop: (stop.node_id != own, stop.node_id))
        found[name] = Route(name, weights, (*ranked, *rest), holders[0][1].size_bytes)
    return found


def _meaning(
    name: str,
    offered: Mapping[Weights, list[tuple[NodeCard, ModelOffer]]],
    cards: tuple[NodeCard, ...],
    loaded: Mapping[str, Weights],
    meanings: Mapping[str, Weights],
) -> Weights:
    for known in (loaded.get(name), meanings.get(name)):
        if known is not None and known in offered:
            return known
    if len(offered) > 1:
        chosen = _choices(cards, PlanRequest(name, ways=frozenset({Way.ALONE})))
        best = next(((choice.digest, choice.weights) for choice in chosen), None)
        # Of one model with several tokenizers, the one that most nodes have.
        same = [weights for weights in offered if (weights.digest, weights.format) == best] or list(offered)
        return min(same, key=lambda weights: (-len(offered[weights]), weights.digest, weights.format, weights.tokenizer))
    return next(iter(offered))


def _order(own: NodeId, cards: tuple[NodeCard, ...], weights: Weights, own_has_it: bool) -> tuple[list[NodeId], dict[NodeId, float]]:
    """Those that have the model loaded, the best first, and what a typical request takes there."""
    ranked = _choices(cards, PlanRequest(weights.digest, weights.format, ways=frozenset({Way.ALONE})))
    order = [choice.stages[0].node_id for choice in ranked if choice.stages[0].warm]
    times = {choice.stages[0].node_id: choice.estimate.total_s for choice in ranked if choice.stages[0].warm}
    if own_has_it and own in order and times[own] < WORTH_A_HOP * times[order[0]]:
        order.remove(own)
        order.insert(0, own)
    return order, times


def _choices(cards: tuple[NodeCard, ...], request: PlanRequest) -> tuple[Choice, ...]:
    """The plan's own order; nothing where the plan has nothing to go by."""
    try:
        found = plan(cards, request)
    except PlacementError:
        return ()
    return (found.chosen, *found.runners_up)
