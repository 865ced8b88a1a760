"""Ways to a proposer: over the fleet's channels, or to this node's own desk."""

from __future__ import annotations

import grpc.aio

from paceline.core.errors import NodeUnreachable
from paceline.core.ids import NodeId
from paceline.node.drafts.drafter import Drafter, Line, OnEnd
from paceline.node.drafts.lines import DeskLine
from paceline.node.fleet import FleetNode
from paceline.transport.channels import Purpose
from paceline.transport.draft_blocks import OnBlock
from paceline.transport.draft_line import RemoteLine


class FleetLines:
    """Opens lines."""

    def __init__(self, fleet: FleetNode) -> None:
        self._fleet = fleet

    def open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> Line:
        """As `drafter.OpenLine`."""
        if drafter.node_id == self._fleet.node_id:
            return DeskLine(self._fleet.desk, drafter.node_id, on_block, on_end)
        return RemoteLine(self.channel(drafter.node_id), drafter.node_id, on_block, on_end)

    def channel(self, node_id: NodeId) -> grpc.aio.Channel:
        """To a member, over the address that serves best.

        Raises:
            NodeUnreachable: it is not in view.
            FleetError: its certificate is not good.
        """
        fleet = self._fleet
        live, member = fleet.view().get(node_id), fleet.gossip.opener.member(node_id)
        if live is None or member is None:
            raise NodeUnreachable(f"{node_id} is not in this fleet's view")
        return fleet.pool.get(Purpose.DRAFTS, fleet.book.order(live.card.addresses)[0], member)
