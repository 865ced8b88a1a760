"""Which machines outside a pipeline should have which of its spans loaded, before a machine is lost: a pure function of the view, as the plan is.

Law: a machine is a spare for one span. One that has a span loaded, or loads it, stays its spare; the longest spans are given away first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.core.trust import Trust
from paceline.fleet.card import NodeCard
from paceline.fleet.machines import (
    Links,
    Machine,
    barred_hosts,
    fetchers,
    free_for_layers,
    groups,
    live_cards,
    matching_offers,
    speed_order,
    stage_machines,
)
from paceline.fleet.plan import PlanRequest, Spare


def spares_for(
    view: Iterable[NodeCard],
    request: PlanRequest,
    spans: Sequence[LayerRange],
    taken: frozenset[NodeId],
    trust: Mapping[NodeId, Trust] | None = None,
) -> tuple[Spare, ...]:
    """A machine for each span, as far as there are any.

    Args:
        view: the live cards, in any order.
        request: names the model and the orchestrator.
        spans: ranges of layers that a machine each runs, or ran.
        trust: what certificates say of nodes; those left out are members.

    Raises:
        PlacementError: no machine has the model.
    """
    cards = {node_id: card for node_id, card in live_cards(view).items() if node_id not in request.exclude}
    links, barred = Links(cards), barred_hosts(cards, request, trust or {})
    free: dict[NodeId, Machine] = {}
    for group in groups(matching_offers(cards, request), request):
        for machine in stage_machines([*group, *fetchers(group, cards, links, request)], request, barred):
            if machine.node_id not in taken and machine.node_id != request.orchestrator:
                free.setdefault(machine.node_id, machine)
    found: list[Spare] = []
    for span in sorted(spans, key=lambda span: (-len(span), span.start)):
        able = [machine for machine in free.values() if _has(machine, span) or _fits(machine, span)]
        if able:
            best = max(able, key=lambda machine: (_has(machine, span), not _has_any(machine), speed_order(machine)))
            found.append(Spare(best.node_id, best.card.instance, span))
            del free[best.node_id]
    return tuple(sorted(found, key=lambda spare: spare.layers.start))


def _fits(machine: Machine, span: LayerRange) -> bool:
    """Nothing makes way for a spare."""
    return machine.takes_layers and free_for_layers(machine.card) >= machine.needs(len(span), edges=False)


def _has(machine: Machine, span: LayerRange) -> bool:
    """Whether it has the span loaded, or loads it."""
    return any(shard.start <= span.start and span.stop <= shard.stop for shard in _loaded(machine))


def _has_any(machine: Machine) -> bool:
    return bool(_loaded(machine))


def _loaded(machine: Machine) -> list[LayerRange]:
    wanted = (machine.offer.digest, machine.offer.weights)
    return [each.shard.layers for each in machine.card.models if each.shard is not None and (each.digest, each.weights) == wanted]
