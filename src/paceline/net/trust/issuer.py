"""The node that holds the CA: hands out join tokens, lets machines in by them, and revokes nodes.

A token is good for a number of joins until it expires by this machine's clock. State is on disk before an answer leaves, so a restart
forgives nothing: a nonce that was used stays used, a spent token stays spent. An id, once issued, is another key's only after it was revoked.
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
"""Left of a certificate's year when its node asks for the next one."""
CLOCKS_APART_S = 86400.0
RENEW_EVERY_S = 300.0
"""Between two renewals of one node: each is a signature of the CA's, and a write that is waited for. Raising it: a node that did not get its answer
waits longer for another."""


@dataclass(frozen=True, slots=True)
class OpenToken:
    """A token that machines may still join by, without what makes it one."""

    token_id: str
    trust: Trust
    uses_left: int
    expires_at: float
    joined: tuple[NodeId, ...]
    """By it, so far."""


@dataclass(frozen=True, slots=True)
class JoinAttempt:
    request: bytes
    token_id: str
    """Hexadecimal."""
    proof: bytes
    nonce: bytes
    protocol: int = PROTOCOL_VERSION


class Issuer:
    """The CA at work. Every call reads and writes the folder under its lock, so several processes may have one.

    Args:
        clock: whose wall time rules expiry.
    """

    def __init__(self, authority: CertificateAuthority, folder: FleetFolder, clock: Clock) -> None:
        self.authority = authority
        self._folder, self._clock = folder, clock

    def mint(self, addresses: Iterable[str], *, ttl_s: float, uses: int, trust: Trust = Trust.MEMBER) -> JoinToken:
        """A new token. A machine that joins by it is trusted so far; the token itself does not say so, and no holder can change it.

        Raises:
            MembershipError: the state can't be kept.
        """
        token = JoinToken(tuple(addresses), self.authority.root.pin, secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
        with self._changing() as state:
            expires_at = self._clock.wall() + ttl_s
            state.tokens[token.token_id.hex()] = HeldToken(token.token_id.hex(), token.secret.hex(), expires_at, uses, [], trust)
        return token

    def open_until(self) -> float | None:
        """Until when (wall clock) some token may be used; None where none may."""
        return max((token.expires_at for token in self._load().tokens.values() if self._is_live(token)), default=None)

    def is_live(self, token: JoinToken) -> bool:
        held = self._load().tokens.get(token.token_id.hex())
        return held is not None and self._is_live(held)

    def open_tokens(self) -> tuple[OpenToken, ...]:
        """Those that can still be used, the one that expires first before the others."""
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
        """No machine joins by them any more."""
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
        """Let a machine in: its id and its certificate (DER).

        Args:
            here: ids of members that are known otherwise: a CA that was brought here does not know to whom it issued before.

        Raises:
            JoinRefused: the token is unknown, expired or spent, the proof is wrong, the nonce was used, or the id is another's.
            NotTrusted: what it sent is no certificate request.
        """
        if len(attempt.token_id) != 2 * ID_BYTES or len(attempt.proof) != PROOF_BYTES or len(attempt.nonce) != NONCE_BYTES:
            raise JoinRefused("The join request is not one of this version's", "Use the same version of Paceline on all machines")
        with self._changing() as state:
            token = state.tokens.get(attempt.token_id)
            # Why a token is refused is told only to those who hold it.
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
        """A certificate for the node that holds the CA: no node is trusted more."""
        certificate = self.authority.issue(request, node_id, self._clock.wall(), trust=Trust.TRUSTED)
        with self._changing() as state:
            state.issued[node_id] = self._issued(certificate)
        return certificate

    def renew(self, request: bytes, member: Member) -> bytes:
        """A new certificate (DER) for a member that shows a good one: for its name, its key, and the trust that it was given last, whatever
        the one that it shows says.

        Raises:
            NotTrusted: the request is for another name or key, or the member was revoked.
            GossipRefused: it is too early, or it was just renewed.
            IdentityError: the state can't be read or kept.
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
            if before is not None and 0 <= now - before.at < RENEW_EVERY_S:  # a time ahead is of a clock that was set back
                raise GossipRefused(f"The certificate of {member.node_id} was renewed a moment ago")
            trust = (before and before.trust) or member.trust
            certificate = self.authority.issue(request, asked, now, trust=trust)
            state.issued[asked] = self._issued(certificate, before.token if before else "")
        return certificate

    def sign_list(self, digest: bytes, own: NodeId) -> SealedList:
        """The CA's word that the revocations with that digest are all, as of now.

        Args:
            digest: of those that this machine knows.
            own: this node, which holds the CA.
        """
        return sign_list(self.authority, RevocationList(int(self._clock.wall()), digest, own))

    def issued(self) -> tuple[NodeId, ...]:
        """Ids that certificates are known here to have been issued to."""
        return tuple(sorted(self._load().issued))

    def issued_at(self, node_id: NodeId) -> int | None:
        """When a node's last certificate was issued; None where none is known of."""
        held = self._load().issued.get(node_id)
        return held.at if held else None

    def revoke(self, node_id: NodeId, *, keep_tokens: bool = False) -> SealedRevocation:
        """Void every certificate of a node, and all tokens: it may have kept one. Known to this machine at once; to the others as gossip goes."""
        with self._changing() as state:
            # Before the revocation is kept, so that the node does not join anew in between.
            for token in () if keep_tokens else state.tokens.values():
                token.voided = True
            held = state.issued.get(node_id)
            # Clocks go back: it reaches the last certificate all the same.
            at = max(int(self._clock.wall()), held.at if held else 0, self._voided_to(node_id))
        sealed = sign_revocation(self.authority, Revocation(node_id, at, at))
        self._folder.keep_revocations([sealed.sealed])
        return sealed

    def _voided_to(self, node_id: NodeId) -> int:
        """Certificates of a node issued up to here are void; 0 where it was never revoked."""
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
        """What is kept, under the folder's lock: as the block leaves it, unless that raises."""
        with self._folder.locked():
            state = self._load()
            yield state
            keep_state(self._folder, state, self._clock.wall())


def renewal_is_due(member: Member, now: float) -> bool:
    """Whether a certificate should be made anew. A CA that is up once in ten months is enough."""
    return member.expires_at - now < RENEW_BELOW_S


def _proves(token: HeldToken, attempt: JoinAttempt) -> bool:
    return proves(attempt.proof, bytes.fromhex(token.secret), bytes.fromhex(token.token_id), attempt.request, attempt.nonce)


def check_id(node_id: str, known: tuple[NodeId, ...], own: NodeId) -> NodeId:
    """The node to revoke.

    Raises:
        MembershipError: no certificate was issued to it, or it is this node.
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
