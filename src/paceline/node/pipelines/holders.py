"""Second holders of layers: whoever could compute a part of a route once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.core.errors import PipelineError, WeightsMismatch
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.core.trust import Trust
from paceline.fleet.card import NodeCard
from paceline.node.pipelines.choosing import Part, Wanted, allowed_hosts, choose, warm_cover


class Holders:
    """Others that could compute a route's layers once more. On the event loop.

    Args:
        left_out: who must take no part.
    """

    def __init__(
        self,
        cards: Callable[[], Sequence[NodeCard]],
        trust: Callable[[], Mapping[NodeId, Trust]],
        own: NodeId,
        wanted: Wanted,
        left_out: Callable[[], frozenset[NodeId]],
    ) -> None:
        self._cards, self._trust, self._own = cards, trust, own
        self._wanted, self._left_out = replace(wanted, pins=()), left_out

    def chain(self, stages: Sequence[Part]) -> list[list[Part]]:
        """For each stage, others that run its layers: nodes outside the route where they cover it, else whoever has the layers loaded."""
        outside = self._left_out() | {stage.node_id for stage in stages}
        try:
            parts = choose(self._cards(), self._trust(), self._own, self._wanted, outside)
        except PipelineError:
            chain = [self.third(stage.layers, frozenset({stage.node_id})) for stage in stages]
            return chain if all(chain) else []
        return [[part for whole in parts if (part := _within(whole, stage.layers)) is not None] for stage in stages]

    def third(self, layers: LayerRange, but: frozenset[NodeId]) -> list[Part]:
        """Others that have the layers loaded; none where they don't cover."""
        wanted = replace(self._wanted, own_layers=layers.start, n_layers=layers.stop)
        allowed = allowed_hosts(self._cards(), self._trust(), self._own, wanted)
        try:
            return warm_cover(allowed, self._own, wanted, self._left_out() | but)
        except WeightsMismatch:
            return []


def _within(part: Part, layers: LayerRange) -> Part | None:
    start, stop = max(part.layers.start, layers.start), min(part.layers.stop, layers.stop)
    return Part(part.node_id, LayerRange(start, stop)) if start < stop else None
