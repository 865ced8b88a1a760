"""mTLS channels to members, kept while they are used: one a purpose, an address and the certificate to meet there.

Exchanges and long streams have channels of their own: one that timed out is thrown away and dialled anew, because TCP wakes up long after
a partition healed, and that must not end a client's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import grpc.aio
from cachetools import LRUCache

from paceline.core.background import TaskSet
from paceline.core.clock import Clock
from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard
from paceline.net.exchange_codec import MAX_EXCHANGE_BYTES
from paceline.net.protocol import PROGRAM, Versions
from paceline.net.rpc_faults import fleet_error_of
from paceline.net.trust.certificates import NODE_NAME, Member
from paceline.net.trust.credentials import ask_card, channel_credentials, check_callable
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import Voids

MAX_CHANNELS = 512
"""Open at once; the one used longest ago is closed."""
MAX_MESSAGE_BYTES = 8 << 20
"""Of an answer: a view may have 256 cards of 16 KB. What a node takes in is bounded by method (`server.REQUESTS`). Raising it: what one message can make a
node hold."""
MAX_CARD_MESSAGE_BYTES = 128 << 10
"""What a node that is only met may say: one card."""
MAX_BLOCK_BYTES = 64 << 10
"""What may come at once of a node that drafts: a block and branches take some 20 KB at the most, and what takes long to read holds up this node."""
KEEPALIVE_S = 10
"""Of silence in a call, until the other side is asked for a sign of life. Raising it: the streams of a machine that lost its power hang for
longer."""
KEEPALIVE_TIMEOUT_S = 5
PING_TIMEOUT_S = 20
"""Until a connection ends whose ping is not answered, one that measures the link too. A ping waits behind the data that was sent before it:
lowering it ends transfers over slow links."""

RECEIVE = "grpc.max_receive_message_length"
Options = list[tuple[str, str | int]]
COMMON: Options = [
    (RECEIVE, MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_S * 1000),
]
CHANNEL_OPTIONS: Options = [
    *COMMON,
    ("grpc.enable_http_proxy", 0),  # the fleet is on this network, never behind an office's proxy
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which also bounds one attempt: four round trips on a slow link
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise a new channel would be given the old one's connection, dead or not.
    ("grpc.use_local_subchannel_pool", 1),
]


class Purpose(StrEnum):
    """What a channel is for. Calls of one purpose share their fate."""

    EXCHANGE = "exchange"
    STREAM = "stream"
    MEASURE = "measure"
    WEIGHTS = "weights"
    DRAFTS = "drafts"


MOST_BYTES = {Purpose.EXCHANGE: MAX_EXCHANGE_BYTES, Purpose.DRAFTS: MAX_BLOCK_BYTES}
"""Of one message, where it is less than elsewhere."""


@dataclass(frozen=True, slots=True)
class _Open:
    channel: grpc.aio.Channel
    member: Member


class ChannelPool:
    """The channels of one node. Lives on one event loop; close it when done.

    Args:
        refused: told of every meeting and exchange that failed.
        check_age: raises NotTrusted where what is known of revocations is too old for anything but hearing of newer ones.
    """

    def __init__(
        self,
        identity: Identity,
        voids: Voids,
        clock: Clock,
        refused: Callable[[grpc.aio.AioRpcError], None] = lambda _: None,
        check_age: Callable[[], None] = lambda: None,
    ) -> None:
        self.refused, self._check_age = refused, check_age
        self._identity, self._voids, self._clock = identity, voids, clock
        self._credentials = identity.member, channel_credentials(identity)
        self._open: LRUCache[tuple[Purpose, str, int], _Open] = LRUCache(MAX_CHANNELS)
        self._closing = TaskSet()

    def get(self, purpose: Purpose, address: str, member: Member) -> grpc.aio.Channel:
        """A channel on which only `member` can answer; nothing is dialled before its first call.

        Raises:
            RevokedNode: the member was revoked.
            NotTrusted: too little is known of revocations.
        """
        check_callable(member, self._voids)
        if purpose is not Purpose.EXCHANGE:
            self._check_age()
        key = (purpose, address, member.serial)
        found = self._open.get(key)
        if found is None:
            if len(self._open) == MAX_CHANNELS:
                self._end(self._open.popitem()[1])
            found = self._open[key] = _Open(self._dial(address, member.tls_name, MOST_BYTES.get(purpose, MAX_MESSAGE_BYTES)), member)
        return found.channel

    async def meet(self, address: str, timeout_s: float) -> Member:
        """Who is at an address.

        Raises:
            PacelineError: as `card_at`.
        """
        return self._identity.root.member((await self.card_at(address, timeout_s)).certificate, self._clock.wall())

    async def card_at(self, address: str, timeout_s: float, versions: Versions = PROGRAM) -> SealedCard:
        """The own card of the node at an address.

        Args:
            versions: of the protocol: this side's, and the check of the node's.

        Raises:
            OtherProtocol: it speaks another version.
            NodeUnreachable: no node of this fleet answers there.
            FleetError: what it sent proves nothing, or it was revoked.
            PacelineError: as it refused.
        """
        channel = self._dial(address, NODE_NAME, MAX_CARD_MESSAGE_BYTES)
        try:
            return await ask_card(channel, self._identity.root, self._voids, self._clock.wall(), timeout_s, versions)
        except grpc.aio.AioRpcError as error:
            self.refused(error)
            failure = fleet_error_of(error, address)
        finally:
            await channel.close(None)
        # Not from the call's own error: a holder of that holds the call, and with it a channel that dials on though it is closed.
        raise failure

    def discard(self, purpose: Purpose, address: str, member: Member) -> None:
        """Dial anew next time. Ends the calls on it."""
        found = self._open.pop((purpose, address, member.serial), None)
        if found is not None:
            self._end(found)

    def drop(self, node_id: NodeId, issued_to: int | None = None) -> None:
        """Close everything to a node that is gone; with `issued_to`, where its certificate was issued up to then."""
        for key, found in list(self._open.items()):
            if found.member.node_id == node_id and (issued_to is None or found.member.issued_at <= issued_to):
                self._end(self._open.pop(key))

    def __len__(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        """End every call and close every channel."""
        for found in self._open.values():
            self._end(found)
        self._open.clear()
        await asyncio.gather(*self._closing)

    def _dial(self, address: str, tls_name: str, most_bytes: int) -> grpc.aio.Channel:
        """A channel that takes messages of so many bytes."""
        options = [option for option in CHANNEL_OPTIONS if option[0] != RECEIVE]
        options += [(RECEIVE, most_bytes), ("grpc.ssl_target_name_override", tls_name)]
        if self._credentials[0] is not self._identity.member:
            self._credentials = self._identity.member, channel_credentials(self._identity)
        return grpc.aio.secure_channel(address, self._credentials[1], options)

    def _end(self, found: _Open) -> None:
        self._closing.start(found.channel.close(None))
