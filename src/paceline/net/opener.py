"""Opens what peers pass on: checks each signature once, and knows the certificates that cards may come without."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import FleetError
from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard, SealedList, SealedRevocation
from paceline.net.exchange_codec import node_id_of
from paceline.net.trust.certificates import FleetRoot, Member
from paceline.net.trust.seals import Voids, open_card, open_list, open_revocation
from paceline.net.wire import fleet_pb2 as wire

REVOCATIONS_REMEMBERED = 4096
"""All that a message may hold: a peer that lacks one sends them all, each time."""
K = TypeVar("K")
V = TypeVar("V")


class MemberOpener:
    """A `exchange_codec.Opener`.

    Args:
        lacks: told whose card came without a certificate that fits, so that it is asked for.
        remembered: cards and certificates kept; those used longest ago are forgotten.
    """

    def __init__(self, root: FleetRoot, voids: Voids, lacks: Callable[[NodeId], None], clock: Clock, remembered: int = 1024) -> None:
        self._root, self._voids, self._lacks, self._clock, self._remembered = root, voids, lacks, clock, remembered
        self._certificates: OrderedDict[NodeId, SealedCard] = OrderedDict()
        self._revocations: OrderedDict[bytes, SealedRevocation] = OrderedDict()
        self._list: tuple[bytes, SealedList] | None = None
        self._opened: OrderedDict[bytes, SealedCard] = OrderedDict()
        """By hash: what comes by several ways, or again and again, costs one check."""

    def card(self, signed: wire.SignedCard) -> SealedCard:
        """A card, once certain.

        Raises:
            FleetError: it proves nothing.
        """
        key = hashlib.sha256(signed.SerializeToString(deterministic=True)).digest()
        known = self._opened.get(key)
        if known is not None and not self._voids(known.card.node_id, known.issued_at):
            self._opened.move_to_end(key)
            return known
        claimed = node_id_of(signed)
        by = self._certificates.get(claimed) if claimed is not None else None
        held = b"" if signed.certificate or by is None else by.certificate
        try:
            sealed = open_card(signed, root=self._root, voids=self._voids, now=self._clock.wall(), held=held)
        except FleetError:
            if not signed.certificate and claimed is not None:
                self._lacks(claimed)
            raise
        _keep(self._opened, key, sealed, self._remembered)
        self.know(sealed)
        return sealed

    def revocation(self, signed: wire.SignedRevocation) -> SealedRevocation:
        """A revocation, once certain.

        Raises:
            FleetError: it proves nothing.
        """
        key = hashlib.sha256(signed.SerializeToString(deterministic=True)).digest()
        known = self._revocations.get(key)
        if known is None:
            known = open_revocation(signed, self._root)
            _keep(self._revocations, key, known, REVOCATIONS_REMEMBERED)
        return known

    def revocation_list(self, signed: wire.SignedRevocationList) -> SealedList:
        """The same of a list of them, which comes with every exchange.

        Raises:
            FleetError: it proves nothing.
        """
        key = signed.SerializeToString(deterministic=True)
        if self._list is None or self._list[0] != key:
            self._list = key, open_list(signed, self._root, self._clock.wall())
        return self._list[1]

    def know(self, sealed: SealedCard) -> None:
        """Remember a card's certificate, unless a newer one is known: an old card with the old one may come at any time."""
        known = self._certificates.get(sealed.card.node_id)
        if known is None or known.issued_at <= sealed.issued_at:
            _keep(self._certificates, sealed.card.node_id, sealed, self._remembered)

    def met(self, sealed: SealedCard) -> Member:
        """The node that showed its own card, by a certificate that may be newer than the one that is known.

        Raises:
            NotTrusted: it has expired.
        """
        self.know(sealed)
        return self._root.member(sealed.certificate, self._clock.wall())

    def member(self, node_id: NodeId) -> Member | None:
        """Whom to meet where a node is; None where its certificate is not known.

        Raises:
            NotTrusted: it has expired.
        """
        known = self._certificates.get(node_id)
        return None if known is None else self._root.member(known.certificate, self._clock.wall())

    def proven(self, node_id: NodeId) -> Member:
        """The same, of a node that is to be called.

        Raises:
            FleetError: its certificate is not known, or not good any more.
        """
        member = self.member(node_id)
        if member is None:
            raise FleetError(f"Nothing proves who {node_id} is")
        return member


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
