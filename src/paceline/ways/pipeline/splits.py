"""Which machines in which order, how many layers each, and what a request over them would take: the pipelines worth a look.

Law: every set and order of up to four machines is looked at; beyond that the best few of each length are extended by each other machine
(a beam), so that twenty machines take milliseconds. For each order the split of the layers is the best there is within memory, and a hair's
breadth decides nothing. Links between neighbours decide the order. Machines without a measured link are no neighbours.

Symbols as in `fleet.choices`; besides l layers of a stage, a link's R (RTT s) and B (bytes/s), h = 2 x hidden bytes: one row of bf16 on the wire.

    token      edge + sum(l layer) + sum(hops: R / 2 + h / B), the hop back to the first stage included
    ttft       edge + sum(one chunk's stages, transfers, R / 2) + (chunks - 1) x the slowest of stages and transfers
    S streams  b = S / min(S, stages) rows in a batch, so that every stage has one. Each row beyond a batch's first adds a prompt row, its
               sequence's KV, and e / (N w p) in the head. token = max(b's token as above, S / b x the slowest stage); S times the chunks
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf
from operator import lt, mul
from typing import Final

from paceline.fleet import choices
from paceline.fleet.card import Link
from paceline.fleet.choices import Seconds, estimate, sum_of
from paceline.fleet.machines import LinkOf, Machine, speed_order
from paceline.fleet.plan import Choice, Estimate, Objective, PlanRequest, Way

CHUNK = 512
"""Prompt rows that enter a pipeline together: the engine's default."""
ROW_BYTES = 2
"""Of a hidden value on the wire: bf16."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What of a pipeline's cost depends on how its layers are split, seconds: sum(n x each) + waits x max(transfer, n x busy)."""

    each: tuple[float, ...]
    """What a layer adds to the request, by machine."""
    busy: tuple[float, ...]
    """How long a layer is at work on a chunk of the prompt, by machine."""
    waits: int
    """Chunks that wait for the slowest stage or transfer."""
    transfer: float


@dataclass(frozen=True, slots=True)
class Work:
    """What keeps each machine busy while all streams are served, seconds: n x layer + edge."""

    layer: tuple[float, ...]
    edge: tuple[float, ...]


def bill_of(machines: Sequence[Machine], links: Sequence[Link], request: PlanRequest) -> Bill:
    """The part of `estimate_of` that a split decides; arguments as there."""
    chunks, rows = _chunks(request)
    transfers = [rows * ROW_BYTES * machines[0].shape.hidden / link.bytes_per_s for link in links[:-1]]
    busy = tuple(machine.prompt_layer_s * rows for machine in machines)
    each = tuple(machine.layer_s * (request.answer_tokens - 1) + at_work for machine, at_work in zip(machines, busy, strict=True))
    return Bill(each, busy, chunks - 1, max(transfers))


def work_of(machines: Sequence[Machine], request: PlanRequest) -> Work:
    """What a split decides of how long all streams take together; arguments as for `estimate_of`."""
    batches = micro_batches(request.abreast, len(machines))
    rows = request.abreast / batches
    prompts, tokens = request.abreast * request.prompt_tokens, batches * (request.answer_tokens - 1)
    layer = tuple(machine.prompt_layer_s * prompts + machine.layer_batch_s(rows) * tokens for machine in machines)
    return Work(layer, (machines[0].edge_batch_s(rows) * (tokens + 1), *(0.0 for _ in machines[1:])))


