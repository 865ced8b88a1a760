"""Placement: which machines run a request. A pure function of the view, so every node computes the same plan without a message.

Law: `plan` is deterministic (the order of cards does not matter) and total (it returns, or raises `PlacementError`). Machines that could take no
part have no influence. Ways price their choices (`fleet.ways`), and `fleet.choices` orders them.

`explain` puts a plan into plain words: the choice, the alternatives, and what prevents a better plan. `weights_sources` finds the nodes to fetch a
model's weights from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import ImpossiblePin, ModelNotFound, PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.fleet import choices
from paceline.fleet.card import ModelOffer, NodeCard
from paceline.fleet.choices import Seconds, gib, rate, seconds
from paceline.fleet.eligibility import MayGiveWeights
from paceline.fleet.machines import DIGEST_DIGITS, Links, Machine, barred_hosts, could_share, groups, live_cards, matching_offers
from paceline.fleet.plan import Choice, Constraint, Excluded, Objective, Plan, PlannedStage, PlanRequest
from paceline.fleet.ways import ASSUMED_BYTES_PER_S, ASSUMED_RTT_S, PricedFleet, PricesWay, still_read

RUNNERS_UP = 8
"""Number of alternatives that a plan names."""
MOST_STREAMS = 1 << 16


def plan(view: Iterable[NodeCard], request: PlanRequest, ways: Sequence[PricesWay], trust: Mapping[NodeId, Trust] | None = None) -> Plan:
    """Choose the best plan for a request.

    Args:
        view: the live cards, in any order.
        request: the request and its constraints.
        ways: all ways there are; the request may allow only some of them.
        trust: trust of nodes by their certificates; a missing node is a member.

    Raises:
        PlacementError: neither one machine nor several can run it; the error says what is missing.
        ImpossiblePin: a pinned machine or range is not available.
    """
    _check(request)
    request = replace(request, ways=frozenset(each.way for each in ways) if request.ways is None else request.ways)
    cards = {node_id: card for node_id, card in live_cards(view).items() if node_id not in request.exclude}
    if request.orchestrator is not None and request.orchestrator not in cards:
        raise PlacementError(f"{request.orchestrator} is to orchestrate and is not in the fleet", "Start it: paceline up")
    allowed = [each for each in ways if each.way in (request.ways or ())]
    if not allowed:
        raise PlacementError("No way of running the request is allowed", f"Allow one of {', '.join(each.way for each in ways)}.")
    fleet = PricedFleet(cards, Links(cards), request, barred_hosts(cards, request, trust or {}), trust or {})
    offers = matching_offers(cards, request)
    having = groups(offers, request)
    excluded: list[Excluded] = []
    if request.is_pinned:
        found = _pinned(fleet, having, allowed)
        free = _unpinned(cards, request, ways, trust)
    else:
        found, excluded = _all(fleet, having, allowed)
        free = None
    best, *others = choices.ranked(found, cards, request)
    constraint, because = _binding(best, having, excluded, cards, request)
    return Plan(
        request=request,
        chosen=best,
        runners_up=tuple(others[:RUNNERS_UP]),
        constraint=constraint,
        because=because,
        notes=(*_notes(best, others, free), *_cost_of_exactness(best, cards, request, ways, trust), *_assumed(best, fleet.links)),
        excluded=tuple(excluded),
        spares=next(each for each in allowed if each.way == best.way).spares(fleet, best),
    )


def _check(request: PlanRequest) -> None:
    for name, tokens in (("prompt", request.prompt_tokens), ("answer", request.answer_tokens)):
        if not 0 < tokens < 1 << 31:
            raise PlacementError(
                f"There is no plan for {'a' if name == 'prompt' else 'an'} {name} of {tokens} tokens", "Ask for 1 or more."
            )
    if not 0 < request.streams <= MOST_STREAMS:
        raise PlacementError(f"There is no plan for {request.streams} streams", f"Ask for 1 to {MOST_STREAMS}.")
    if request.acceptance is not None and not math.isfinite(request.acceptance):
        raise PlacementError(f"The acceptance of a draft can't be {request.acceptance}", "It is a share, from 0 to 1.")


def _pinned(fleet: PricedFleet, having: Sequence[Sequence[Machine]], ways: Sequence[PricesWay]) -> list[Choice]:
    """Return every choice that keeps the pins. Machines that would fetch the weights are included.

    Raises:
        ImpossiblePin: no choice keeps them.
    """
    cards, request = fleet.cards, fleet.request
    ids = [pin.node_id for pin in request.pins]
    for node_id in ids if request.proposer is None else [*ids, request.proposer]:
        if node_id not in cards:
            here = f"In the fleet: {', '.join(list(cards)[:8]) or 'no node'}."
            raise ImpossiblePin(f"{node_id} is pinned and is not in the fleet", here, awaited=f"{node_id} has not been seen yet")
    if twice := sorted({node_id for node_id in ids if ids.count(node_id) > 1}):
        raise ImpossiblePin(f"{twice[0]} is pinned twice", "Give each machine one range of layers.")
    if len(ids) > 1 and (request.proposer is not None or not any(each.takes_pins(request) for each in ways)):
        raise ImpossiblePin(
            f"{len(ids)} machines are pinned, and only a pipeline can use more than one",
            "Allow a pipeline and leave out --pin-draft, or pin one machine.",
        )
    if request.proposer is not None and not any(each.drafts for each in ways):
        raise ImpossiblePin(f"{request.proposer} is to draft, and drafting is not allowed", "Allow it.")
    found: list[Choice] = []
    reasons: list[ImpossiblePin] = []
    for group in having:
        machines = [*group, *could_share(group, cards, fleet.links.between, request)] if request.pins else group
        for each in ways:
            try:
                found += each.price(fleet, machines)
            except ImpossiblePin as reason:
                reasons.append(reason)
    if found:
        return found
    raise (
        next((reason for reason in reasons if reason.awaited), reasons[0])
        if reasons
        else ImpossiblePin(
            f"{', '.join(ids)} can't run {request.title} in a way that is allowed",
            f"Allow others than {', '.join(each.way for each in ways)}.",
        )
    )


def _all(fleet: PricedFleet, having: Sequence[Sequence[Machine]], ways: Sequence[PricesWay]) -> tuple[list[Choice], list[Excluded]]:
    """Return the choices of the first search that finds any, and the machines that can't run the model alone.

    Raises:
        PlacementError: no search finds a choice.
    """
    found: list[Choice] = []
    excluded: list[Excluded] = []
    reasons: list[ImpossiblePin] = []
    for searched, fetching in _searches(fleet):
        for group in having:
            more = could_share(group, fleet.cards, searched.link, searched.request) if fetching else []
            if fetching and not more and not searched.in_need:
                continue
            machines = [*group, *more]
            unfit = [reason for machine in machines if (reason := choices.unfit(machine, searched.request)) is not None]
            excluded += [each for each in unfit if each not in excluded]
            for each in ways if not searched.request.last_route else [each for each in ways if each.spreads]:
                try:
                    found += each.price(searched, machines)
                except ImpossiblePin as reason:
                    reasons.append(reason)
        if found:
            return found, excluded
    raise reasons[0] if reasons else _nothing(fleet, excluded, having, ways)


def _searches(fleet: PricedFleet) -> Iterator[tuple[PricedFleet, bool]]:
    """Yield the searches to make until one finds a choice, each with whether machines that would fetch the weights take part.

    The order: choices that keep the last route; machines that have the weights; also machines that would fetch them; finally, if the request allows
    it, choices with assumptions.
    """
    if fleet.request.last_route:
        yield replace(fleet, in_need=True), True
        fleet = replace(fleet, request=replace(fleet.request, last_route=()))
    yield fleet, False
    yield fleet, True
    if fleet.request.in_need:
        yield replace(fleet, in_need=True), True


def _unpinned(
    cards: Mapping[NodeId, NodeCard], request: PlanRequest, ways: Sequence[PricesWay], trust: Mapping[NodeId, Trust] | None
) -> Choice | None:
    """Return the choice without pins; None if there is none."""
    try:
        return plan(cards.values(), replace(request, pins=(), proposer=None, ways=None), ways, trust).chosen
    except PlacementError:
        return None


def _cost_of_exactness(
    best: Choice, cards: Mapping[NodeId, NodeCard], request: PlanRequest, ways: Sequence[PricesWay], trust: Mapping[NodeId, Trust] | None
) -> list[str]:
    """Return a note on what an exact plan costs, compared with the best one. A replanning that goes by a numerics id has none."""
    if not request.exact or request.numerics_id:
        return []
    fastest = plan(cards.values(), replace(request, exact=False), ways, trust).chosen
    if fastest.estimate.total_s < best.estimate.total_s:
        return [f"--exact costs time: without it {headline(fastest)} would do {figures(fastest)}"]
    return ["--exact costs nothing: no machines that compute other bytes would be faster"]


def _nothing(
    fleet: PricedFleet, excluded: Sequence[Excluded], having: Sequence[Sequence[Machine]], ways: Sequence[PricesWay]
) -> PlacementError:
    request, links = fleet.request, fleet.links
    model = request.title
    if not having:
        return PlacementError(f"Nothing is known of the speed of the machines that have {model}", "They measure it when they start.")
    constraint = Constraint.MEMORY if any(each.constraint is Constraint.MEMORY for each in excluded) else Constraint.NO_CANDIDATE
    reasons = "; ".join(f"{each.node_id} {each.why}" for each in excluded[:4])
    more = f"; and {len(excluded) - 4} more" if len(excluded) > 4 else ""
    having = [[*group, *could_share(group, fleet.cards, links.between, request)] for group in having]
    machines = [machine for group in having for machine in group]
    first = request.orchestrator if any(each.spreads for each in ways) else None
    hosts = [machine for machine in machines if machine.card.serves_shards and machine.node_id != first]
    if first is not None:
        linked = any(links.between(first, machine.node_id) for machine in hosts)
    else:
        linked = any(links.between(one.node_id, other.node_id) for one in machines for other in machines if one is not other)
    if len(fleet.cards) > 1 and not any(machine.offer.digest for machine in machines):
        hint = still_read(machines)
    elif all(each.spreads for each in ways) and first is None and len({machine.node_id for machine in machines}) == 1:
        hint = "A pipeline takes two or more machines, and one that has the model is all there is: paceline join, or up --local-nodes 3 to try."
    elif first is not None and all(machine.node_id in fleet.barred for machine in hosts):
        trusted = " that are trusted enough" if hosts else ""
        hint = f"No other machines{trusted} serve shards of it now: start them, with `paceline up --serve-shards`."
    elif _unlike_could(fleet, having, ways):
        hint = "Machines that compute other bytes than one another could share it: leave out --exact."
    elif not linked and len(machines) > 1 and (first is not None or constraint is Constraint.MEMORY):
        hint = "No links between them have been measured yet; together they may hold it."
    elif constraint is Constraint.MEMORY:
        hint = "Close other programs, add a machine, or choose a smaller model or --weights format."
    else:
        hint = "Ask for a shorter prompt or answer, or allow other ways."
    return PlacementError(
        f"No machine can run {model}, nor can several together" + (f": {reasons}{more}" if reasons else ""), hint, constraint=constraint
    )


def _unlike_could(fleet: PricedFleet, having: Sequence[Sequence[Machine]], ways: Sequence[PricesWay]) -> bool:
    """Return whether machines that compute different bytes could run the request together, and the request does not allow it."""
    if not fleet.request.exact:
        return False
    allowing = replace(fleet, request=replace(fleet.request, exact=False, numerics_id=""))
    try:
        return any(each.price(allowing, group) for each in ways if each.spreads for group in having)
    except PlacementError:
        return False


def _binding(
    best: Choice, having: Sequence[Sequence[Machine]], excluded: Sequence[Excluded], cards: Mapping[NodeId, NodeCard], request: PlanRequest
) -> tuple[Constraint, str]:
    """Return the constraint that prevents a better plan, and the reason in words."""
    short = {each.node_id for each in excluded if each.constraint is Constraint.MEMORY}
    dreams = [choices.alone(machine, request) for group in having for machine in group if machine.node_id in short]
    if dreams:
        dream = choices.ranked(dreams, cards, request)[0]
        if dream.estimate.total_s < best.estimate.total_s:
            node_id = dream.stages[0].node_id
            why = next(each.why for each in excluded if each.node_id == node_id)
            return Constraint.MEMORY, f"{node_id} alone would do {choices.rate(dream)}, but {why}"
    spent = Seconds(best.estimate.compute_s, best.estimate.latency_s, best.estimate.bandwidth_s)
    share = {part: seconds / best.estimate.total_s for part, seconds in _parts(spent)}
    constraint = max(share, key=lambda part: share[part])
    what = {
        Constraint.COMPUTE: "machines are at work",
        Constraint.LINK_LATENCY: "links' round trips take",
        Constraint.LINK_BANDWIDTH: "bytes are on links",
    }[constraint]
    return constraint, f"{what} {share[constraint]:.0%} of the time"


def _parts(spent: Seconds) -> list[tuple[Constraint, float]]:
    return [
        (Constraint.COMPUTE, spent.compute),
        (Constraint.LINK_LATENCY, spent.latency),
        (Constraint.LINK_BANDWIDTH, spent.bandwidth),
    ]


def _notes(best: Choice, others: Sequence[Choice], free: Choice | None) -> list[str]:
    notes: list[str] = []
    used = len(best.node_ids)
    more = next((each for each in others if len(each.stages) > used), None)
    if more is not None and more.estimate.total_s >= best.estimate.total_s:
        took = f"{choices.seconds(best.estimate.total_s)} against {choices.seconds(more.estimate.total_s)}"
        notes.append(f"{_count(used)} faster than {len(more.node_ids)}: {took}")
    if free is not None and free.estimate.total_s < best.estimate.total_s and free.stages != best.stages:
        fewer = "fewer machines" if len(free.node_ids) < used else "the fleet's own choice"
        notes.append(
            f"without pins {fewer} would be faster: {' + '.join(free.node_ids)} ({free.way}), {choices.rate(free)} against {choices.rate(best)}"
        )
    if not best.estimate.measured:
        notes.append("not all speeds behind this estimate were measured yet")
    if best.is_unlike:
        notes.append(
            "unlike machines: the bytes are not those of one machine, and exact requests are refused; --exact leaves such choices out"
        )
    return notes


def _assumed(best: Choice, links: Links) -> list[str]:
    """Return notes on unmeasured links between the machines of a choice."""
    ids = best.node_ids
    hops = {tuple(sorted(pair)) for pair in zip(ids, [*ids[1:], ids[0]], strict=True)} if len(ids) > 1 else set[tuple[NodeId, ...]]()
    assumed = f"{choices.seconds(ASSUMED_RTT_S)} and {ASSUMED_BYTES_PER_S / 1e6:.0f} MB/s are assumed"
    return [f"the link between {a} and {b} was not measured: {assumed}" for a, b in sorted(hops) if links.between(a, b) is None]


def _count(machines: int) -> str:
    return "1 machine is" if machines == 1 else f"{machines} machines are"


def explain(plan: Plan) -> Iterator[str]:
    """Yield a plan as lines for a person."""
    best, request = plan.chosen, plan.request
    weights = f", {best.weights} weights" if best.weights else ""
    streams = f", {request.abreast} streams side by side" if request.objective is Objective.THROUGHPUT else ""
    yield f"{best.model_id}{weights}, {request.prompt_tokens} tokens of prompt, {request.answer_tokens} of answer{streams}"
    yield f"plan: {headline(best)}: {figures(best)}"
    yield from (f"  {line}" for line in parts(best))
    yield from (f"  {spare.node_id} is spare for layers {spare.layers.words}" for spare in plan.spares)
    yield f"limited by {plan.constraint}: {plan.because}"
    yield from (f"note: {note}" for note in plan.notes)
    if plan.runners_up:
        yield "otherwise:"
        yield from (f"  {headline(choice)}: {figures(choice)}" for choice in plan.runners_up)
    if plan.excluded:
        yield "can't run it alone:"
        yield from (f"  {each.node_id} {each.why}" for each in plan.excluded)


def headline(choice: Choice) -> str:
    """Describe in one line which machine does what."""
    first = choice.stages[0]
    if first.rank is not None:
        return "ranks on " + " + ".join(f"{stage.node_id} {_part(stage)}" for stage in choice.stages)
    if len(choice.stages) > 1:
        return " -> ".join(f"{stage.node_id} {_layers(stage)}" for stage in choice.stages) + (
            ", unlike machines" if choice.is_unlike else ""
        )
    if choice.draft is None:
        return f"{first.node_id} alone"
    if choice.draft.node_id == first.node_id:
        return f"{first.node_id}, drafting for itself with {choice.draft.model_id}"
    return f"{first.node_id}, {choice.draft.node_id} drafting with {choice.draft.model_id}"


def figures(choice: Choice) -> str:
    """Describe speed and times of a choice in one line."""
    expected = choice.estimate
    return (
        f"{rate(choice)}, first token after {seconds(expected.ttft_s)}, all after {seconds(expected.total_s)}, {basis(expected.measured)}"
    )


def basis(measured: bool) -> str:
    """Return in a word where a figure comes from."""
    return "measured" if measured else "estimated"


def parts(choice: Choice) -> Iterator[str]:
    """Yield a line for each machine that has more to say than the headline."""
    for stage in choice.stages:
        if (rank := stage.rank) is not None:
            yield f"{stage.node_id} loads its {_part(stage)} of each layer first, {gib(rank.memory_bytes)}"
        elif stage.fetch_from is not None:
            yield f"{stage.node_id} fetches {gib(stage.fetch_bytes)} from {stage.fetch_from} first"
        elif not stage.warm:
            yield f"{stage.node_id} loads {'its layers' if len(choice.stages) > 1 else 'the model'} first"
    if choice.draft is not None:
        draft = choice.draft
        yield f"{draft.node_id} guesses {draft.length} tokens at a time, {draft.acceptance:.0%} of them right ({basis(draft.measured)})"


def _part(stage: PlannedStage) -> str:
    """Format a rank's share of each layer's weights."""
    assert stage.rank is not None
    return f"{stage.rank.weights:.0%}"


def _layers(stage: PlannedStage) -> str:
    return f"[{stage.layers.start}..{stage.layers.stop - 1}]" if len(stage.layers) else "[embedding and head]"


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A node that has all of a model."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """host:port of the node, the best first."""
    model_id: str
    digest: str
    size_bytes: int
    files: str = ""
    """SHA-256 (hex) of all its files together, from the node's card; empty: not known."""


