"""Which machines in which order, and how many layers each: the pipelines worth a look.

Law: every set and order of up to four machines is looked at; beyond that the best few of each length are extended by each other machine
(a beam), so that twenty machines take milliseconds. Layers are split in two ways, and the cheaper is kept: evenly by speed, which keeps all
machines equally busy with a prompt, and fastest first, which makes each token quickest; both within memory. Links between neighbours
decide the order. Machines without a measured link are no neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import fsum, inf

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
    """Machines in this order with their better split of the layers, or with the one given. None where memory or links don't allow it."""
    ids = [machine.node_id for machine in machines]
    way = [link(sender, receiver) for sender, receiver in zip(ids, [*ids[1:], ids[0]], strict=True)]
    measured = [hop for hop in way if hop is not None]
    splits = [layers] if layers is not None else [by_speed(machines), fastest_first(machines)]
    estimates = [
        (cost.pipeline(machines, split, measured, request), tuple(split)) for split in splits if split and len(measured) == len(way)
    ]
    if not estimates:
        return None
    best, split = min(estimates, key=lambda pair: (pair[0].total_s, pair[1]))
    return Pipeline(tuple(machines), split, best)


def by_speed(machines: Sequence[Machine]) -> list[int]:
    """Layers such that the slowest stage is as quick as it can be, within memory. Empty where they don't fit."""
    room = _room(machines)
    layers = [1] * len(machines)
    left = machines[0].shape.n_layers - len(machines)
    if left < 0 or min(room) < 1:
        return []
    heap = [(2 * machine.layer_s, place) for place, machine in enumerate(machines) if room[place] > 1]
    heapify(heap)
    while left and heap:
        _, place = heap[0]
        layers[place] += 1
        left -= 1
        full = layers[place] == room[place]
        heapreplace(heap, (inf if full else (layers[place] + 1) * machines[place].layer_s, place))
        if heap[0][0] == inf:
            break
    return [] if left else layers


def fastest_first(machines: Sequence[Machine]) -> list[int]:
    """As many layers as fit on the fastest machine, then on the next, at least one on each. Empty where they don't fit."""
    room = _room(machines)
    layers = [1] * len(machines)
    left = machines[0].shape.n_layers - len(machines)
    if left < 0 or min(room) < 1:
        return []
    for place in sorted(range(len(machines)), key=lambda place: (machines[place].layer_s, place)):
        more = min(left, room[place] - 1)
        layers[place] += more
        left -= more
    return [] if left else layers


def _room(machines: Sequence[Machine]) -> list[int]:
    return [machine.holds(edges=place == 0) for place, machine in enumerate(machines)]


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