def estimate_of(machines: Sequence[Machine], layers: Sequence[int], links: Sequence[Link], request: PlanRequest) -> Estimate:
    """Several machines, each a range of layers.

    Args:
        links: from each machine to the next, and from the last to the first.
    """
    first = machines[0]
    row_bytes = ROW_BYTES * first.shape.hidden
    batches = micro_batches(request.abreast, len(machines))
    rows = request.abreast / batches
    edge = Seconds(first.edge_batch_s(rows))
    hops = [Seconds(0.0, link.rtt_s / 2, rows * row_bytes / link.bytes_per_s) for link in links]
    stages = [Seconds(machine.layer_batch_s(rows) * n) for machine, n in zip(machines, layers, strict=True)]
    loop = sum_of([edge, *stages, *hops])
    busiest = max([edge + stages[0], *stages[1:]], key=lambda stage: stage.all) * batches
    token = loop if loop.all >= busiest.all else busiest

    chunks, rows = _chunks(request)
    at_work = [Seconds(machine.prompt_layer_s * n * rows) for machine, n in zip(machines, layers, strict=True)]
    transfers = [Seconds(bandwidth=rows * row_bytes / link.bytes_per_s) for link in links[:-1]]
    slowest = max([*at_work, *transfers], key=lambda part: part.all)
    waits = Seconds(latency=fsum(link.rtt_s / 2 for link in links))
    way_back = Seconds(bandwidth=row_bytes / links[-1].bytes_per_s)
    ttft = sum_of([edge, *at_work, *transfers, slowest * (request.abreast * chunks - 1), waits, way_back])
    return estimate(ttft, token, request, measured=all(machine.measured for machine in machines))


def micro_batches(streams: int, stages: int) -> int:
    """Into how many batches sequences are split, so that no stage waits for another's."""
    return min(streams, stages)


