"""How many bytes gossip's messages have on the wire, without serialising a thousand nodes' worth of them.

Counts fields as fleet.proto packs them, and never less than protobuf makes of them (a test compares). Beyond the message, a unary call costs
some HTTP/2 frames, compressed headers and TLS records: CALL_BYTES, both directions together.
"""

from __future__ import annotations

from paceline.fleet.messages import ExchangeRequest, PassedCard, Reply

CALL_BYTES = 260
DIGEST_BYTES = 8 + 8 + 2
TAG_BYTES = 4
"""Of a field with a length: its number, and a length of up to three bytes."""


def _cards(cards: tuple[PassedCard, ...]) -> int:
    return sum(passed.nbytes + 2 * TAG_BYTES * passed.with_card for passed in cards)


def size(message: ExchangeRequest | Reply) -> int:
    """Bytes of a serialised message, at most a few more than it has, and half of what its call costs besides."""
    total = CALL_BYTES // 2 + len(message.revocations_digest) + TAG_BYTES
    total += sum(len(sealed.sealed) + TAG_BYTES for sealed in message.revocations)
    total += _cards(message.cards)
    digests = message.digests if isinstance(message, ExchangeRequest) else message.wanted
    return total + (len(digests) * DIGEST_BYTES + 4 * TAG_BYTES if digests else 0)
