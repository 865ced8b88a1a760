"""Models in engines of other makers, as the planner sees them: their price, and which of them would answer a request.

Laws:
- An engine takes no memory of Paceline's, and its memory is never counted as free. It runs a model whole, never as a stage, a rank or a drafter.
- There is one price, and it comes from answers that passed. An engine that has answered nothing yet has none.
- An engine that leaves the home network comes after all others.
- A model that its engine has not loaded competes with loaded ones: its load counts with its time.

    p, f       prompt rate (tok/s) and time to the first token on a card        L    measured seconds of a load
    d          decode rate (tok/s)                                              w    bytes of the weights

    load       0 if the model is loaded; else L; if none was measured, w / LOAD_BYTES_PER_S, or UNKNOWN_LOAD_S if w is not known
    ttft       load + P / p; if no prompt was long enough to measure p, load + f
    total      ttft + (A - 1) / d
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from paceline.core.ids import NodeId
from paceline.core.model import ModelRef
from paceline.fleet.card import EngineOffer, ModelOffer, NodeCard
from paceline.fleet.choices import LOAD_BYTES_PER_S, Seconds, estimate, seconds
from paceline.fleet.machines import is_named, live_cards
from paceline.fleet.plan import ALONE, Estimate, PlanRequest

PROMISE = "none"
"""Promise about an answer's bytes that lists of models show for an engine of another maker."""
NO_PROMISE = "it promises no bytes: the same request may get other words, and an answer that moves to it or from it may change"
LEAVES = "leaves your network"
PLAIN = "unencrypted"
UNKNOWN_LOAD_S = 30.0
"""Seconds that a load counts of which nothing is known. Raising it: models that are not loaded are left for slower ones that are."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The load that a request waits for."""

    seconds: float = 0.0
    """0: it is loaded."""
    measured: bool = True
    """False: estimated from the size of its weights."""

    def __str__(self) -> str:
        return f"loads first: {'' if self.measured else 'about '}{seconds(self.seconds)}{'' if self.measured else ', estimated'}"


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
    loading: Loading = Loading()

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.digest, self.weights, self.model_id)

    @property
    def headline(self) -> str:
        """Describe in one line which engine answers."""
        engine = self.engine
        words = marks(leaves_network=engine.leaves_network, plain_http=engine.plain_http)
        words += [str(self.loading)] if self.loading.seconds else []
        return ", ".join([f"{self.node_id}, in {engine.engine}", *filter(None, (engine.quantisation, *words))])

    @property
    def figures(self) -> str:
        """Describe speed and times in one line."""
        expected = self.estimate
        if expected is None:
            return "not measured yet"
        how = "measured" if expected.measured else "the load estimated"
        return f"{expected.tokens_per_s:.3g} tokens/s, first token after {seconds(expected.ttft_s)}, all after {seconds(expected.total_s)}, {how}"


def marks(*, leaves_network: bool, plain_http: bool) -> list[str]:
    """Return in words what a person should know before a prompt goes to an engine."""
    return [mark for mark, is_so in ((LEAVES, leaves_network), (PLAIN, plain_http)) if is_so]


def prompt_token_s(offer: ModelOffer) -> float:
    """Return the seconds of a prompt's token; 0: not measured."""
    return _token_s(offer.prefill_tokens_per_second)


def loading(offer: ModelOffer) -> Loading:
    """Return the load that the next request to a model causes."""
    if offer.engine is None or offer.engine.load_s is None:
        return Loading()
    if offer.engine.load_s > 0:
        return Loading(offer.engine.load_s)
    return Loading(offer.size_bytes / LOAD_BYTES_PER_S if offer.size_bytes > 0 else UNKNOWN_LOAD_S, measured=False)


def price(offer: ModelOffer, request: PlanRequest) -> Estimate | None:
    """Return what a request takes at a model's engine, by answers that passed. None: none has been measured, or no engine runs the model."""
    if offer.engine is None:
        return None
    first_s, token_s = (
        prompt_token_s(offer) * request.prompt_tokens or max(0.0, offer.engine.first_token_s),
        _token_s(offer.tokens_per_second),
    )
    if not first_s or not token_s:
        return None
    load = loading(offer)
    return estimate(Seconds(load.seconds + first_s), Seconds(token_s), request, measured=load.measured)


def holders(view: Iterable[NodeCard], request: PlanRequest) -> tuple[PricedEngine, ...]:
    """Return the engines that could answer a request, best first. They answer alone: not with a drafter, and not for a request that wants exact bytes."""
    if request.exact or request.proposer is not None or (request.ways is not None and ALONE not in request.ways):
        return ()
    pinned = {pin.node_id for pin in request.pins}
    if len(pinned) > 1:
        return ()
    found = [
        PricedEngine(
            *(card.node_id, offer.model_id, offer.digest, offer.weights, offer.engine),
            *(price(offer, request), offer.under_way, loading(offer)),
        )
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


def _rank(choice: PricedEngine) -> tuple[bool, float, float, NodeId, str]:
    total_s = inf if choice.estimate is None else choice.estimate.total_s
    return (choice.engine.leaves_network, total_s, choice.loading.seconds, choice.node_id, choice.model_id)


def _token_s(rate: float) -> float:
    return 1 / rate if 1e-3 <= rate < 1e9 else 0.0
