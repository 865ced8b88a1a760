"""The issuer on the node that holds the CA. It makes join tokens, admits machines by them, renews certificates and revokes nodes.

A token is valid for a number of joins, until it expires by this machine's clock. State is on disk before an answer leaves, so a used nonce stays used
and a spent token stays spent after a restart. An id that was issued goes to another key only after it was revoked.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from paceline.core.clock import Clock
from paceline.core.errors import GossipRefused, JoinRefused, MembershipError, NotTrusted, RevokedNode
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import Revocation, RevocationList, SealedList, SealedRevocation
from paceline.fleet.eligibility import Revocations
from paceline.fleet.registry import CLOCKS_APART_S
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.authority import CertificateAuthority
from paceline.net.trust.certificates import Member, open_request
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.seals import AHEAD_S, open_revocations, sign_list, sign_revocation
from paceline.net.trust.signing import PublicKey
from paceline.net.trust.tokens import (
    ID_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    HeldToken,
    Issued,
    IssuerState,
    JoinToken,
    keep_state,
    proves,
    read_state,
)

ANOTHER = "Ask for another: paceline token, on the machine where paceline init ran"
RENEW_BELOW_S = 300 * 86400.0
"""Seconds left of a certificate's year below which its node asks for the next one. Raising it: the CA signs more often; lowering it: the CA's node must be
up more often."""
RENEW_EVERY_S = 300.0
"""Seconds between two renewals of one node; each costs a signature and a write to disk. Raising it: a node that did not get its answer waits longer for
another."""


@dataclass(frozen=True, slots=True)
class OpenToken:
    """A token by which machines may still join, without its secret."""

    token_id: str
    trust: Trust
    uses_left: int
    expires_at: float
    joined: tuple[NodeId, ...]
    """Nodes that joined by this token so far."""


@dataclass(frozen=True, slots=True)
class JoinAttempt:
    request: bytes
    token_id: str
    """Hexadecimal."""
    proof: bytes
    nonce: bytes
    protocol: int = PROTOCOL_VERSION


class Issuer:
    """The CA and its records. Every change reads and writes the folder under its lock, so several processes may each have an issuer.

    Args:
        clock: its wall time decides about expiry.
    """

    def __init__(self, authority: CertificateAuthority, folder: FleetFolder, clock: Clock) -> None:
        self.authority = authority
        self._folder, self._clock = folder, clock

    def mint(self, addresses: Iterable[str], *, ttl_s: float, uses: int, trust: Trust = Trust.MEMBER) -> JoinToken:
        """Make a new token. A machine that joins by it gets `trust`, which is recorded here and not in the token, so that no holder can change it.

        Raises:
            MembershipError: the state can't be written.
        """
        token = JoinToken(tuple(addresses), self.authority.root.pin, secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
        with self._changing() as state:
            expires_at = self._clock.wall() + ttl_s
            state.tokens[token.token_id.hex()] = HeldToken(token.token_id.hex(), token.secret.hex(), expires_at, uses, [], trust)
        return token

    def open_until(self) -> float | None:
        """Return the time (Unix seconds) until which some token can be used; None if none can."""
        return max((token.expires_at for token in self._load().tokens.values() if self._is_live(token)), default=None)

    def is_live(self, token: JoinToken) -> bool:
        held = self._load().tokens.get(token.token_id.hex())
        return held is not None and self._is_live(held)

    def open_tokens(self) -> tuple[OpenToken, ...]:
        """Return the tokens that can still be used, in order of expiry."""
        state = self._load()
        return tuple(
            OpenToken(
                token.token_id,
                token.trust,
                token.uses_left,
                token.expires_at,
                tuple(sorted(node_id for node_id, issued in state.issued.items() if issued.token == token.token_id)),
            )
            for token in sorted(state.tokens.values(), key=lambda token: token.expires_at)
            if self._is_live(token)
        )

    def void_tokens(self, token_ids: Collection[str]) -> None:
        """Make tokens invalid, so that no machine joins by them any more."""
        with self._changing() as state:
            for token_id in token_ids:
                state.tokens[token_id].voided = True

    @property
    def join_port(self) -> int:
        return self._load().join_port

    def set_join_port(self, port: int) -> None:
        with self._changing() as state:
            state.join_port = port

    def admit(self, attempt: JoinAttempt, here: Collection[NodeId] = ()) -> tuple[NodeId, bytes]:
        """Admit a machine. Return its id and its certificate (DER).

        Args:
            here: ids of members known from elsewhere. A CA that was imported here has no record of the certificates it issued before.

        Raises:
            JoinRefused: the token is unknown, voided, expired or spent, the proof is wrong, the nonce was used, or the id belongs to another machine.
            NotTrusted: the certificate request is damaged or not signed by its key.
        """
        if len(attempt.token_id) != 2 * ID_BYTES or len(attempt.proof) != PROOF_BYTES or len(attempt.nonce) != NONCE_BYTES:
            raise JoinRefused("The join request is not one of this version's", "Use the same version of Paceline on all machines")
        with self._changing() as state:
            token = state.tokens.get(attempt.token_id)
            # Only a machine that proves to hold the token learns why it is refused.
            if token is None or not _proves(token, attempt):
                raise JoinRefused("The token is not known here", ANOTHER)
            if attempt.protocol != PROTOCOL_VERSION:
                older = "this machine" if attempt.protocol < PROTOCOL_VERSION else "the machine that the token is from"
                raise JoinRefused(
                    f"This machine speaks protocol version {attempt.protocol}, and the fleet version {PROTOCOL_VERSION}",
                    f"Update Paceline on {older}, and join again",
                )
            if attempt.nonce.hex() in token.nonces:
                raise JoinRefused("The join request is a replay: it was answered before", "Run paceline join again")
            if token.voided:
                raise JoinRefused("The token was voided, on the machine that it is from", ANOTHER)
            if token.expires_at <= self._clock.wall():
                raise JoinRefused("The token has expired", ANOTHER)
            if token.uses_left <= 0:
                raise JoinRefused("The token is spent: it was good for a number of machines that have joined", ANOTHER)
            node_id, key = open_request(attempt.request)
            voided_to = self._voided_to(node_id)
            before = state.issued.get(node_id)
            is_others = node_id in here if before is None else before.key != _digest(key) and before.at > voided_to
            if is_others:
                raise JoinRefused(f"The id {node_id} is another machine's", "Run paceline join again: it draws another id")
            if voided_to > self._clock.wall() + AHEAD_S:
                raise JoinRefused(
                    f"The id {node_id} was revoked up to a time that is far ahead: a clock was wrong then, or is now",
                    "Set the clock of the machine with the fleet's CA, or join under another name: paceline join --name NAME",
                )
            certificate = self.authority.issue(attempt.request, node_id, self._clock.wall(), after=voided_to, trust=token.trust)
            state.issued[node_id] = self._issued(certificate, token.token_id)
            token.uses_left -= 1
            token.nonces.append(attempt.nonce.hex())
        return node_id, certificate

    def issue_own(self, request: bytes, node_id: NodeId) -> bytes:
        """Issue a certificate (DER) to the node that holds the CA, with the highest trust."""
        certificate = self.authority.issue(request, node_id, self._clock.wall(), trust=Trust.TRUSTED)
        with self._changing() as state:
            state.issued[node_id] = self._issued(certificate)
        return certificate

    def renew(self, request: bytes, member: Member) -> bytes:
        """Issue a new certificate (DER) to a member that shows a valid one. Name and key stay the same.

        The trust is the one that was last given to the member, even if the shown certificate grants another.

        Raises:
            NotTrusted: the request is for another name or key, or the member was revoked.
            GossipRefused: it is too early, or it was just renewed.
            IdentityError: the state can't be read or written.
        """
        now = self._clock.wall()
        asked, key = open_request(request)
        if asked != member.node_id or key != member.public_key:
            raise NotTrusted(f"{member.node_id} asked for a certificate of another name or key than its own", who=member.node_id)
        if not renewal_is_due(member, now + CLOCKS_APART_S):
            raise GossipRefused(f"The certificate of {member.node_id} holds for long enough")
        with self._changing() as state:
            if member.issued_at <= self._voided_to(member.node_id):
                raise RevokedNode(f"{member.node_id} was revoked", who=member.node_id)
            before = state.issued.get(asked)
            if before is not None and 0 <= now - before.at < RENEW_EVERY_S:  # a time ahead comes from a clock that was set back
                raise GossipRefused(f"The certificate of {member.node_id} was renewed a moment ago")
            trust = (before and before.trust) or member.trust
            certificate = self.authority.issue(request, asked, now, trust=trust)
            state.issued[asked] = self._issued(certificate, before.token if before else "")
        return certificate

    def sign_list(self, digest: bytes, own: NodeId) -> SealedList:
        """Sign that the set of revocations with a digest is complete as of now.

        Args:
            digest: `Revocations.digest` of the revocations that this machine knows.
            own: this node, which holds the CA.
        """
        return sign_list(self.authority, RevocationList(int(self._clock.wall()), digest, own))

    def issued(self) -> tuple[NodeId, ...]:
        """Return the ids to which certificates were issued, as far as this machine knows."""
        return tuple(sorted(self._load().issued))

    def issued_at(self, node_id: NodeId) -> int | None:
        """Return the time (Unix seconds) at which a node's last certificate was issued; None if none is known here."""
        held = self._load().issued.get(node_id)
        return held.at if held else None

    def revoke(self, node_id: NodeId, *, keep_tokens: bool = False) -> SealedRevocation:
        """Revoke every certificate of a node, and void all tokens, because the node may have kept one. Other machines learn it by gossip.

        Args:
            keep_tokens: True to leave the tokens valid.
        """
        with self._changing() as state:
            # Tokens are voided before the revocation is written, so that the node does not join again in between.
            for token in () if keep_tokens else state.tokens.values():
                token.voided = True
            held = state.issued.get(node_id)
            # The revocation must cover the last certificate even if the clock was set back since.
            at = max(int(self._clock.wall()), held.at if held else 0, self._voided_to(node_id))
        sealed = sign_revocation(self.authority, Revocation(node_id, at, at))
        self._folder.keep_revocations([sealed.sealed])
        return sealed

    def _voided_to(self, node_id: NodeId) -> int:
        """Return the time (Unix seconds) up to which certificates of a node are revoked; 0 if it never was."""
        known = Revocations(open_revocations(self._folder.sealed_revocations(), self.authority.root)).all()
        return max((sealed.revocation.not_after for sealed in known if sealed.revocation.node_id == node_id), default=0)

    def _is_live(self, token: HeldToken) -> bool:
        return not token.voided and token.uses_left > 0 and token.expires_at > self._clock.wall()

    def _issued(self, certificate: bytes, token_id: str = "") -> Issued:
        member = self.authority.root.member(certificate, self._clock.wall())
        return Issued(_digest(member.public_key), member.issued_at, token_id, member.trust)

    def _load(self) -> IssuerState:
        return read_state(self._folder)

    @contextmanager
    def _changing(self) -> Generator[IssuerState]:
        """Yield the state under the folder's lock, and write it to disk after the block unless the block raises."""
        with self._folder.locked():
            state = self._load()
            yield state
            keep_state(self._folder, state, self._clock.wall())


def renewal_is_due(member: Member, now: float) -> bool:
    """Return True if a certificate should be renewed at `now` (Unix seconds). It is enough if the CA's node is up once in ten months."""
    return member.expires_at - now < RENEW_BELOW_S


def _proves(token: HeldToken, attempt: JoinAttempt) -> bool:
    return proves(attempt.proof, bytes.fromhex(token.secret), bytes.fromhex(token.token_id), attempt.request, attempt.nonce)


def check_id(node_id: str, known: tuple[NodeId, ...], own: NodeId) -> NodeId:
    """Return the id of a node to revoke, after its check.

    Args:
        known: ids to which certificates were issued.
        own: this node.

    Raises:
        MembershipError: no certificate was issued to the node, or it is this one.
    """
    if node_id == own:
        raise MembershipError(
            f"{node_id} is this machine, which holds the fleet's CA", "To end the fleet, remove its files on every machine"
        )
    if node_id not in known:
        others = ", ".join(one for one in known if one != own) or "none yet"
        raise MembershipError(
            f"No certificate was issued to {node_id}, as far as this machine knows",
            f"Issued to: {others}. To one that another machine let in: paceline revoke NODE --anyway",
        )
    return NodeId(node_id)


def _digest(key: PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
