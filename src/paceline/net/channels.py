"""mTLS channels to members, kept while they are used: one for each purpose, address and expected certificate.

Exchanges and long streams have separate channels. The channel of an exchange that timed out is closed and dialled again, because TCP recovers long after
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
from paceline.fleet.eligibility import Voids
from paceline.net.exchange_codec import MAX_EXCHANGE_BYTES
from paceline.net.protocol import PROGRAM, Versions
from paceline.net.rpc_faults import fleet_error_of
from paceline.net.trust.certificates import NODE_NAME, Member
from paceline.net.trust.credentials import ask_card, channel_credentials, check_callable
from paceline.net.trust.identity import Identity

MAX_CHANNELS = 512
"""Maximum number of open channels; the one used longest ago is closed."""
MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of an answer; a view may have 256 cards of 16 KB. Requests are bounded by method (`server.REQUESTS`). Raising it: one message can make a
node hold more memory."""
MAX_CARD_MESSAGE_BYTES = 128 << 10
"""Maximum size of an answer to a request for a node's card, before its certificate is known."""
MAX_BLOCK_BYTES = 64 << 10
"""Maximum size of a message from a node that drafts. A block with branches takes about 20 KB at most, and a larger message would block this node while it
is read."""
KEEPALIVE_S = 10
"""Seconds of silence in a call until the other side is pinged. Raising it: the streams of a machine that lost its power hang for longer."""
KEEPALIVE_TIMEOUT_S = 5
PING_TIMEOUT_S = 20
"""Seconds until a connection is closed because a ping, also one that measures the link, got no answer. A ping waits behind the data that was sent before
it. Raising it: dead connections stay open for longer; lowering it: transfers over slow links are ended."""

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
    ("grpc.enable_http_proxy", 0),  # the fleet is on this network, never behind a company's proxy
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which also bounds one attempt: four round trips on a slow link
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise a new channel would share the old one's connection, even a dead one.
    ("grpc.use_local_subchannel_pool", 1),
]


class Purpose(StrEnum):
    """The use of a channel. Calls of one purpose to an address fail together."""

    EXCHANGE = "exchange"
    STREAM = "stream"
    MEASURE = "measure"
    WEIGHTS = "weights"
    DRAFTS = "drafts"


MOST_BYTES = {Purpose.EXCHANGE: MAX_EXCHANGE_BYTES, Purpose.DRAFTS: MAX_BLOCK_BYTES}
"""Maximum size of one message for purposes with a bound below `MAX_MESSAGE_BYTES`."""


@dataclass(frozen=True, slots=True)
class _Open:
    channel: grpc.aio.Channel
    member: Member


class ChannelPool:
    """The channels of one node, on one event loop. Close the pool when done.

    Args:
        refused: called with the error of every exchange and every request for a card that failed.
        check_age: raises NotTrusted if the known revocations are too old for anything but an exchange, which brings newer ones.
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
        """Return a channel on which only `member` can answer. It is dialled with its first call.

        Raises:
            RevokedNode: the member was revoked.
            NotTrusted: the known revocations are too old.
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
        """Ask the node at an address for its card, and return the member that its certificate names.

        Raises:
            PacelineError: as `card_at`.
        """
        return self._identity.root.member((await self.card_at(address, timeout_s)).certificate, self._clock.wall())

    async def card_at(self, address: str, timeout_s: float, versions: Versions = PROGRAM) -> SealedCard:
        """Ask the node at an address for its own card, and return it checked.

        Args:
            versions: the protocol version of this node, and the check of the other node's version.

        Raises:
            OtherProtocol: the node speaks another version.
            NodeUnreachable: no node of this fleet answers there.
            FleetError: the signature does not hold, or the node was revoked.
            PacelineError: the error with which the node refused.
        """
        channel = self._dial(address, NODE_NAME, MAX_CARD_MESSAGE_BYTES)
        try:
            return await ask_card(channel, self._identity.root, self._voids, self._clock.wall(), timeout_s, versions)
        except grpc.aio.AioRpcError as error:
            self.refused(error)
            failure = fleet_error_of(error, address)
        finally:
            await channel.close(None)
        # Not raised from the call's own error: that error keeps the call alive, and with it a channel that goes on dialling though it is closed.
        raise failure

    def discard(self, purpose: Purpose, address: str, member: Member) -> None:
        """Close a channel and end the calls on it. The next `get` dials again."""
        found = self._open.pop((purpose, address, member.serial), None)
        if found is not None:
            self._end(found)

    def drop(self, node_id: NodeId, issued_to: int | None = None) -> None:
        """Close all channels to a node that is gone.

        Args:
            issued_to: Unix seconds; if given, only channels with a certificate issued up to then are closed.
        """
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
        """Return a new channel that receives messages of up to `most_bytes` bytes."""
        options = [option for option in CHANNEL_OPTIONS if option[0] != RECEIVE]
        options += [(RECEIVE, most_bytes), ("grpc.ssl_target_name_override", tls_name)]
        if self._credentials[0] is not self._identity.member:
            self._credentials = self._identity.member, channel_credentials(self._identity)
        return grpc.aio.secure_channel(address, self._credentials[1], options)

    def _end(self, found: _Open) -> None:
        self._closing.start(found.channel.close(None))
