"""Signatures on data that nodes pass on: a card is signed by its own node, a revocation by the CA.

A node that passes a card on can't alter it, and a member can't make a card of another node: the certificate must come from the CA, name exactly the
card's id, and not be revoked. The module `signing` keeps signatures on one kind of data from passing for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc.aio
from google.protobuf.message import DecodeError

from paceline.core.errors import GossipRefused, IdentityError, MalformedMessage, NotTrusted, RevokedNode
from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, Revocation, RevocationList, SealedCard, SealedList, SealedRevocation
from paceline.fleet.eligibility import Voids
from paceline.net.card_codec import check_card, check_size, read_card, write_card
from paceline.net.trust.certificates import FleetRoot, is_node_id
from paceline.net.trust.identity import Identity
from paceline.net.trust.signing import SignedKind, Signs, read_strictly, verifies
from paceline.net.wire import fleet_pb2 as wire

AHEAD_S = 86400
"""Seconds by which a revocation may reach beyond its own time, and a list of revocations may be ahead of this machine's clock. Raising it: a wrong clock of
the CA does more harm; lowering it: machines with wrong clocks refuse valid lists."""
MAX_SIGNATURE_BYTES = 80
MAX_REVOCATION_BYTES = 512
REVOCATION_KEY = "paceline-revocation-bin"
"""Trailing metadata of a refusal with the signed revocation, so that a revoked node need not believe the node that refuses it."""


def _signed_bytes(card: bytes, beat: int) -> bytes:
    """Return the bytes that a node signs. The beat has a fixed length, so no other card and beat make the same bytes."""
    return card + beat.to_bytes(4, "big")


def sign_card(identity: Identity, card: NodeCard, beat: int = 0) -> SealedCard:
    """Sign this node's own card.

    Args:
        beat: number of times that this unchanged card was signed before.

    Raises:
        NotTrusted: the card belongs to another node.
    """
    if card.node_id != identity.node_id:
        raise NotTrusted(f"{identity.node_id} can't sign a card of {card.node_id}", who=identity.node_id)
    data = write_card(card)
    signed = wire.SignedCard(card=data, beat=beat, signature=identity.sign(SignedKind.CARD, _signed_bytes(data, beat)))
    member = identity.member
    return SealedCard(card, signed.SerializeToString(deterministic=True), beat, member.certificate, member.issued_at, member.trust)


def open_card(signed: wire.SignedCard, *, root: FleetRoot, voids: Voids, now: float, held: bytes = b"") -> SealedCard:
    """Return a card that another node signed, after its check.

    Args:
        now: Unix seconds.
        held: the known certificate of the node (DER), for a card that comes without one.

    Raises:
        NotTrusted: the certificate is from another CA, for another node than the card, expired or revoked, or the signature does not fit.
        MalformedMessage: the signed bytes are not a card, or hold values that no node would send.
        MessageTooLarge: the card exceeds its maximum size.
    """
    check_size(signed.card)
    member = root.member(signed.certificate or held, now)
    if voids(member.node_id, member.issued_at):
        raise RevokedNode(f"{member.node_id} was revoked", who=member.node_id)
    if not member.signed(signed.signature, SignedKind.CARD, _signed_bytes(signed.card, signed.beat)):
        raise NotTrusted(f"A card with the certificate of {member.node_id} was not signed by {member.node_id}", who=member.node_id)
    card = read_card(signed.card)
    if card.node_id != member.node_id:
        raise NotTrusted(f"{member.node_id} signed a card in the name of {card.node_id}", who=member.node_id)
    check_card(card)
    sealed = wire.SignedCard(card=signed.card, beat=signed.beat, signature=signed.signature)
    return SealedCard(card, sealed.SerializeToString(deterministic=True), signed.beat, member.certificate, member.issued_at, member.trust)


def sign_revocation(authority: Signs, revocation: Revocation) -> SealedRevocation:
    """Sign a revocation with the CA's key."""
    data = wire.Revocation(
        node_id=revocation.node_id, revoked_at_unix=revocation.revoked_at, not_after_unix=revocation.not_after
    ).SerializeToString(deterministic=True)
    signed = wire.SignedRevocation(revocation=data, signature=authority.sign(SignedKind.REVOCATION, data))
    return SealedRevocation(revocation, signed.SerializeToString(deterministic=True))


