"""Who no longer belongs. The set only grows, by the CA's word: per node, the revocation that reaches furthest. Merging is a join.

A revocation voids certificates issued up to its `not_after`; a certificate issued later under the same id is good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from paceline.core.ids import NodeId
from paceline.fleet.card import SealedList, SealedRevocation


class Revocations:
    """The set of revocations a node knows."""

    def __init__(self, known: Iterable[SealedRevocation] = ()) -> None:
        self._by_id: dict[NodeId, SealedRevocation] = {}
        self._digest = b""
        self._complete: SealedList | None = None
        self.merge(known)

    def merge(self, revocations: Iterable[SealedRevocation]) -> tuple[SealedRevocation, ...]:
        """Take what reaches further than what is held; returns what was new. Signatures were checked by the caller."""
        new: list[SealedRevocation] = []
        for sealed in revocations:
            held = self._by_id.get(sealed.revocation.node_id)
            if held is None or _reach(held) < _reach(sealed):
                self._by_id[sealed.revocation.node_id] = sealed
                new.append(sealed)
        if new:
            digest = hashlib.sha256()
            for sealed in self.all():
                digest.update(len(sealed.sealed).to_bytes(4, "big") + sealed.sealed)
            self._digest = digest.digest()[:16]
        return tuple(new)

    def complete(self, said: SealedList | None) -> bool:
        """Take the CA's word that this very set is all there is, if that is newer than what is held; returns whether it was."""
        if said is None or said.said.digest != self._digest or (self._complete and said.said.signed_at <= self._complete.said.signed_at):
            return False
        self._complete = said
        return True

    @property
    def completed(self) -> SealedList | None:
        """The newest such word: since then nothing is known to be missing. It holds for what was added later too."""
        return self._complete

    def voids(self, node_id: NodeId, issued_at: int) -> bool:
        """Whether a certificate of `node_id`, issued at `issued_at` (Unix seconds), is void."""
        held = self._by_id.get(node_id)
        return held is not None and issued_at <= held.revocation.not_after

    def all(self) -> tuple[SealedRevocation, ...]:
        """Every revocation, by node id."""
        return tuple(self._by_id[node_id] for node_id in sorted(self._by_id))

    @property
    def digest(self) -> bytes:
        """Equal for equal sets; empty for the empty one."""
        return self._digest

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._by_id))

    def __len__(self) -> int:
        return len(self._by_id)


def _reach(sealed: SealedRevocation) -> tuple[int, bytes]:
    """Greater wins. The bytes break ties, so that every node keeps the same one."""
    return sealed.revocation.not_after, sealed.sealed
