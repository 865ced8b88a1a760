"""Plans that a person pinned: exactly these machines run layers, in these ranges where ranges were given. What can't be had is said, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations

from paceline.core.errors import ImpossiblePin
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet import choices
from paceline.fleet.card import Link, NodeCard
from paceline.fleet.machines import Links, Machine, fetchers, stage_machines
from paceline.fleet.pipelines import arranged
from paceline.fleet.plan import Choice, Constraint, Pin, PlanRequest, Way

ASSUMED_RTT_S, ASSUMED_BYTES_PER_S = 5e-3, 1e7
"""Of a link that was not measured, where a pin wants it: a poor Wi-Fi."""
_MOST_ORDERS = 720
"""Orders of pinned machines that are priced: all of six."""


def pinned(
    cards: Mapping[NodeId, NodeCard],
    links: Links,
    having: Sequence[Sequence[Machine]],
    request: PlanRequest,
    barred: Collection[NodeId] = (),
) -> list[Choice]:
    """The choices that keep to the pins. An orchestrator that is not pinned runs no layers.

    Args:
        links: of the same view.
        having: machines by the very same weights.
        barred: may hold no layers for others.

    Raises:
        ImpossiblePin: there are none.
    """
    _check(cards, request)
    request = replace(request, pins=(*_own_layers(request), *request.pins))

    def link(sender: NodeId, receiver: NodeId) -> Link:
        return links.between(sender, receiver) or Link(receiver, "", ASSUMED_RTT_S, ASSUMED_BYTES_PER_S)

    found: list[Choice] = []
    reasons: list[ImpossiblePin] = []
    for group in having:
        able = {machine.node_id: machine for machine in [*group, *fetchers(group, cards, links, request)]}
        try:
            if not request.pins:
                for machine in group:
                    if choices.unfit(machine, request) is None:
                        found += choices.drafted(machine, cards, link, request)
            elif len(request.pins) == 1 and not (_is_apart(request) and Way.PIPELINE in request.ways):
                found += _single(cards, able, link, request)
            else:
                found += _several(able, link, request, barred)
        except ImpossiblePin as reason:
            reasons.append(reason)
    if found:
        return found
    if reasons:
        raise reasons[0]
    whole = [machine for group in having for machine in group if choices.unfit(machine, request) is None]
    why = _why_not(cards, whole[0], request) if whole else f": none can run {request.title} alone"
    raise ImpossiblePin(f"{request.proposer} can draft for no machine{why}", "Leave the draft out, or pin another.")


def _check(cards: Mapping[NodeId, NodeCard], request: PlanRequest) -> None:
    ids = [pin.node_id for pin in request.pins]
    named = ids if request.proposer is None else [*ids, request.proposer]
    for node_id in named:
        if node_id not in cards:
            raise ImpossiblePin(f"{node_id} is pinned and is not in the fleet", f"In the fleet: {', '.join(list(cards)[:8]) or 'nobody'}.")
    twice = sorted({node_id for node_id in ids if ids.count(node_id) > 1})
    if twice:
        raise ImpossiblePin(f"{twice[0]} is pinned twice", "Give each machine one range of layers.")
    several = len(ids) > 1
    if several and (Way.PIPELINE not in request.ways or request.proposer is not None):
        raise ImpossiblePin(
            f"{len(ids)} machines are pinned, and only a pipeline has so many",
            "Allow a pipeline and leave out --draft-on, or pin one machine.",
        )
    if request.proposer is not None and Way.DRAFT not in request.ways:
        raise ImpossiblePin(f"{request.proposer} is to draft, and drafting is not allowed", "Allow it.")
    if len(ids) == 1 and not request.ways & {Way.ALONE, Way.DRAFT} and not _is_apart(request):
        raise ImpossiblePin("One machine is pinned, and a pipeline has two or more", "Pin another, or allow it to run alone.")


def _own_layers(request: PlanRequest) -> tuple[Pin, ...]:
    """The layers that an orchestrator keeps, where others are pinned to ranges: they come before all of these."""
    own, ranges = request.orchestrator, [pin for pin in request.pins if pin.layers is not None]
    if own is None or not request.orchestrator_layers or not ranges or any(pin.node_id == own for pin in request.pins):
        return ()
    return (Pin(own, LayerRange(0, request.orchestrator_layers)),)


def _single(cards: Mapping[NodeId, NodeCard], able: Mapping[NodeId, Machine], link: choices.LinkOf, request: PlanRequest) -> list[Choice]:
    (pin,) = request.pins
    machine = _able(pin, able, request)
    if pin.layers is not None and pin.layers != LayerRange(0, machine.shape.n_layers):
        _check_range(pin, machine)
        raise ImpossiblePin(
            f"{pin.node_id} is pinned to layers {pin.layers.words}, and nobody to the rest of {machine.shape.n_layers}", "Pin those too."
        )
    reason = choices.unfit(machine, request)
    if reason is not None:
        raise ImpossiblePin(f"{pin.node_id} is pinned, but {reason.why}", "Pin more machines, or others.", constraint=reason.constraint)
    found: list[Choice] = []
    if Way.ALONE in request.ways and request.proposer is None:
        found.append(choices.alone(machine, request))
    if Way.DRAFT in request.ways and machine.fetch_from is None:
        found += choices.drafted(machine, cards, link, request)
    if not found:
        who = request.proposer or "No machine"
        raise ImpossiblePin(f"{who} can't draft for {pin.node_id}" + _why_not(cards, machine, request), "Leave the draft out.")
    return found


def _why_not(cards: Mapping[NodeId, NodeCard], machine: Machine, request: PlanRequest) -> str:
    if request.proposer is None:
        return ""
    card = cards[request.proposer]
    reasons = [reason for offer in card.models if (reason := choices.can_draft(card, offer, machine, request)) is not None]
    return f": {reasons[0]}" if reasons else ": it offers no model"


def _is_apart(request: PlanRequest) -> bool:
    """Whether the orchestrator is none of those pinned, so that even one of them makes a pipeline."""
    return request.orchestrator is not None and all(pin.node_id != request.orchestrator for pin in request.pins)


def _several(able: Mapping[NodeId, Machine], link: choices.LinkOf, request: PlanRequest, barred: Collection[NodeId]) -> list[Choice]:
    stages = {machine.node_id: machine for machine in stage_machines(able.values(), request, barred)}
    for pin in request.pins:
        if _able(pin, able, request).node_id not in stages:
            raise _no_stage(able[pin.node_id], stages, request, barred)
    machines = {pin.node_id: stages[pin.node_id] for pin in request.pins}
    shape = next(iter(machines.values())).shape
    if shape.max_context < request.prompt_tokens + request.answer_tokens:
        raise ImpossiblePin(f"The model's context is {shape.max_context} tokens, and the request is longer", "Ask for less.")
    if len(machines) > shape.n_layers + (request.orchestrator in machines):
        raise ImpossiblePin(f"{len(machines)} machines are pinned, and the model has {shape.n_layers} layers", "Pin fewer.")
    found: list[Choice] = []
    head = [replace(stages[request.orchestrator], takes_layers=False)] if request.orchestrator and _is_apart(request) else []
    for pinned_order, pinned_layers in _orders(request.pins, machines, shape.n_layers):
        order = [*head, *pinned_order]
        layers = pinned_layers and [*(0 for _ in head), *pinned_layers]
        if not order[0].runs_whole or request.orchestrator not in {None, order[0].node_id}:
            continue
        if layers is not None and not (
            order[0].holds_edges
            and all(n <= machine.holds(edges=place == 0) for place, (machine, n) in enumerate(zip(order, layers, strict=True)))
        ):
            continue
        best = arranged(order, link, request, layers)
        if best is not None:
            found.append(choices.piped(best))
    if not found:
        raise _too_little_memory(machines, request, shape.n_layers)
    return found


def _no_stage(machine: Machine, stages: Collection[NodeId], request: PlanRequest, barred: Collection[NodeId]) -> ImpossiblePin:
    if request.orchestrator is not None and request.orchestrator not in stages:
        return ImpossiblePin(f"{request.orchestrator} is to orchestrate and can't hold embedding and head", "Pull the model there.")
    if machine.node_id in barred:
        why, hint = "is not trusted enough to hold layers", "Pin another, or lower min_host_trust in [pipeline] of config.toml here."
    elif not machine.card.serves_shards:
        why, hint = "serves no shards now", "Start it with `paceline up --serve-shards`, or pin another."
    else:
        why, hint = "computes other bytes", "Pin another."
    return ImpossiblePin(f"{machine.node_id} is pinned, but {why}", hint)


def _orders(pins: Sequence[Pin], machines: Mapping[NodeId, Machine], n_layers: int) -> Iterator[tuple[list[Machine], list[int] | None]]:
    """Orders of the machines, with their layers where ranges were pinned. Machines without a range fill the gaps, one each.

    Raises:
        ImpossiblePin: ranges overlap, leave the model, or leave gaps that no pin fills.
    """
    fixed = sorted((pin for pin in pins if pin.layers is not None), key=lambda pin: (_layers(pin).start, pin.node_id))
    free = sorted(pin.node_id for pin in pins if pin.layers is None)
    if not fixed:
        for order in islice(permutations(free), _MOST_ORDERS):
            yield [machines[node_id] for node_id in order], None
        return
    gaps: list[LayerRange] = []
    end, before = 0, ""
    for pin in fixed:
        span = _layers(pin)
        _check_range(pin, machines[pin.node_id])
        if span.start < end:
            raise ImpossiblePin(f"{pin.node_id} and {before} are both pinned to layer {span.start}", "Give each layer to one machine.")
        if span.start > end:
            gaps.append(LayerRange(end, span.start))
        end, before = span.stop, pin.node_id
    if end < n_layers:
        gaps.append(LayerRange(end, n_layers))
    if len(gaps) > len(free):
        raise ImpossiblePin(f"Layers {gaps[-1].words} are pinned to nobody", "Pin them, or pin a machine without a range for each gap.")
    if len(gaps) < len(free):
        raise ImpossiblePin(f"{free[-1]} is pinned, and no layers are left for it", "Leave layers free, or leave it out.")
    for order in islice(permutations(free), _MOST_ORDERS):
        spans = sorted([*((_layers(pin), pin.node_id) for pin in fixed), *zip(gaps, order, strict=True)], key=lambda each: each[0].start)
        yield [machines[node_id] for _, node_id in spans], [len(span) for span, _ in spans]


def _layers(pin: Pin) -> LayerRange:
    assert pin.layers is not None
    return pin.layers


def _check_range(pin: Pin, machine: Machine) -> None:
    span, n_layers = _layers(pin), machine.shape.n_layers
    if not 0 <= span.start < span.stop <= n_layers:
        raise ImpossiblePin(
            f"{pin.node_id} is pinned to layers {span.words} of a model with {n_layers}", f"Layers are 0 to {n_layers - 1}."
        )


def _able(pin: Pin, able: Mapping[NodeId, Machine], request: PlanRequest) -> Machine:
    machine = able.get(pin.node_id)
    if machine is None:
        raise ImpossiblePin(
            f"{pin.node_id} is pinned, but has not the same weights of {request.title} as the others, nor a measured link to one that has",
            "Pull the model there, or pin another machine.",
        )
    return machine


def _too_little_memory(machines: Mapping[NodeId, Machine], request: PlanRequest, n_layers: int) -> ImpossiblePin:
    if not any(machine.runs_whole for machine in machines.values()):
        return ImpossiblePin("None of the pinned machines can hold embedding and head", "Pin one that offers the whole model.")
    ranges = {pin.node_id: pin.layers for pin in request.pins}
    fit = "; ".join(
        f"{node_id} has room for {machine.holds(edges=False)}"
        + (f", and {len(span)} are pinned to it" if (span := ranges[node_id]) is not None else "")
        for node_id, machine in sorted(machines.items())
    )
    return ImpossiblePin(
        f"The pinned machines have not the memory for the {n_layers} layers of {request.title} and their KV: {fit}",
        "Pin more machines, or other ranges; the first stage also holds embedding and head.",
        constraint=Constraint.MEMORY,
    )
