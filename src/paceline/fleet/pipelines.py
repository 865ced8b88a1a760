"""Which machines in which order, and how many layers each: the pipelines worth a look.

Law: every set and order of up to four machines is looked at; beyond that the best few of each length are extended by each other machine
(a beam), so that twenty machines take milliseconds. For each order the split of the layers is the best there is within memory. Links between
neighbours decide the order. Machines without a measured link are no neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf
from operator import mul

from paceline.core.ids import NodeId
from paceline.fleet import cost
from paceline.fleet.card import Link
from paceline.fleet.machines import Links, Machine, speed_order
from paceline.fleet.plan import Estimate, PlanRequest

MOST_MACHINES = 20
"""Of those that have the weights, the fastest are looked at. Raising it makes plans slower to compute."""
_BEAM = 96
"""Divided by the number of machines: how many pipelines of each length are extended."""
_KEPT = 3
"""Of each length, how many are worth naming."""
_EQUAL = 1 + 1e-9
"""Costs that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Machines, their layers, and what a request would take."""

    machines: tuple[Machine, ...]
    layers: tuple[int, ...]
    estimate: Estimate


def pipelines(group: Sequence[Machine], links: Links, request: PlanRequest) -> list[Pipeline]:
    """The best pipelines of each length, from two machines on."""
    machines = sorted(group, key=speed_order, reverse=True)[:MOST_MACHINES]
    hops = _Hops(machines, links)
    width = max(4, _BEAM // max(1, len(machines)))
    beam = [(place,) for place, machine in enumerate(machines) if machine.runs_whole]
    found: list[Pipeline] = []
    for _ in range(len(machines) - 1):
        scored = sorted((_promise(machines, chain, hops), chain) for chain in _extended(beam, len(machines), hops))
        beam = [chain for (score, chain) in scored[:width] if score < inf]
        closed = ([machines[place] for place in chain] for chain in beam if hops.closes(chain))
        estimated = [best for order in closed if (best := arranged(order, links.between, request))]
        found += sorted(estimated, key=lambda each: each.estimate.total_s)[:_KEPT]
    return found


def arranged(
    machines: Sequence[Machine], link: Callable[[NodeId, NodeId], Link | None], request: PlanRequest, layers: Sequence[int] | None = None
) -> Pipeline | None:
    """Machines in this order with their best split of the layers, or with the one given. None where memory or links don't allow it."""
    ids = [machine.node_id for machine in machines]
    way = [link(sender, receiver) for sender, receiver in zip(ids, [*ids[1:], ids[0]], strict=True)]
    measured = [hop for hop in way if hop is not None]
    if len(measured) < len(way):
        return None
    if layers is None:
        bill = cost.bill(machines, measured, request)
        room = [machine.holds(edges=place == 0) for place, machine in enumerate(machines)]
        layers = split(machines[0].shape.n_layers, room, bill.each, bill.busy, bill.waits, bill.transfer)
    return Pipeline(tuple(machines), tuple(layers), cost.pipeline(machines, layers, measured, request)) if layers else None


def split(n_layers: int, room: Sequence[int], each: Sequence[float], busy: Sequence[float], waits: int, floor: float = 0.0) -> list[int]:
    """Layers for each machine: the split with the least of sum(n x each) + waits x max(floor, n x busy). Empty where they don't fit.

    Begins with as many as fit on the cheapest, then moves layers one by one off the slowest stage to the cheapest that stays below it: what
    it passes are the best splits for each bound on the slowest stage, so the best of them is the best of all; among equals the most even.

    Args:
        n_layers: to be split; each machine gets one or more.
        room: layers each can hold.
        each: seconds a layer adds to the request on each machine.
        busy: seconds a layer keeps each machine busy with a chunk of the prompt.
        waits: how often the request waits for the slowest stage.
        floor: seconds it waits each time whatever the stages do: the slowest transfer.
    """
    layers = [1] * len(room)
    left = n_layers - len(room)
    if left < 0 or min(room) < 1:
        return []
    by_cost = sorted(range(len(room)), key=lambda place: (each[place], place))
    for place in by_cost:
        more = min(left, room[place] - 1)
        layers[place] += more
        left -= more
    if left:
        return []
    best, least = layers, inf
    while True:
        slowest = max(range(len(room)), key=lambda place: (layers[place] * busy[place], place))
        ceiling = layers[slowest] * busy[slowest]
        total = fsum([*map(mul, layers, each), waits * max(floor, ceiling)])
        if total <= least * _EQUAL:
            best, least = [*layers], min(total, least)
        to = next((place for place in by_cost if layers[place] < room[place] and (layers[place] + 1) * busy[place] < ceiling), None)
        if to is None or layers[slowest] == 1:
            return best
        layers[slowest] -= 1
        layers[to] += 1


class _Hops:
    """Seconds a row takes from machine to machine, by place; infinite where no link was measured."""

    def __init__(self, machines: Sequence[Machine], links: Links) -> None:
        self._seconds: Mapping[tuple[int, int], float] = {
            (a, b): self._hop(one, links.between(one.node_id, other.node_id))
            for a, one in enumerate(machines)
            for b, other in enumerate(machines)
            if a != b
        }
        self.quickest = min(self._seconds.values(), default=inf)

    @staticmethod
    def _hop(sender: Machine, link: Link | None) -> float:
        return inf if link is None else link.rtt_s / 2 + cost.ROW_BYTES * sender.shape.hidden / link.bytes_per_s

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


def _promise(machines: Sequence[Machine], chain: tuple[int, ...], hops: _Hops) -> float:
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
