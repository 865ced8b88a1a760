"""How many layers each machine of a pipeline gets, its order given: for one request soonest, or for the quickest slowest stage.

Law: both are exact over all splits within memory, and a hair's breadth decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf
from operator import lt, mul

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