def _chunks(request: PlanRequest) -> tuple[int, float]:
    """How many chunks the prompt takes, and how many rows each has."""
    chunks = -(-request.prompt_tokens // CHUNK)
    return chunks, request.prompt_tokens / chunks


PIPELINE: Final = Way("pipeline")
"""Each machine runs a range of layers."""
_EQUAL = 1 + 1e-9
"""Costs that differ by less are the same."""


def split(
    n_layers: int,
    room: Sequence[int],
    each: Sequence[float],
    busy: Sequence[float],
    waits: int,
    floor: float = 0.0,
    least: Sequence[int] | None = None,
) -> list[int]:
    """Layers for each machine: the split with the least of sum(n x each) + waits x max(floor, n x busy). Empty where they don't fit.

    Begins with as many as fit on the cheapest, then moves layers one by one off the slowest stage to the cheapest that stays below it: what
    it passes are the best splits for each bound on the slowest stage, so the best of them is the best of all; among equals the most even.

    Args:
        room: layers each can hold.
        each: seconds a layer adds to the request on each machine.
        busy: seconds a layer keeps each machine busy with a chunk of the prompt.
        waits: how often the request waits for the slowest stage.
        floor: seconds it waits each time whatever the stages do: the slowest transfer.
        least: layers each must get; None: one.
    """
    floors = [1] * len(room) if least is None else [*least]
    layers = [*floors]
    left = n_layers - sum(layers)
    if left < 0 or any(map(lt, room, floors)):
        return []
    by_cost = sorted(range(len(room)), key=lambda place: (each[place], place))
    for place in by_cost:
        more = min(left, room[place] - floors[place])
        layers[place] += more
        left -= more
    if left:
        return []
    best, cheapest = layers, inf
    while True:
        slowest = max(range(len(room)), key=lambda place: (layers[place] * busy[place], place))
        ceiling = layers[slowest] * busy[slowest]
        total = fsum([*map(mul, layers, each), waits * max(floor, ceiling)])
        if total <= cheapest * _EQUAL:
            best, cheapest = [*layers], min(total, cheapest)
        to = next((place for place in by_cost if layers[place] < room[place] and (layers[place] + 1) * busy[place] < ceiling), None)
        if to is None or layers[slowest] == floors[slowest]:
            return best
        layers[slowest] -= 1
        layers[to] += 1


def balanced(n_layers: int, room: Sequence[int], layer: Sequence[float], extra: Sequence[float], least: Sequence[int]) -> list[int]:
    """Layers for each machine: the split whose slowest stage, n x layer + extra, is fastest; of those the one with the least work in all.
    Empty where they don't fit.

    Args:
        room: layers each can hold.
        layer: seconds a layer keeps each machine busy.
        extra: seconds it is busy without any.
        least: layers each must get.
    """
    layers = [*least]
    left = n_layers - sum(layers)
    if left < 0 or any(map(lt, room, least)) or sum(room) < n_layers:
        return []

    def busy(place: int, n: int) -> float:
        return n * layer[place] + extra[place]

    for _ in range(left):
        open_to_more = (place for place in range(len(room)) if layers[place] < room[place])
        layers[min(open_to_more, key=lambda place: (busy(place, layers[place] + 1), place))] += 1
    ceiling = max(busy(place, n) for place, n in enumerate(layers)) * _EQUAL
    layers = [*least]
    for place in sorted(range(len(room)), key=lambda place: (layer[place], place)):
        while left and layers[place] < room[place] and busy(place, layers[place] + 1) <= ceiling:
            layers[place] += 1
            left -= 1
    return layers


MOST_MACHINES = 20
"""Of those that have the weights, the fastest are looked at. Raising it makes plans slower to compute."""
_BEAM = 96
"""Divided by the number of machines: how many pipelines of each length are extended."""
_KEPT = 3
"""Of each length, how many are worth naming."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Machines, their layers, and what a request would take."""

    machines: tuple[Machine, ...]
    layers: tuple[int, ...]
    estimate: Estimate


def as_choice(pipeline: Pipeline) -> Choice:
    return choices.choice(PIPELINE, pipeline.machines, pipeline.layers, None, pipeline.estimate)


def pipelines(group: Sequence[Machine], link_of: LinkOf, request: PlanRequest) -> list[Pipeline]:
    """The best pipelines of each length, from two machines on. With an orchestrator: those that begin on it."""
    fastest = sorted(group, key=lambda machine: (machine.node_id == request.orchestrator, speed_order(machine)), reverse=True)
    machines = fastest[:MOST_MACHINES]  # the orchestrator first
    hops = _Hops(machines, link_of)
    width = max(4, _BEAM // max(1, len(machines)))
    beam = [(place,) for place, machine in enumerate(machines) if machine.runs_whole and request.orchestrator in {None, machine.node_id}]
    promise = _latency if request.objective is Objective.LATENCY else _throughput
    found: list[Pipeline] = []
    for _ in range(len(machines) - 1):
        scored = sorted((promise(machines, chain, hops, request), chain) for chain in _extended(beam, len(machines), hops))
        beam = [chain for (score, chain) in scored[:width] if score < inf]
        closed = ([machines[place] for place in chain] for chain in beam if hops.closes(chain))
        estimated = [best for order in closed if (best := arranged(order, link_of, request))]
        found += sorted(estimated, key=lambda each: each.estimate.total_s)[:_KEPT]
    return found


def arranged(machines: Sequence[Machine], link_of: LinkOf, request: PlanRequest, layers: Sequence[int] | None = None) -> Pipeline | None:
    """Machines in this order with their best split of the layers, or with the one given. None where memory or links don't allow it."""
    ids = [machine.node_id for machine in machines]
    way = [link_of(sender, receiver) for sender, receiver in zip(ids, [*ids[1:], ids[0]], strict=True)]
    measured = [hop for hop in way if hop is not None]
    if len(measured) < len(way):
        return None
    if layers is None:
        layers = _best_split(machines, measured, request)
    return Pipeline(tuple(machines), tuple(layers), estimate_of(machines, layers, measured, request)) if layers else None


def _best_split(machines: Sequence[Machine], links: Sequence[Link], request: PlanRequest) -> list[int]:
    """Empty where memory does not allow any."""
    first, *others = machines
    if not first.holds_edges:
        return []
    n_layers = first.shape.n_layers
    room = [first.holds(edges=True), *(machine.holds(edges=False) for machine in others)]
    least = [0 if first.node_id == request.orchestrator else 1, *(1 for _ in others)]
    if first.node_id == request.orchestrator and request.orchestrator_layers is not None:
        room[0] = least[0] = request.orchestrator_layers
    if request.objective is Objective.THROUGHPUT:
        work = work_of(machines, request)
        return balanced(n_layers, room, work.layer, work.edge, least)
    bill = bill_of(machines, links, request)
    return split(n_layers, room, bill.each, bill.busy, bill.waits, bill.transfer, least)


class _Hops:
    """Seconds a row takes from machine to machine, by place; infinite where no link was measured."""

    def __init__(self, machines: Sequence[Machine], link_of: LinkOf) -> None:
        self._seconds: Mapping[tuple[int, int], float] = {
            (a, b): self._hop(one, link_of(one.node_id, other.node_id))
            for a, one in enumerate(machines)
            for b, other in enumerate(machines)
            if a != b
        }
        self.quickest = min(self._seconds.values(), default=inf)

    @staticmethod
    def _hop(sender: Machine, link: Link | None) -> float:
        return inf if link is None else link.rtt_s / 2 + ROW_BYTES * sender.shape.hidden / link.bytes_per_s

    def __call__(self, a: int, b: int) -> float:
        return self._seconds[a, b]

    def closes(self, chain: tuple[int, ...]) -> bool:
        """Whether the last can answer the first."""
        return self._seconds[chain[-1], chain[0]] < inf


def _extended(beam: Sequence[tuple[int, ...]], count: int, hops: _Hops) -> Iterator[tuple[int, ...]]:
    for chain in beam:
        for place in range(count):
            if place not in chain and hops(chain[-1], place) < inf:
                yield (*chain, place)


def _latency(machines: Sequence[Machine], chain: tuple[int, ...], hops: _Hops, _: PlanRequest) -> float:
    """Seconds a token takes, at best, in a pipeline that begins so. Infinite where no machines can hold what is left."""
    parts = [machines[chain[0]].edge_s, *(hops(a, b) for a, b in itertools.pairwise(chain))]
    left = machines[0].shape.n_layers
    inside = sorted(chain, key=lambda place: (machines[place].layer_s, place))
    for place in inside:
        n = min(left, machines[place].holds(edges=place == chain[0]))
        parts.append(n * machines[place].layer_s)
        left -= n
    if left == 0:
        back = hops(chain[-1], chain[0])
        return fsum([*parts, back if back < inf else hops.quickest * 2])
    for place, machine in enumerate(machines):  # fastest first
        if left and place not in chain:
            n = min(left, machine.holds(edges=False))
            parts += [n * machine.layer_s, hops.quickest]
            left -= n
    return inf if left else fsum([*parts, hops.quickest])


def _throughput(machines: Sequence[Machine], chain: tuple[int, ...], hops: _Hops, request: PlanRequest) -> float:
    """Seconds all streams take, at best, in a pipeline that begins so, were layers divisible. Infinite as above."""
    places, n_layers = [*chain], machines[0].shape.n_layers
    held = sum(machines[place].holds(edges=place == chain[0]) for place in chain)
    for place, machine in enumerate(machines):  # fastest first
        if held < n_layers and place not in chain and (more := machine.holds(edges=False)):
            places.append(place)
            held += more
    if held < n_layers:
        return inf
    work = work_of([machines[place] for place in places], request)
    rates = [1 / layer for layer in work.layer]
    slowest = (n_layers + work.edge[0] * rates[0]) / fsum(rates)
    on_the_way = fsum([*(hops(a, b) for a, b in itertools.pairwise(chain)), hops.quickest * (1 + len(places) - len(chain))])
    return max(slowest, work.edge[0]) + on_the_way * (request.answer_tokens - 1)
