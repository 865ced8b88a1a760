"""What a peer may send and gossip may hold. Beyond it a message is refused with a typed error, before anything in it is looked at.

Transport calls `Gossip.admit` with a message's measures before it checks a signature: refusing costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import MessageTooLarge


@dataclass(frozen=True, slots=True)
class Measures:
    """How large a request is, counted without decoding cards."""

    digests: int = 0
    stamps: int = 0
    cards: int = 0
    largest_card_bytes: int = 0
    """Card, signature and certificate."""
    revocations: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Raising any of these costs memory in proportion, on every node."""

    max_nodes: int = 256
    """Ids the registry holds. A card of one more is ignored."""
    max_card_bytes: int = 16384
    """Card, signature and certificate; a card with ten models and twenty links has some 3 KB."""
    max_cards: int = 256
    """Cards in one message; the rest follow in the next call."""
    max_message_bytes: int = 1 << 20
    """Of cards in one message; the rest follow in the next call, as above."""
    max_revocations: int = 4096
    """Revocations in one message. The set itself only grows by the CA's word."""
    burst: int = 32
    """Requests one peer may send at once; one more is earned every `exchange_s / burst`."""

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many cards, of so many bytes each and in this order, go into one message. The first one always does."""
        filled = 0
        for count, size in enumerate(sizes[: self.max_cards]):
            filled += size
            if count and filled > self.max_message_bytes:
                return count
        return min(len(sizes), self.max_cards)

    def check(self, measures: Measures) -> None:
        """Raise `MessageTooLarge` where a request exceeds a bound."""
        for what, size, most in (
            ("digests", measures.digests, self.max_nodes),
            ("stamps", measures.stamps, self.max_nodes),
            ("cards", measures.cards, self.max_cards),
            ("bytes in one card", measures.largest_card_bytes, self.max_card_bytes),
            ("revocations", measures.revocations, self.max_revocations),
        ):
            if size > most:
                raise MessageTooLarge(f"a peer sent {size} {what}; the bound is {most}", "All nodes of a fleet need one preset")
