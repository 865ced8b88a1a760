"""Which machine leases how much KV for which span of the model, and whose are void once machines are lost.

Law: a lease belongs to a span. What was written under it is void from the moment its machine is lost or lets go of it; what other machines
hold of the same sequences is as good as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.errors import LostSpan
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange


@dataclass(frozen=True, slots=True)
class SpanLease:
    """One machine's KV of these layers."""

    node_id: NodeId
    layers: LayerRange
    kv_tokens: int


class SpanLeases:
    """Of one pipeline: those that other machines gave it."""

    def __init__(self) -> None:
        self._held: dict[LayerRange, SpanLease] = {}

    @property
    def held(self) -> tuple[SpanLease, ...]:
        """In the order of their layers."""
        return tuple(sorted(self._held.values(), key=lambda lease: lease.layers.start))

    @property
    def kv_tokens(self) -> int:
        """That every span has room for: sequences may be given no more. 0 where nothing is leased."""
        return min((lease.kv_tokens for lease in self.held), default=0)

    def take(self, leases: Iterable[SpanLease]) -> None:
        """A route was opened over these."""
        self._held |= {lease.layers: lease for lease in leases}

    def void(self, node_id: NodeId | None) -> tuple[LostSpan, ...]:
        """Machines are lost: their spans, whose KV is void. The leases are gone.

        Args:
            node_id: the machine; None: any of them, so all.
        """
        lost = [lease for lease in self._held.values() if node_id in {None, lease.node_id}]
        for lease in lost:
            del self._held[lease.layers]
        return tuple(
            LostSpan(lease.layers.start, lease.layers.stop, lease.node_id) for lease in sorted(lost, key=lambda it: it.layers.start)
        )
