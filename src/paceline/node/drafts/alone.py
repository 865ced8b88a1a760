"""Proposers of this process alone, where a fleet's would be: the same ways to find and to reach them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.fleet.card import ModelOffer
from paceline.node.drafts.drafter import Drafter, Key, OnEnd, drafter_of
from paceline.node.drafts.lines import DeskLine
from paceline.transport.draft_blocks import OnBlock
from paceline.transport.proposer_desk import ProposerDesk

HERE = NodeId("here")


class Alone:
    """Finds them and opens lines to them.

    Args:
        desk: has them.
        offers: what they promise, by the desk's names.
    """

    def __init__(self, desk: ProposerDesk, offers: Mapping[str, ModelOffer]) -> None:
        self._desk, self._offers = desk, offers

    def find(self, model_id: str, left_out: Collection[Key]) -> Sequence[Drafter]:
        """As `drafter.Find`, of a model; empty: of any."""
        found = [drafter_of(HERE, b"", name, offer, 0.0) for name, offer in self._offers.items() if model_id in {"", name}]
        left = [one for one in found if one.key not in left_out]
        if not left:
            raise PlacementError(f"Nobody drafts with {model_id or 'a model'} here", f"Start with --propose {model_id or 'MODEL'}.")
        return left

    def open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> DeskLine:
        """As `drafter.OpenLine`."""
        return DeskLine(self._desk, drafter.node_id, on_block, on_end)