def open_revocation(signed: wire.SignedRevocation, root: FleetRoot) -> SealedRevocation:
    """Return a revocation after the check that the CA signed it.

    Raises:
        NotTrusted: the CA did not sign it.
        MalformedMessage: the signed bytes are not a revocation, or hold values that no CA would sign.
    """
    _check_signed("A revocation", SignedKind.REVOCATION, signed.revocation, signed.signature, root)
    said = read_strictly(wire.Revocation, signed.revocation)
    if not is_node_id(said.node_id):
        raise MalformedMessage("A revocation names no node")
    # Not checked by this machine's clock: if an accident or an attacker made it slow, a revoked node would stay a member.
    root.check_time("A revocation", said.revoked_at_unix)
    if not said.revoked_at_unix <= said.not_after_unix <= said.revoked_at_unix + AHEAD_S:
        raise MalformedMessage(f"A revocation of {said.node_id} reaches further than its day")
    sealed = wire.SignedRevocation(revocation=signed.revocation, signature=signed.signature)
    return SealedRevocation(
        Revocation(NodeId(said.node_id), said.revoked_at_unix, said.not_after_unix), sealed.SerializeToString(deterministic=True)
    )


def sign_list(authority: Signs, said: RevocationList) -> SealedList:
    """Sign with the CA's key that a set of revocations is complete."""
    data = wire.RevocationList(signed_at_unix=said.signed_at, digest=said.digest, issuer_node_id=said.issuer).SerializeToString(
        deterministic=True
    )
    signed = wire.SignedRevocationList(list=data, signature=authority.sign(SignedKind.REVOCATION_LIST, data))
    return SealedList(said, signed.SerializeToString(deterministic=True))


def open_list(signed: wire.SignedRevocationList, root: FleetRoot, now: float) -> SealedList:
    """Return a list of revocations after the check that the CA signed it.

    Args:
        now: Unix seconds. A list that the CA signed while its clock was far ahead is refused: it would count as the newest until that time.

    Raises:
        NotTrusted: the CA did not sign it.
        MalformedMessage: the signed bytes are not a list, or hold values that no CA would sign now.
    """
    _check_signed("A list of revocations", SignedKind.REVOCATION_LIST, signed.list, signed.signature, root)
    said = read_strictly(wire.RevocationList, signed.list)
    root.check_time("A list of revocations", said.signed_at_unix)
    if said.signed_at_unix > now + AHEAD_S:
        ahead = (said.signed_at_unix - now) // 86400
        raise MalformedMessage(f"A list of revocations is from {ahead:.0f} days ahead: the CA's clock was wrong, or this machine's is")
    if not is_node_id(said.issuer_node_id):
        raise MalformedMessage("A list of revocations names no node")
    sealed = wire.SignedRevocationList(list=signed.list, signature=signed.signature)
    return SealedList(
        RevocationList(said.signed_at_unix, said.digest, NodeId(said.issuer_node_id)), sealed.SerializeToString(deterministic=True)
    )


def _check_signed(what: str, kind: SignedKind, data: bytes, signature: bytes, root: FleetRoot) -> None:
    """Check that the CA signed `data` as this kind. Raise `MalformedMessage` if it is too long, and `NotTrusted` if the signature does not fit."""
    if len(data) > MAX_REVOCATION_BYTES or len(signature) > MAX_SIGNATURE_BYTES:
        raise MalformedMessage(f"{what} is longer than any of ours")
    if not verifies(root.public_key, signature, kind, data):
        raise NotTrusted(f"{what} was not signed by this fleet's CA", who="CA")


def open_kept_list(kept: bytes | None, root: FleetRoot, now: float) -> SealedList | None:
    """Return the list that was kept on disk; None if none can be read. The next one comes by gossip."""
    try:
        return None if kept is None else open_list(wire.SignedRevocationList.FromString(kept), root, now)
    except (DecodeError, NotTrusted, GossipRefused):
        return None


def revocation_told(failed: grpc.aio.AioRpcError, root: FleetRoot) -> SealedRevocation | None:
    """Return the revocation that came with a refusal; None if none came, or it fails its check."""
    trailing = cast("grpc.aio.Metadata | None", failed.trailing_metadata())
    data = None if trailing is None else trailing.get(REVOCATION_KEY)
    try:
        return open_revocation(wire.SignedRevocation.FromString(data), root) if isinstance(data, bytes) else None
    except (DecodeError, NotTrusted, GossipRefused):
        return None


def open_revocations(kept: Iterable[bytes], root: FleetRoot) -> tuple[SealedRevocation, ...]:
    """Return the revocations that were kept on disk, each after its check.

    Raises:
        IdentityError: one is damaged, or was signed by another CA.
    """
    try:
        return tuple(open_revocation(wire.SignedRevocation.FromString(data), root) for data in kept)
    except (DecodeError, NotTrusted, GossipRefused) as error:
        raise IdentityError(
            "The revocations kept on this machine are damaged",
            "Remove revocations.json from the fleet's folder: other nodes still know them",
        ) from error
