"""Models in engines of other makers, as the planner sees them: their price, and which of them would answer a request.

Laws:
- An engine takes no memory of Paceline's, and its memory is never counted as free. It runs a model whole, never as a stage, a rank or a drafter.
- There is one price, and it comes from answers that passed. An engine that has answered nothing yet has none.
- An engine that leaves the home network comes after all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from paceline.core.ids import NodeId
from paceline.core.model import ModelRef
from paceline.fleet.card import EngineOffer, ModelOffer, NodeCard
from paceline.fleet.choices import Seconds, estimate, seconds
from paceline.fleet.machines import is_named, live_cards
from paceline.fleet.plan import ALONE, Estimate, PlanRequest

PROMISE = "none"
"""Promise about an answer's bytes that lists of models show for an engine of another maker."""
NO_PROMISE = "it promises no bytes: the same request may get other words, and an answer that moves to it or from it may change"
LEAVES = "leaves your network"
PLAIN = "unencrypted"


@dataclass(frozen=True, slots=True)
class PricedEngine:
    """An engine that could answer a request."""

    node_id: NodeId
    model_id: str
    digest: str
    weights: str
    engine: EngineOffer
    estimate: Estimate | None
    """None: no answer has been measured yet."""
    under_way: int

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.digest, self.weights, self.model_id)

    @property
    def headline(self) -> str:
        """Describe in one line which engine answers."""
        engine = self.engine
        words = marks(leaves_network=engine.leaves_network, plain_http=engine.plain_http)
        return ", ".join([f"{self.node_id}, in {engine.engine}", *filter(None, (engine.quantisation, *words))])

    @property
    def figures(self) -> str:
        """Describe speed and times in one line."""
        expected = self.estimate
        if expected is None:
            return "not measured yet"
        return f"{expected.tokens_per_s:.3g} tokens/s, first token after {seconds(expected.ttft_s)}, all after {seconds(expected.total_s)}, measured"


def marks(*, leaves_network: bool, plain_http: bool) -> list[str]:
    """Return in words what a person should know before a prompt goes to an engine."""
    return [mark for mark, is_so in ((LEAVES, leaves_network), (PLAIN, plain_http)) if is_so]


def prompt_token_s(offer: ModelOffer) -> float:
    """Return the seconds of a prompt's token; 0: not measured."""
    return _token_s(offer.prefill_tokens_per_second)


def price(offer: ModelOffer, request: PlanRequest) -> Estimate | None:
    """Return what a request takes at a model's engine, by answers that passed. None: none has been measured, or no engine runs the model."""
    read_s, token_s = prompt_token_s(offer), _token_s(offer.tokens_per_second)
    if offer.engine is None or not read_s or not token_s:
        return None
    return estimate(Seconds(read_s * request.prompt_tokens), Seconds(token_s), request, measured=True)


def holders(view: Iterable[NodeCard], request: PlanRequest) -> tuple[PricedEngine, ...]:
    """Return the engines that could answer a request, best first. They answer alone: not with a drafter, and not for a request that wants exact bytes."""
    if request.exact or request.proposer is not None or (request.ways is not None and ALONE not in request.ways):
        return ()
    pinned = {pin.node_id for pin in request.pins}
    if len(pinned) > 1:
        return ()
    found = [
        PricedEngine(card.node_id, offer.model_id, offer.digest, offer.weights, offer.engine, price(offer, request), offer.under_way)
        for card in live_cards(view).values()
        if card.node_id not in request.exclude and (not pinned or card.node_id in pinned)
        for offer in card.models
        if offer.engine is not None and offer.runs_whole and offer.warm and is_named(offer, request.model)
        if request.weights in {"", offer.weights, offer.engine.quantisation}
    ]
    return tuple(sorted(found, key=_rank))


def explain(found: Iterable[PricedEngine]) -> Iterator[str]:
    """Yield a line for each engine."""
    for each in found:
        yield f"{each.headline}: {each.figures}"


def _rank(choice: PricedEngine) -> tuple[bool, float, NodeId, str]:
    return (choice.engine.leaves_network, inf if choice.estimate is None else choice.estimate.total_s, choice.node_id, choice.model_id)


def _token_s(rate: float) -> float:
    return 1 / rate if 1e-3 <= rate < 1e9 else 0.0
