"""Pipelines, for the plan: what they would take, and which machines should be ready to take a lost one's place.

Where a person pinned machines, exactly these run layers, in these ranges where ranges were given. What can't be had is said, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations

from paceline.core.errors import ImpossiblePin
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.machines import Machine, alike, stage_machines
from paceline.fleet.plan import Choice, Constraint, Pin, PlanRequest
from paceline.fleet.ways import PricedFleet, PricesWay, check_range, pinned_machine
from paceline.ways.pipeline.cover import CoverRequest, pick, spares_for, warm_shards
from paceline.ways.pipeline.splits import PIPELINE, Pipeline, arranged, as_choice, pipelines

_MOST_ORDERS = 720
"""Orders of pinned machines that are priced: all of six."""


def _loaded(fleet: PricedFleet, stages: Sequence[Machine]) -> Iterator[Pipeline]:
    """Pipelines over layers that are loaded already, behind as many of the orchestrator's own as may be."""
    request = fleet.request
    if request.orchestrator is None or not stages:
        return
    first, by_id = stages[0], {machine.node_id: machine for machine in stages}
    shards = [shard for shard in warm_shards(fleet.cards.values()) if shard.node_id in by_id]
    n_layers, most = first.shape.n_layers, first.holds(edges=True)
    starts = {shard.state.layers.start for shard in shards}
    for own in sorted(starts if request.orchestrator_layers is None else {request.orchestrator_layers}):
        if own > most and request.orchestrator_layers is None:
            break
        parts = pick(shards, _cover(fleet, first, LayerRange(own, n_layers)))
        if parts is None or len({part.node_id for part in parts}) < len(parts):
            continue
        order = [first, *(by_id[part.node_id] for part in parts)]
        if (pipeline := arranged(order, fleet.link, request, [own, *(len(part.layers) for part in parts)])) is not None:
            yield pipeline


def _cover(fleet: PricedFleet, first: Machine, layers: LayerRange) -> CoverRequest:
    """What loaded shards are to cover behind an orchestrator. Its own count in need, where it may hold layers at all."""
    request = fleet.request
    return CoverRequest(
        *(first.offer.model, layers, request.numerics_id, first.node_id),
        allow_self=fleet.in_need and request.orchestrator_layers != 0,
        max_shards=request.max_shards,
    )


def _going_on(fleet: PricedFleet, stages: Sequence[Machine]) -> Iterator[Pipeline]:
    """The last route with others in the place of the lost: shards that have their layers loaded, or else spares."""
    request, by_id = fleet.request, {machine.node_id: machine for machine in stages}
    kept = [part for part in request.last_route if part.node_id in by_id]
    lost = [part.layers for part in request.last_route if part.node_id not in by_id]
    if not kept or request.orchestrator is None:
        return
    outside = [shard for shard in warm_shards(fleet.cards.values()) if shard.node_id in by_id.keys() - {part.node_id for part in kept}]
    loaded = [pick(outside, _cover(fleet, stages[0], span)) for span in lost]
    found: Sequence[LayerSpan] = [part for parts in loaded for part in parts or ()]
    if None in loaded:
        found = spares_for(fleet.cards.values(), request, lost, frozenset(part.node_id for part in kept), fleet.trust)
        if len(found) < len(lost) or not by_id.keys() >= {part.node_id for part in found}:
            return
    parts = sorted([*kept, *found], key=lambda part: part.layers.start)
    order = [stages[0], *(by_id[part.node_id] for part in parts)]
    pipeline = arranged(order, fleet.link, request, [parts[0].layers.start, *(len(part.layers) for part in parts)])
    if pipeline is not None:
        yield pipeline


def pinned(fleet: PricedFleet, able: Sequence[Machine]) -> list[Choice]:
    """The pipelines that keep to a request's pins. An orchestrator that is not pinned runs no layers.

    Raises:
        ImpossiblePin: there are none.
    """
    request, barred = fleet.request, fleet.barred
    others = [pin for pin in request.pins if pin.node_id != request.orchestrator]
    if request.orchestrator is not None and len(others) > request.max_shards:
        raise _too_many(len(others), request)
    request = replace(request, pins=(*_own_layers(request), *request.pins))
    stages = {machine.node_id: machine for machine in stage_machines(able, request, barred)}
    for pin in request.pins:
        if (machine := pinned_machine(pin, able, fleet)).node_id not in stages:
            raise _no_stage(machine, stages, request, barred)
    machines = {pin.node_id: stages[pin.node_id] for pin in request.pins}
    together = [*machines.values(), *([stages[request.orchestrator]] if request.orchestrator is not None else [])]
    if request.exact and len(alike(together)) > 1:
        raise _unlike(together, request)
    shape = next(iter(machines.values())).shape
    if (context := _context(together)) < request.prompt_tokens + request.answer_tokens:
        raise ImpossiblePin(f"The model's context is {context} tokens, and the request is longer", "Ask for less.")
    if len(machines) > shape.n_layers + (request.orchestrator in machines):
        raise ImpossiblePin(f"{len(machines)} machines are pinned, and the model has {shape.n_layers} layers", "Pin fewer.")
    found: list[Choice] = []
    head = [replace(stages[request.orchestrator], takes_layers=False)] if request.orchestrator and request.is_apart else []
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
        best = arranged(order, fleet.link, request, layers)
        if best is not None:
            found.append(as_choice(best))
    if not found:
        raise _too_little_memory(machines, request, shape.n_layers)
    return found


