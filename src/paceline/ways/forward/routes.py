"""The nodes that could run a request for a model, the best first: this node's view, read by the plan that every node computes; and which of them a
request goes to.

Laws:
- The nodes of one route may follow one another (`core.following`) and have the same tokenizer and template. Where this node has the model loaded, it is
  that one; where several nodes offer different weights under one name, the plan decides, and the name keeps its meaning for as long as a node
  offers it. Their arithmetic may differ; a request says whether it may.
- A request goes to the node that is likely to answer first. The plan says how long each takes when it is idle; what is under way there makes it
  longer, a prefix that it holds shorter: one that was sent there, or that it told to hold. A node that was lost comes last until it was heard of again. A choice changes no byte.
- An engine with as many requests as it runs at once counts as a queue, and a model that its engine has not loaded takes its load longer.
- A request is not sent to an engine if its prompt and answer exceed the engine's context.
- An engine outside of the home network is on a route only if no node at home has a model of that name, under whatever meaning.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from cachetools import LRUCache

from paceline.core.clock import Clock
from paceline.core.errors import ContextOverflow, NodeStopping, NodeUnreachable, PacelineError, PlacementError
from paceline.core.following import Following, Holding, may_follow
from paceline.core.generation import GenerationRequest
from paceline.core.ids import NodeId
from paceline.core.inference import PassedChats
from paceline.core.model import ModelRef
from paceline.core.via import leads_back
from paceline.fleet.card import EngineOffer, ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import MayAnswer
from paceline.fleet.engines import loading, price, prompt_token_s
from paceline.fleet.placement import plan
from paceline.fleet.plan import ALONE, WORTH_A_HOP, Choice, PlanRequest
from paceline.fleet.ways import Alone

MOST_MODELS = 16
"""Of one other node, with a tokenizer. What its card lists beyond is not looked at. Raising it: what one node can make this one fetch and hold."""
MOST_CHATTING = 128
"""Models of one other node that take whole chats alone, so that nothing is fetched for them. Raising it: a node fills the list of models."""

MESSAGES = "messages"
"""See `engines.contract.Takes`."""
NO_MODEL = ModelRef("", "")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a model's name stands for."""

    model: ModelRef
    tokenizer: str = ""
    """SHA-256 of its tokenizer and template: nodes that differ in them don't answer for one another."""


@dataclass(frozen=True, slots=True)
class RouteStop:
    """A node that can run a model, as its card says."""

    node_id: NodeId
    instance: bytes
    numerics_id: str
    addresses: tuple[str, ...]
    expected_s: float | None = None
    """What a typical request takes there while nothing else does, by the plan; None: not known."""
    token_s: float = 0.0
    """What a token of a prompt takes there; 0: not known."""
    under_way: int = 0
    """Sequences that run and wait there, as it said last."""
    prefills: bool = False
    """It is there to compute prompts for others: asked where no other can answer."""
    model: ModelRef = NO_MODEL
    """The model that is loaded there."""
    engine: EngineOffer | None = None
    """The engine of another maker that runs it there; None: Paceline's own kernels."""
    load_s: float = 0.0
    """Seconds until its engine has loaded the model, measured or estimated; 0: it is loaded."""

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together at an engine; 0: not known."""
        return 0 if self.engine is None else self.engine.context

    @property
    def holding(self) -> Holding:
        return Holding(self.model, self.numerics_id)

    @property
    def leaves(self) -> bool:
        """Prompts that are sent there leave the home network."""
        return self.engine is not None and self.engine.leaves_network


@dataclass(frozen=True, slots=True)
class AnswerRoute:
    """The nodes that run requests for a model."""

    name: str
    meaning: Meaning
    stops: tuple[RouteStop, ...]
    """The best first; never empty."""
    size_bytes: int = 0
    """Of the weights, as their cards say."""

    @property
    def leaves(self) -> bool:
        """Only engines outside of the home network have the model."""
        return all(stop.leaves for stop in self.stops)

    def context(self, besides: NodeId | None = None) -> int:
        """Return the largest context of its engines, without those of one node; 0: not known."""
        return max((stop.context for stop in self.stops if stop.node_id != besides), default=0)

    @property
    def on_disk(self) -> bool:
        """A request makes an engine load the model, whichever node it goes to."""
        return all(stop.load_s > 0 for stop in self.stops)

    @property
    def numerics_id(self) -> str:
        """The numerics id that all nodes have; empty if they differ."""
        first, *others = {stop.numerics_id for stop in self.stops}
        return "" if others else first

    @property
    def engine(self) -> EngineOffer | None:
        """The engine that the best node answers with. None: Paceline's own kernels do, at one of the nodes."""
        return self.stops[0].engine if all(stop.engine is not None for stop in self.stops) else None

    @property
    def via(self) -> tuple[str, ...]:
        """The nodes that a request goes through, if only other endpoints of Paceline have the model: the shortest way."""
        return min((() if stop.engine is None else stop.engine.via for stop in self.stops), key=len)

    @property
    def chats(self) -> PassedChats | None:
        """Which chats reach engines as they are: what any of its engines can do."""
        engines = [stop.engine for stop in self.stops if stop.engine is not None and MESSAGES in stop.engine.takes]
        if not engines:
            return None
        able = {capability for engine in engines for capability in engine.capabilities}
        return PassedChats(not self.meaning.tokenizer, "images" in able, "tools" in able, "schemas" in able)


