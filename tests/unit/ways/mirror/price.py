"""Two nodes compute the same, and their bytes are compared: a way of spreading work that only tests have, in this folder and one line of a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from paceline.core.errors import ImpossiblePin
from paceline.fleet import choices
from paceline.fleet.machines import Machine
from paceline.fleet.plan import Choice, Way
from paceline.fleet.ways import PricedFleet, PricesWay, whole_machines

MIRROR: Final = Way("mirror")


class Mirrored(PricesWay):
    """The slower of two nodes sets the pace, and the way to it and back comes on top."""

    way = MIRROR
    spreads = True

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        found: list[Choice] = []
        if fleet.request.pins:
            raise ImpossiblePin("Mirrors are not pinned", "Leave pins out.")
        able = [machine for machine in whole_machines(fleet, machines) if machine.node_id not in fleet.barred]
        for one, other in combinations(able, 2):
            if (link := fleet.link(one.node_id, other.node_id)) is None:
                continue
            each = [choices.alone(machine, fleet.request).estimate for machine in (one, other)]
            slower = max(each, key=lambda estimate: estimate.total_s)
            rounds_s = link.rtt_s * fleet.request.answer_tokens
            measured = one.measured and other.measured
            estimate = replace(slower, measured=measured, total_s=slower.total_s + rounds_s, latency_s=slower.latency_s + rounds_s)
            first = choices.choice(MIRROR, [one], [one.shape.n_layers], None, estimate)
            second = choices.choice(MIRROR, [other], [other.shape.n_layers], None, estimate)
            found.append(replace(first, stages=(*first.stages, *second.stages)))
        return found