def weights_sources(givers: MayGiveWeights, model: str) -> tuple[WeightsSource, ...]:
    """Return the other nodes that may give weights, have the whole model and are not leaving, best link first. All have one digest and the same other
    files, so one may continue where another stopped.

    Args:
        givers: the cards of nodes that may give weights.
        model: its id in any case (for `org/name`, any GGUF file in it), or at least twelve digits of its digest.

    Raises:
        ModelNotFound: the fleet has different models of that name, or different files next to the same weights.
    """
    digests = digests_of(givers, model)
    if len(digests) > 1:
        listed = ", ".join(f"{name} {digest[:DIGEST_DIGITS]}" for digest, name in sorted(digests.items()))
        raise ModelNotFound(f"the fleet has different models called {model[:200]!r}: {listed}", "Name one by its digest")
    sources = sources_of(givers, next(iter(digests))) if digests else ()
    beside = {source.files: source.node_id for source in sources if source.files}
    if len(beside) > 1:
        listed = ", ".join(f"{node_id} {files[:DIGEST_DIGITS]}" for files, node_id in sorted(beside.items()))
        raise ModelNotFound(
            f"the fleet's nodes have the same weights of {model[:200]!r} with different other files: {listed}",
            "They differ in tokenizer or template: pull it from a hub, or remove it where it is wrong",
        )
    return tuple(source for source in sources if source.files or not beside)