def routes(
    answerers: MayAnswer,
    loaded: Mapping[str, Meaning],
    meanings: Mapping[str, Meaning],
    does: Callable[[ModelOffer], bool] = lambda offer: offer.runs_whole,
    mark: str = "",
) -> dict[str, AnswerRoute]:
    """A route for each model that a node which may answer has loaded, by name.

    Args:
        loaded: what this node itself runs.
        meanings: what names meant before.
        does: returns whether a loaded model does the work that is asked for; by default, whether it answers chats.
        mark: this node's, see `core.via`: models that are reached through it get no route.
    """
    own = answerers.own
    # What a machine is there for is said to others: its own clients it answers.
    cards = tuple(_answering(card) if card.node_id == own else card for card in answerers.cards)
    offered: dict[str, dict[Meaning, list[tuple[NodeCard, ModelOffer]]]] = {}
    for card in cards:
        offers = [offer for offer in card.models if offer.warm and offer.digest and offer.model_id and does(offer)]
        offers = [offer for offer in offers if offer.engine is None or not leads_back(offer.engine.via, mark)]
        for offer in offers if card.node_id == own else _looked_at(offers):
            by_meaning = offered.setdefault(offer.model_id, {})
            by_meaning.setdefault(Meaning(offer.model, offer.tokenizer), []).append((card, offer))
    offered = {name: _at_home(having) or having for name, having in offered.items()}
    found: dict[str, AnswerRoute] = {}
    for name in sorted(offered):
        meaning = _meaning(name, offered[name], cards, loaded, meanings)
        holders = [each for other, having in offered[name].items() if _may_join(meaning, other) for each in having]
        order, times = _order(own, cards, meaning.model, any(card.node_id == own for card, _ in holders))
        stops = {
            card.node_id: RouteStop(
                *(card.node_id, card.instance, offer.numerics_id, card.addresses),
                *(times.get(card.node_id, _engine_s(offer)), prompt_token_s(offer)),
                *(offer.under_way, offer.role is Role.PREFILL, offer.model, offer.engine, loading(offer).seconds),
            )
            for card, offer in holders
        }
        ranked = [stops.pop(node_id) for node_id in order if node_id in stops]
        # What the plan does not price: foreign engines, by what their answers took; then nodes of which nothing is known but that they have it.
        rest = sorted(stops.values(), key=lambda stop: (_whole_s(stop), stop.load_s, stop.node_id != own, stop.node_id))
        found[name] = AnswerRoute(name, meaning, (*ranked, *rest), offered[name][meaning][0][1].size_bytes)
    return found


