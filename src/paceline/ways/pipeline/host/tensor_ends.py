"""`TensorEnds` of a node: its tensor port, and members of its fleet by their certificates."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import BadPipelineRequest
from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype
from paceline.net.member.node import FleetNode
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.listener import Expected as Ticket
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.certificates import Member
from paceline.net.trust.credentials import check_callable
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import Voids
from paceline.ways.pipeline.batches import StreamSink, StreamSource
from paceline.ways.pipeline.executor.links import ActivationSink
from paceline.ways.pipeline.executor.sessions import NextStage
from paceline.ways.pipeline.host.ends import Dial, Expected


class NodeTensorEnds:
    """The real ones.

    Args:
        listener: gives the node's tensor port; raises StreamClosed while there is none.
        identity: this node's.
        voids: the revocations known.
        member_of: by node id, what the certificate of a member in view says; raises BadPipelineRequest where there is none. Asked on the event loop.
    """

    def __init__(
        self, listener: Callable[[], TensorListener], identity: Identity, voids: Voids, member_of: Callable[[NodeId], Member]
    ) -> None:
        self._listener, self._identity, self._voids, self._member_of = listener, identity, voids, member_of

    @property
    def port(self) -> int:
        return self._listener().port

    def expect(self, ticket: bytes, dtype: ActivationDtype, width: int) -> Expected:
        """As `TensorEnds.expect`."""
        return _Expected(self._listener().expect(ticket), dtype, width)

    def way(self, to: NextStage, dtype: ActivationDtype) -> Dial:
        """As `TensorEnds.way`."""
        member = self._member_of(to.node_id)
        check_callable(member, self._voids)

        def go(deadline: float, /) -> ActivationSink:
            return StreamSink(dial(to.addresses, member, to.ticket, self._identity, self._voids, deadline), dtype)

        return go


class _Expected:
    """A ticket, and what its bearer will send."""

    def __init__(self, ticket: Ticket, dtype: ActivationDtype, width: int) -> None:
        self._ticket, self._dtype, self._width = ticket, dtype, width

    def accept(self, deadline: float) -> StreamSource:
        return StreamSource(self._ticket.wait(deadline), self._dtype, self._width)

    def close(self) -> None:
        self._ticket.cancel()


def tensor_ends(fleet: FleetNode) -> NodeTensorEnds:
    """Those of a node of a fleet."""

    def member_of(node_id: NodeId) -> Member:
        member = fleet.member(node_id)
        if member is None:
            raise BadPipelineRequest(f"There is no node {node_id} in this fleet's view")
        return member

    return NodeTensorEnds(lambda: fleet.tensors, fleet.identity, fleet.gossip.voids, member_of)