ONE_NAME_HINT = "Machines share no work between them. Keep one of them everywhere, or rename a file; an engine's model gets another name by paceline share --name."


def different_models(cards: Iterable[NodeCard]) -> list[tuple[str, str]]:
    """Return each name that means different models on different nodes, and in words which node has which."""
    named: dict[str, dict[str, dict[NodeId, ModelOffer]]] = {}
    for card in cards:
        for offer in card.models:
            if offer.runs_whole and offer.digest:
                named.setdefault(offer.model_id, {}).setdefault(offer.digest, {})[card.node_id] = offer
    said: list[tuple[str, str]] = []
    for name, digests in sorted(named.items()):
        if len(digests) > 1:
            having = "; ".join(_having(digest, offers) for digest, offers in sorted(digests.items()))
            said.append((name, f"different files have this name: {having}"))
    return said


def _having(digest: str, offers: Mapping[NodeId, ModelOffer]) -> str:
    """Describe one of the models of a name, and where it is. The digest of a file that only an engine has read is not known."""
    known = any(offer.model.has_digest for offer in offers.values())
    return f"{digest[:DIGEST_DIGITS] if known else 'a file of unknown digest'} on {', '.join(_at(*each) for each in sorted(offers.items(), key=lambda each: each[0]))}"


def _at(node_id: NodeId, offer: ModelOffer) -> str:
    engine = offer.engine
    return node_id if engine is None else f"{node_id} ({', '.join(filter(None, (engine.engine, engine.quantisation)))})"