def _looked_at(offers: Sequence[ModelOffer]) -> list[ModelOffer]:
    """Return the offers of another node that count."""
    fetched = [offer for offer in offers if offer.tokenizer or offer.engine is None][:MOST_MODELS]
    return fetched + [offer for offer in offers if not offer.tokenizer and offer.engine is not None][:MOST_CHATTING]


def _at_home(offered: Mapping[Meaning, list[tuple[NodeCard, ModelOffer]]]) -> dict[Meaning, list[tuple[NodeCard, ModelOffer]]]:
    """Return the holders of a name to which prompts go without leaving the home network."""
    found = {
        meaning: [(card, offer) for card, offer in having if offer.engine is None or not offer.engine.leaves_network]
        for meaning, having in offered.items()
    }
    return {meaning: having for meaning, having in found.items() if having}


def _may_join(meaning: Meaning, other: Meaning) -> bool:
    """Return whether holders of `other` may answer for `meaning`: token ids must stand for the same text."""
    same_tokens = other.tokenizer == meaning.tokenizer
    return other == meaning or (same_tokens and may_follow(Holding(meaning.model), Holding(other.model), exact=False).is_allowed)


def open_to(
    stops: Sequence[RouteStop], after: Holding | None, left: Collection[NodeId], *, exact: bool, may_leave: bool = False
) -> list[tuple[RouteStop, Following]]:
    """Return the stops that may take a request, the best first, and how each follows. Stops with the same bytes leave no room for others.

    Args:
        after: the holder that computed the answer so far; or, where an exact answer has not begun, one that gives its bytes. None: any may begin.
        left: nodes that the request left.
        may_leave: the prompt may leave the home network.
    """
    there = [stop for stop in stops if stop.node_id not in left and (may_leave or not stop.leaves)]
    if after is None:
        return [(stop, Following.SAME) for stop in there]
    found = [(stop, may_follow(after, stop.holding, exact=exact)) for stop in there]
    same = [(stop, following) for stop, following in found if following is Following.SAME]
    return same or [(stop, following) for stop, following in found if following.is_allowed]


def with_room(stops: Sequence[RouteStop], request: GenerationRequest, own: Callable[[RouteStop], int]) -> list[RouteStop]:
    """Return the stops with room for a request's prompt and answer.

    Args:
        own: returns the context of own kernels at a stop; 0: not known.

    Raises:
        ContextOverflow: no stop's does, and the answer has not begun.
    """
    so_far = max(map(len, request.so_far.values()), default=0)
    tokens = len(request.prompt_ids) + max(so_far + 1, 1 if request.max_tokens is None else request.max_tokens)
    contexts = [stop.context or own(stop) for stop in stops]
    found = [stop for stop, context in zip(stops, contexts, strict=True) if not context or tokens <= context]
    if stops and not found and not so_far:
        raise ContextOverflow(
            f"Prompt and answer have {tokens} tokens, and the largest context of the model is {max(contexts)}",
            "Shorten the prompt or lower max_tokens.",
            field="max_tokens" if len(request.prompt_ids) < max(contexts) else "prompt",
        )
    return found


def may_be_loading(cards: Sequence[NodeCard], digest: str, left: Mapping[NodeId, bytes]) -> bool:
    """Whether a node of which a request left another instance has a model, and has not loaded it."""
    anew = [card for card in cards if card.instance != left.get(card.node_id, card.instance)]
    found = ([offer.warm for offer in card.models if offer.runs_whole and offer.digest == digest] for card in anew)
    return any(warm and not any(warm) for warm in found)


def _answering(card: NodeCard) -> NodeCard:
    return replace(card, models=tuple(replace(offer, role=Role.VERIFIER) if offer.role is Role.PREFILL else offer for offer in card.models))


def _engine_s(offer: ModelOffer) -> float | None:
    """Return what a typical request takes at a foreign engine that has its model loaded; None: not known."""
    expected = price(offer, PlanRequest(offer.model_id))
    return None if expected is None else expected.total_s - loading(offer).seconds


def _whole_s(stop: RouteStop) -> float:
    return inf if stop.expected_s is None else stop.expected_s + stop.load_s


