"""Every way of spreading work that this program knows, and the plan over all of them. A new way is a folder beside these and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from paceline.core.ids import NodeId, Trust
from paceline.fleet import placement
from paceline.fleet.card import NodeCard
from paceline.fleet.plan import Plan, PlanRequest
from paceline.fleet.ways import Alone, PricesWay
from paceline.ways.draft.price import Drafted
from paceline.ways.pipeline.price import Pipelined

WAYS: Final[tuple[PricesWay, ...]] = (Alone(), Drafted(), Pipelined())


def plan(view: Iterable[NodeCard], request: PlanRequest, trust: Mapping[NodeId, Trust] | None = None) -> Plan:
    """As `fleet.placement.plan`, over all ways."""
    return placement.plan(view, request, WAYS, trust)