def _context(machines: Sequence[Machine]) -> int:
    """The model's, in tokens, as far as these say: one that serves it may have room for less."""
    return max((machine.shape.max_context for machine in machines), default=0)


def _too_many(shards: int, request: PlanRequest) -> ImpossiblePin:
    return ImpossiblePin(
        f"{request.title} takes {shards} shards as planned, and a request may use {request.max_shards}", "Raise max_shards_per_request."
    )


def _own_layers(request: PlanRequest) -> tuple[Pin, ...]:
    """The layers that an orchestrator keeps, where others are pinned to ranges: they come before all of these."""
    own, ranges = request.orchestrator, [pin for pin in request.pins if pin.layers is not None]
    if own is None or not request.orchestrator_layers or not ranges or any(pin.node_id == own for pin in request.pins):
        return ()
    return (Pin(own, LayerRange(0, request.orchestrator_layers)),)


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


def _unlike(machines: Sequence[Machine], request: PlanRequest) -> ImpossiblePin:
    known = {machine.offer.numerics_id: machine.node_id for machine in machines if machine.offer.numerics_id}
    one, other, *_ = sorted(known.values())
    return ImpossiblePin(
        f"{one} and {other} are to share {request.title}, and compute other bytes than one another",
        "Pin machines that are alike, or leave out --exact.",
    )


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
        check_range(pin, machines[pin.node_id])
        if span.start < end:
            raise ImpossiblePin(f"{pin.node_id} and {before} are both pinned to layer {span.start}", "Give each layer to one machine.")
        if span.start > end:
            gaps.append(LayerRange(end, span.start))
        end, before = span.stop, pin.node_id
    if end < n_layers:
        gaps.append(LayerRange(end, n_layers))
    if len(gaps) > len(free):
        raise ImpossiblePin(f"Layers {gaps[-1].words} are pinned to no machine", "Pin them, or pin a machine without a range for each gap.")
    if len(gaps) < len(free):
        raise ImpossiblePin(f"{free[-1]} is pinned, and no layers are left for it", "Leave layers free, or leave it out.")
    for order in islice(permutations(free), _MOST_ORDERS):
        spans = sorted([*((_layers(pin), pin.node_id) for pin in fixed), *zip(gaps, order, strict=True)], key=lambda each: each[0].start)
        yield [machines[node_id] for _, node_id in spans], [len(span) for span, _ in spans]


def _layers(pin: Pin) -> LayerRange:
    assert pin.layers is not None
    return pin.layers


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
        f"The pinned machines do not have the memory for the {n_layers} layers of {request.title} and their KV: {fit}",
        "Pin more machines, or other ranges; the first stage also holds embedding and head.",
        constraint=Constraint.MEMORY,
    )


class Pipelined(PricesWay):
    """Each machine runs a range of layers."""

    way = PIPELINE
    spreads = True

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        request = fleet.request
        if request.proposer is not None:
            return []
        if request.pins:
            if not request.is_spread_by_pins:
                raise ImpossiblePin("One machine is pinned, and a pipeline has two or more", "Pin another, or allow it to run alone.")
            return pinned(fleet, machines)
        found: list[Choice] = []
        for group in alike(machines) if request.exact else [*alike(machines), machines]:
            stages = stage_machines(group, request, fleet.barred)
            if _context(stages) < request.prompt_tokens + request.answer_tokens:
                continue
            if request.last_route:
                found += map(as_choice, _going_on(fleet, stages))
            else:
                found += map(as_choice, [*pipelines(stages, fleet.link, request), *_loaded(fleet, stages)])
        allowed = [
            choice for choice in dict.fromkeys(found) if request.orchestrator is None or len(choice.stages) <= 1 + request.max_shards
        ]
        if found and not allowed:
            raise _too_many(min(len(choice.stages) for choice in found) - 1, request)
        return allowed

    def spares(self, fleet: PricedFleet, chosen: Choice) -> tuple[LayerSpan, ...]:
        if fleet.request.orchestrator is None:
            return ()
        spans = [stage.layers for stage in chosen.stages[1:]]
        return spares_for(fleet.cards.values(), fleet.request, spans, frozenset(chosen.node_ids), fleet.trust)