def digests_of(givers: MayGiveWeights, model: str) -> dict[str, str]:
    """Return the digests that nodes mean by a name, each with the full name of the model."""
    return {offer.digest: offer.model_id for _, offer in _whole(givers) if _is_named(offer, model)}


def sources_of(givers: MayGiveWeights, digest: str) -> tuple[WeightsSource, ...]:
    """Return the nodes that have the whole model of one digest, best link first, whatever their other files are."""
    cards, own = live_cards(givers.cards), givers.own
    links = Links(cards)
    found: dict[NodeId, tuple[tuple[float, float, NodeId], WeightsSource]] = {}
    for card, offer in _whole(givers):
        if card.node_id == own or offer.digest != digest or not card.addresses:
            continue
        link = links.between(own, card.node_id)
        rank = (0.0 if link is None else -link.bytes_per_s, 0.0 if link is None else link.rtt_s, card.node_id)
        found[card.node_id] = (
            rank,
            WeightsSource(card.node_id, _addresses(cards.get(own), card), offer.model_id, offer.digest, offer.size_bytes, offer.files),
        )
    return tuple(source for _, source in sorted(found.values(), key=lambda pair: pair[0]))


def _whole(givers: MayGiveWeights) -> list[tuple[NodeCard, ModelOffer]]:
    cards = live_cards(givers.cards).values()
    # An engine of another maker runs its own files, and only some of them lie where this node gives files from.
    return [(card, offer) for card in cards for offer in card.models if offer.runs_whole and offer.digest and offer.engine is None]


def _addresses(own: NodeCard | None, card: NodeCard) -> tuple[str, ...]:
    """Return the addresses of a node: first the one that was measured best, then the others as the node lists them."""
    best = [link.address for link in (own.links if own is not None else ()) if link.to == card.node_id and link.address in card.addresses]
    return tuple(dict.fromkeys([*best, *card.addresses]))


def _is_named(offer: ModelOffer, model: str) -> bool:
    asked, name = model.lower(), offer.model_id.lower()
    if asked in {name, name.partition(":")[0]}:
        return True
    return len(asked) >= DIGEST_DIGITS and offer.digest.startswith(asked)
