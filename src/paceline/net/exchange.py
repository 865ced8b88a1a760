"""Gossip calls to a peer. Its addresses are tried in order, the likeliest first; the result is the node that answered and its reply.

A failed call closes its channel, unless that is still being dialled, and counts against its address until a call succeeds there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import grpc
import grpc.aio

from paceline.core.clock import Clock
from paceline.core.errors import NodeUnreachable, OtherProtocol, PacelineError
from paceline.core.ids import NodeId
from paceline.fleet.messages import GossipCall, Reply
from paceline.fleet.presets import Bounds
from paceline.net.channels import ChannelPool, Purpose
from paceline.net.discovery import AddressBook
from paceline.net.exchange_codec import (
    MemberOpener,
    Refuse,
    measure,
    parse_reply,
    read_reply,
    write_request,
)
from paceline.net.protocol import PROGRAM, Versions
from paceline.net.rpc_faults import fleet_error_of, unless_closed
from paceline.net.trust.certificates import Member
from paceline.net.wire import fleet_pb2 as wire

logger = logging.getLogger(__name__)

EXCHANGE = "/paceline.v1.CapabilityService/ExchangeCapabilities"


@dataclass(frozen=True, slots=True)
class ExchangeAnswer:
    peer: NodeId
    reply: Reply


class Exchanger:
    """The client that makes the calls of one node's gossip.

    Args:
        clock: its monotonic time divides the time of a call among the addresses.
        given: addresses that a person named; the log reports those that do not work.
        versions: the protocol version of this node, and the check of its peers' versions.
    """

    def __init__(
        self,
        own: NodeId,
        pool: ChannelPool,
        opener: MemberOpener,
        book: AddressBook,
        bounds: Bounds,
        clock: Clock,
        given: Collection[str] = (),
        versions: Versions = PROGRAM,
    ) -> None:
        self._given = frozenset(given)
        self._own, self._pool, self._opener = own, pool, opener
        self._book, self._bounds, self._versions, self._clock = book, bounds, versions, clock
        self._doubted: set[str] = set()
        """Addresses where a call failed. The node there may no longer show the certificate that is known."""
        self._met: dict[str, Member] = {}
        """Members found at addresses that no card lists, by address."""

    async def call(self, call: GossipCall, refuse: Refuse) -> ExchangeAnswer:
        """Make one gossip call, at one address after the other, within the call's timeout.

        Args:
            refuse: called with an error for each part of the reply that fails its check.

        Raises:
            PacelineError: the node answered at none of its addresses, or its reply was refused. It is the error of the last address.
        """
        until = self._clock.monotonic() + call.timeout_s
        addresses = self._book.order(call.addresses)
        failure: PacelineError = NodeUnreachable("A peer without addresses can't be called")
        for place, address in enumerate(addresses):
            # Each address but the last gets half of the time left, so that a dead one leaves time for the next.
            left = until - self._clock.monotonic()
            if left <= 0:
                break
            timeout_s = left if place == len(addresses) - 1 else left / 2
            try:
                answer = await self._at(address, call, timeout_s, refuse)
            except PacelineError as error:  # a peer may refuse with any
                failure = error
                if isinstance(error, OtherProtocol):
                    continue  # the node is there, and named as one of another version
                if address in self._given and not self._book.is_failing(address):
                    logger.warning("no member answers at %s, which is tried again: %s", address, error.message)
                self._book.failed(address, error.message, self._clock.monotonic())
                self._doubt(address)
                continue
            self._book.worked(address, answer.peer)
            self._doubted.discard(address)
            return answer
        raise failure

    async def _at(self, address: str, call: GossipCall, timeout_s: float, refuse: Refuse) -> ExchangeAnswer:
        began = self._clock.monotonic()
        member = await self._whom(address, call.node_id, timeout_s)
        if member.node_id == self._own:
            return ExchangeAnswer(self._own, Reply())
        channel = self._pool.get(Purpose.EXCHANGE, address, member)
        left = max(0.001, timeout_s - (self._clock.monotonic() - began))
        try:
            # Not by the stub, because the size of a reply is checked before it is decoded.
            ask = channel.unary_unary(EXCHANGE, wire.ExchangeCapabilitiesRequest.SerializeToString)
            with unless_closed(f"{member.node_id} at {address}"):
                data = await ask(write_request(call.request, self._versions.own), timeout=left, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            self._pool.refused(error)
            is_refused = channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            # On a slow link dialling may take longer than a call, so it may go on once until the next round.
            if self._book.is_failing(address) or channel.get_state() is not grpc.ChannelConnectivity.CONNECTING:
                self._met.pop(address, None)
                self._pool.discard(Purpose.EXCHANGE, address, member)
            failure = fleet_error_of(error, f"{member.node_id} at {address}")
            if isinstance(failure, OtherProtocol):
                self._versions.check(member.node_id, failure.spoken)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and is_refused:  # the call waited for a connection, in vain
                failure = NodeUnreachable(f"{member.node_id} at {address} can't be reached (no connection to it comes about)", failure.hint)
        else:
            message = parse_reply(data)
            self._versions.check(member.node_id, message.protocol)
            self._bounds.check(measure(message))
            return ExchangeAnswer(member.node_id, await read_reply(message, self._opener, refuse))
        raise failure  # as `ChannelPool.card_at` does

    async def _whom(self, address: str, node_id: NodeId | None, timeout_s: float) -> Member:
        known = self._opener.member(node_id) if node_id is not None else self._met.get(address)
        if known is not None and address not in self._doubted:
            return known
        sealed = await self._pool.card_at(address, timeout_s, self._versions)
        member = self._opener.met(sealed)
        if len(self._met) >= 256:
            self._met.clear()
        self._met[address] = member
        return member

    def _doubt(self, address: str) -> None:
        """Make the next call ask for the certificate first, but only every other time: on a slow link both together take longer than a round."""
        if address in self._doubted:
            self._doubted.discard(address)
            return
        if len(self._doubted) >= 256:
            self._doubted.clear()
        self._doubted.add(address)
