"""The check of which nodes in view still answer, made when a person asks.

Gossip alone notices a dead node late: its card lives until its TTL ends. A process that was killed leaves ports that refuse connections, which is proof
enough to drop its card. A process that was stopped, or a machine without power, only stays silent: it is reported, and its card stays until it expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import grpc
import grpc.aio

from paceline.core.clock import Clock
from paceline.core.errors import FleetError
from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard
from paceline.net.channels import ChannelPool, Purpose
from paceline.net.discovery import AddressBook
from paceline.net.exchange_codec import MemberOpener
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub

ANSWERS_S = 1.2
"""Seconds in which an address must answer. Raising it: `paceline status` takes longer where a machine is silent; lowering it: a busy node counts as silent."""

AGAIN_S = 1.0
"""Seconds between two looks. Raising it: `paceline status --watch` shows a loss later; lowering it: nodes answer more calls."""

_SILENCE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Statuses of a call that no node answered. With any other status, even a refusal, a live node answered."""


class Presence:
    """The check that the nodes in view still answer.

    Args:
        gone: called with the id of a node that is proved gone, because its ports refuse connections.
    """

    def __init__(self, pool: ChannelPool, opener: MemberOpener, book: AddressBook, clock: Clock, gone: Callable[[NodeId], None]) -> None:
        self._pool, self._opener, self._book, self._clock, self._gone = pool, opener, book, clock, gone
        self._looking, self._looked_at = asyncio.Lock(), float("-inf")

    async def look(self, cards: Collection[NodeCard]) -> None:
        """Ask all nodes at once, and note in the address book where they answer. Takes three times `ANSWERS_S` at most."""
        async with self._looking:
            if self._clock.monotonic() - self._looked_at >= AGAIN_S:
                await asyncio.gather(*(self._look_at(card) for card in cards))
                self._looked_at = self._clock.monotonic()

    async def _look_at(self, card: NodeCard) -> None:
        known = [address for address in card.addresses if self._book.has_worked(address)]
        first, *others = self._book.order(card.addresses) or ("",)
        if (
            not first
            or await self._answers(card.node_id, first)
            or True in await asyncio.gather(*(self._answers(card.node_id, one) for one in others))
        ):
            return
        # An address that never worked, such as that of a bridge for containers, says nothing about the node.
        if known and all(await asyncio.gather(*map(_refuses, known))):
            self._gone(card.node_id)

    async def _answers(self, node_id: NodeId, address: str) -> bool:
        why = "it did not answer in time"
        try:
            async with asyncio.timeout(ANSWERS_S):
                for _ in range(2):  # the first call may only find out that the process at the other end is another one now
                    try:
                        stub = CapabilityServiceStub(self._pool.get(Purpose.EXCHANGE, address, self._opener.proven(node_id)))
                        with unless_closed(f"{node_id} at {address}"):
                            await stub.MeasureLink(wire.MeasureLinkRequest())
                    except grpc.aio.AioRpcError as error:
                        if error.code() in _SILENCE:
                            why = error_of(error, f"{node_id} at {address}").message
                            continue
                    self._book.worked(address, node_id)
                    return True
        except TimeoutError:
            pass
        except FleetError as error:
            why = error.message
        self._book.failed(address, why, self._clock.monotonic())
        return False


async def _refuses(address: str) -> bool:
    """Return whether no process listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWERS_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.transport.abort()
    return False