def _meaning(
    name: str,
    offered: Mapping[Meaning, list[tuple[NodeCard, ModelOffer]]],
    cards: tuple[NodeCard, ...],
    loaded: Mapping[str, Meaning],
    meanings: Mapping[str, Meaning],
) -> Meaning:
    for known in (loaded.get(name), meanings.get(name)):
        if known is not None and known in offered:
            return known
    if len(offered) > 1:
        chosen = _choices(cards, PlanRequest(name, ways=frozenset({ALONE})))
        best = next((ModelRef(choice.digest, choice.weights) for choice in chosen), None)
        # Of one model with several tokenizers, the one that most nodes have.
        same = [meaning for meaning in offered if meaning.model == best] or list(offered)
        return min(same, key=lambda one: (-len(offered[one]), one.model.digest, one.model.weights, one.tokenizer))
    return next(iter(offered))


def _order(own: NodeId, cards: tuple[NodeCard, ...], model: ModelRef, own_has_it: bool) -> tuple[list[NodeId], dict[NodeId, float]]:
    """Those that have the model loaded, the best first, and what a typical request takes there."""
    ranked = _choices(cards, PlanRequest(model.digest, model.weights, ways=frozenset({ALONE})))
    order = [choice.stages[0].node_id for choice in ranked if choice.stages[0].warm]
    times = {choice.stages[0].node_id: choice.estimate.total_s for choice in ranked if choice.stages[0].warm}
    if own_has_it and own in order and times[own] < WORTH_A_HOP * times[order[0]]:
        order.remove(own)
        order.insert(0, own)
    return order, times


def _choices(cards: tuple[NodeCard, ...], request: PlanRequest) -> tuple[Choice, ...]:
    """The plan's own order; nothing where the plan has nothing to go by."""
    try:
        found = plan(cards, request, (Alone(),))
    except PlacementError:
        return ()
    return (found.chosen, *found.runners_up)


BUSY = 0.5
"""By what part of itself an answer takes longer for each other one under way. Raising it: requests spread sooner, to slower machines too."""
ALIKE = 1.25
"""Machines whose speeds differ by less are taken for equal: estimates are rough."""
FAVOUR = 0.5
"""Of a typical answer's time, what a prompt that is in memory as a whole saves; what is known of the prompt's own time it saves as a whole. Raising it:
conversations stay longer where they are, though others idle."""
PREFIX_TOKENS = 64
"""From one remembered prefix of a prompt to the next. Raising it: prefixes are found less exactly, with less work."""
MOST_PREFIXES = 1024
"""Maximum number of prefixes of one prompt: 65,536 tokens. Conversations that grow beyond them leave the machine that holds them more readily. Raising it: a
longer prompt takes longer to place, some 7 ms for 1,000 prefixes."""
REMEMBERED = 1 << 16
"""Prefixes, of all prompts. Raising it: memory, some 100 bytes each."""


def crowding(load: int, at_once: int) -> float:
    """Return the factor by which requests under way make another one longer.

    Args:
        load: sequences that run and wait.
        at_once: number of them that an engine runs at once; another one waits for its turn. 0: not known, all run.
    """
    if not at_once:
        return 1 + BUSY * load
    return (1 + BUSY * min(load, at_once - 1)) * (1 + max(0, load - at_once + 1) / at_once)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a node's cache knows a prompt by: equal ids for another model, or under another salt, are another prompt."""

    ids: Sequence[int]
    model: str = ""
    """Its digest and the format of its weights."""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    instance: bytes
    at_s: float


