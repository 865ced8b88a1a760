"""CapabilityService on the wire. What a request means is `fleet.gossip`'s to say; that its caller belongs was checked before it came here."""

from __future__ import annotations

from typing import Any, Protocol

import grpc.aio

from paceline.core.errors import GossipRefused, MessageTooLarge
from paceline.core.ids import NodeId
from paceline.transport.rpc_faults import abort
from paceline.transport.trust.guard import PeerGuard
from paceline.transport.wire import fleet_pb2 as wire
from paceline.transport.wire.fleet_pb2_grpc import CapabilityServiceServicer

MAX_MEASURE_BYTES = 4 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class GossipPort(Protocol):
    """A node's gossip, as its server needs it."""

    async def answer(self, request: wire.ExchangeCapabilitiesRequest, peer: NodeId) -> wire.ExchangeCapabilitiesResponse:
        """One exchange.

        Raises:
            GossipRefused: the peer asks too often or too much.
        """
        ...

    def own_passed(self) -> wire.PassedCard | None:
        """This node's card; None before it has one."""
        ...

    def count_measure(self, peer: NodeId) -> None:
        """Note that a peer measures its link.

        Raises:
            GossipRefused: it does so too often.
        """
        ...


class CapabilityServicer(CapabilityServiceServicer):
    """Answers members."""

    def __init__(self, gossip: GossipPort, guard: PeerGuard) -> None:
        self._gossip, self._guard = gossip, guard

    async def ExchangeCapabilities(self, request: wire.ExchangeCapabilitiesRequest, context: Context) -> wire.ExchangeCapabilitiesResponse:
        try:
            return await self._gossip.answer(request, self._guard.peer(context).node_id)
        except GossipRefused as error:
            await abort(context, error)

    async def GetNodeCapability(self, request: wire.GetNodeCapabilityRequest, context: Context) -> wire.GetNodeCapabilityResponse:
        del request, context
        return wire.GetNodeCapabilityResponse(card=self._gossip.own_passed())

    async def MeasureLink(self, request: wire.MeasureLinkRequest, context: Context) -> wire.MeasureLinkResponse:
        try:
            self._gossip.count_measure(self._guard.peer(context).node_id)
            if request.response_bytes > MAX_MEASURE_BYTES:
                raise MessageTooLarge(f"{request.response_bytes} bytes were asked for to measure a link; the bound is {MAX_MEASURE_BYTES}")
        except GossipRefused as error:
            await abort(context, error)
        return wire.MeasureLinkResponse(payload=bytes(request.response_bytes))