class Sharing:
    """What one node knows of whom it sends requests to.

    Args:
        own_load: sequences that run and wait here.
        heard_s: when a node last showed that it lives, on the clock; None: it is not in view.
    """

    def __init__(self, own: NodeId, own_load: Callable[[], int], heard_s: Callable[[NodeId], float | None], clock: Clock) -> None:
        self._own, self._own_load, self._heard_s, self._clock = own, own_load, heard_s, clock
        self._under_way: Counter[NodeId] = Counter()
        self._lost: dict[NodeId, Lost] = {}
        self._prefixes: LRUCache[bytes, NodeId] = LRUCache(REMEMBERED)
        """Where each was sent last."""

    def choose(
        self, stops: Sequence[RouteStop], prompt: Prompt, left: Collection[NodeId], held: Callable[[], Mapping[NodeId, float]] = dict
    ) -> RouteStop | None:
        """The stop to ask now; None where all were left.

        Args:
            stops: the best first, as the plan has them.
            held: what part of the prompt nodes told to hold, or could fetch in no time; asked for where there is a choice.
        """
        open_stops = [stop for stop in stops if stop.node_id not in left]
        if len(open_stops) < 2:
            return open_stops[0] if open_stops else None
        known, held_now = self._known(prompt), held()

        def prompt_s(stop: RouteStop) -> float:
            return len(prompt.ids) * stop.token_s

        times = {stop.node_id: stop.expected_s + prompt_s(stop) for stop in stops if stop.expected_s is not None}
        quickest_s, slowest_s = min(times.values(), default=0.5), max(times.values(), default=0.5)
        has_own = any(stop.node_id == self._own for stop in stops)

        def cost(stop: RouteStop) -> tuple[bool, bool, float]:
            node_id = stop.node_id
            seconds = times.get(node_id, 2 * slowest_s)
            saved = (FAVOUR * (seconds - prompt_s(stop)) + prompt_s(stop)) / seconds if seconds > 0 else 0.0
            if seconds < ALIKE * quickest_s:
                seconds = quickest_s
            if has_own and node_id != self._own:
                seconds *= WORTH_A_HOP
            load = max(self._under_way[node_id], stop.under_way, self._own_load() if node_id == self._own else 0)
            share = max(known.get(node_id, 0.0), held_now.get(node_id, 0.0))
            seconds *= crowding(load, 0 if stop.engine is None else stop.engine.at_once)
            return self._is_lost(stop), stop.prefills, seconds * (1 - saved * share) + stop.load_s

        return min(open_stops, key=cost)  # the first of equal ones

    def began(self, node_id: NodeId, prompt: Prompt) -> None:
        self._under_way[node_id] += 1
        for key in prefix_keys(prompt):
            self._prefixes[key] = node_id

    def ended(self, stop: RouteStop, error: PacelineError | None) -> None:
        """It is over there.

        Args:
            error: why it left before its end.
        """
        node_id = stop.node_id
        self._under_way[node_id] -= 1
        if self._under_way[node_id] <= 0:
            del self._under_way[node_id]
        if isinstance(error, NodeUnreachable | NodeStopping) and node_id != self._own:
            self._lost[node_id] = Lost(stop.instance, self._clock.monotonic())

    def _is_lost(self, stop: RouteStop) -> bool:
        lost = self._lost.get(stop.node_id)
        if lost is None:
            return False
        heard_s = self._heard_s(stop.node_id)
        if lost.instance != stop.instance or (heard_s is not None and heard_s > lost.at_s):
            del self._lost[stop.node_id]
            return False
        return True

    def _known(self, prompt: Prompt) -> dict[NodeId, float]:
        """How much of a prompt each node was sent before: 0 to 1."""
        found: dict[NodeId, float] = {}
        for place, key in enumerate(prefix_keys(prompt), start=1):
            node_id = self._prefixes.get(key)
            if node_id is not None:
                found[node_id] = min(1.0, place * PREFIX_TOKENS / len(prompt.ids))
        return found


def prefix_keys(prompt: Prompt) -> list[bytes]:
    """Names of a prompt's prefixes, the shortest first."""
    hashed = hashlib.blake2b(repr((prompt.model, prompt.salt)).encode(), digest_size=16)
    keys: list[bytes] = []
    for place in range(min(MOST_PREFIXES, len(prompt.ids) // PREFIX_TOKENS)):
        hashed.update(array("I", prompt.ids[place * PREFIX_TOKENS : (place + 1) * PREFIX_TOKENS]).tobytes())
        keys.append(hashed.copy().digest())
    return keys
