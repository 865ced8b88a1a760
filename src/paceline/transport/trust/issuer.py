"""The node that holds the CA: hands out join tokens, lets machines in by them, and revokes nodes.

A token is good for a number of joins until it expires by this machine's clock. State is on disk before an answer leaves, so a restart
forgives nothing: a nonce that was used stays used, a spent token stays spent. An id, once issued, is another key's only after it was revoked.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from paceline.core.clock import Clock
from paceline.core.errors import IdentityError, JoinRefused, MembershipError
from paceline.core.ids import NodeId
from paceline.core.trust import Trust
from paceline.fleet.card import Revocation, SealedRevocation
from paceline.fleet.revocations import Revocations
from paceline.transport.trust.authority import Authority
from paceline.transport.trust.certificates import PublicKey
from paceline.transport.trust.folder import FleetFolder
from paceline.transport.trust.requests import open_request
from paceline.transport.trust.seals import open_revocations, sign_revocation
from paceline.transport.trust.tokens import ID_BYTES, NONCE_BYTES, PROOF_BYTES, SECRET_BYTES, JoinToken, proves

ANOTHER = "Ask for another: paceline token, on the machine where paceline init ran"
JOIN_PORT = 8155
KEEP_EXPIRED_S = 7 * 86400
"""So long an expired token is told from one that never was."""


@dataclass(slots=True)
class _Token:
    token_id: str
    secret: str
    expires_at: float
    uses_left: int
    nonces: list[str]
    trust: Trust
    """Of those who join by it."""


@dataclass(slots=True)
class _Issued:
    """To whom an id was given."""

    key: str
    """SHA-256 of the public key."""
    at: int


@dataclass(slots=True)
class _State:
    """What is on disk."""

    tokens: dict[str, _Token]
    issued: dict[NodeId, _Issued]
    join_port: int


@dataclass(frozen=True, slots=True)
class JoinAttempt:
    """What a joiner sent."""

    request: bytes
    token_id: str
    """Hexadecimal."""
    proof: bytes
    nonce: bytes


class Issuer:
    """The CA at work. Every call reads and writes the folder under its lock, so several processes may have one.

    Args:
        clock: whose wall time rules expiry.
    """

    def __init__(self, authority: Authority, folder: FleetFolder, clock: Clock) -> None:
        self.authority = authority
        self._folder, self._clock = folder, clock

    def mint(self, addresses: Iterable[str], *, ttl_s: float, uses: int, trust: Trust = Trust.MEMBER) -> JoinToken:
        """A new token. A machine that joins by it is trusted so far; the token itself does not say so, and no holder can change it.

        Raises:
            MembershipError: the state can't be kept.
        """
        token = JoinToken(
            tuple(addresses), self.authority.root.fingerprint, secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        )
        with self._folder.locked():
            state = self._load()
            expires_at = self._clock.wall() + ttl_s
            state.tokens[token.token_id.hex()] = _Token(token.token_id.hex(), token.secret.hex(), expires_at, uses, [], trust)
            self._keep(state)
        return token

    def open_until(self) -> float | None:
        """Until when (wall clock) some token may be used; None where none may."""
        return max((token.expires_at for token in self._load().tokens.values() if self._is_live(token)), default=None)

    def is_live(self, token: JoinToken) -> bool:
        """Whether a token can still be used."""
        held = self._load().tokens.get(token.token_id.hex())
        return held is not None and self._is_live(held)

    @property
    def join_port(self) -> int:
        """Where machines join."""
        return self._load().join_port

    def set_join_port(self, port: int) -> None:
        """Another port, for tokens from now on."""
        with self._folder.locked():
            state = self._load()
            state.join_port = port
            self._keep(state)

    def admit(self, attempt: JoinAttempt, here: Collection[NodeId] = ()) -> tuple[NodeId, bytes]:
        """Let a machine in: its id and its certificate (DER).

        Args:
            attempt: what it sent.
            here: ids of members that are known otherwise: a CA that was brought here does not know to whom it issued before.

        Raises:
            JoinRefused: the token is unknown, expired or spent, the proof is wrong, the nonce was used, or the id is another's.
            NotTrusted: what it sent is no certificate request.
        """
        if len(attempt.token_id) != 2 * ID_BYTES or len(attempt.proof) != PROOF_BYTES or len(attempt.nonce) != NONCE_BYTES:
            raise JoinRefused("The join request is not one of this version's", "Use the same version of Paceline on all machines")
        with self._folder.locked():
            state = self._load()
            token = state.tokens.get(attempt.token_id)
            # Why a token is refused is told only to those who hold it.
            if token is None or not _proves(token, attempt):
                raise JoinRefused("The token is not known here", ANOTHER)
            if attempt.nonce.hex() in token.nonces:
                raise JoinRefused("The join request is a replay: it was answered before", "Run paceline join again")
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
            certificate = self.authority.issue(attempt.request, node_id, self._clock.wall(), after=voided_to, trust=token.trust)
            state.issued[node_id] = self._issued(certificate)
            token.uses_left -= 1
            token.nonces.append(attempt.nonce.hex())
            self._keep(state)
        return node_id, certificate

    def issue_own(self, request: bytes, node_id: NodeId) -> bytes:
        """A certificate for the node that holds the CA: no node is trusted more."""
        certificate = self.authority.issue(request, node_id, self._clock.wall(), trust=Trust.TRUSTED)
        with self._folder.locked():
            state = self._load()
            state.issued[node_id] = self._issued(certificate)
            self._keep(state)
        return certificate

    def issued(self) -> tuple[NodeId, ...]:
        """Ids that certificates are known here to have been issued to."""
        return tuple(sorted(self._load().issued))

    def issued_at(self, node_id: NodeId) -> int | None:
        """When a node's last certificate was issued; None where none is known of."""
        held = self._load().issued.get(node_id)
        return held.at if held else None

    def revoke(self, node_id: NodeId) -> SealedRevocation:
        """Void every certificate of a node. Known to this machine at once; to the others as gossip goes."""
        with self._folder.locked():
            held = self._load().issued.get(node_id)
            now = int(self._clock.wall())
            not_after = max(now, held.at if held else 0, self._voided_to(node_id))
        sealed = sign_revocation(self.authority, Revocation(node_id, now, not_after))
        self._folder.keep_revocations([sealed.sealed])
        return sealed

    def _voided_to(self, node_id: NodeId) -> int:
        """Certificates of a node issued up to here are void; 0 where it was never revoked."""
        known = Revocations(open_revocations(self._folder.sealed_revocations(), self.authority.root)).all()
        return max((sealed.revocation.not_after for sealed in known if sealed.revocation.node_id == node_id), default=0)

    def _is_live(self, token: _Token) -> bool:
        return token.uses_left > 0 and token.expires_at > self._clock.wall()

    def _issued(self, certificate: bytes) -> _Issued:
        member = self.authority.root.member(certificate, self._clock.wall())
        return _Issued(_digest(member.public_key), member.issued_at)

    def _load(self) -> _State:
        kept = self._folder.issuer_state()
        try:
            tokens = {
                token_id: _Token(
                    token_id,
                    str(one["secret"]),
                    float(one["expires_at"]),
                    int(one["uses_left"]),
                    list(map(str, one["nonces"])),
                    Trust(one.get("trust", Trust.MEMBER)),
                )
                for token_id, one in dict[str, Any](kept.get("tokens", {})).items()
            }
            issued = {
                NodeId(node_id): _Issued(str(one["key"]), int(one["at"])) for node_id, one in dict[str, Any](kept.get("issued", {})).items()
            }
            return _State(tokens, issued, int(kept.get("join_port", JOIN_PORT)))
        except (KeyError, TypeError, ValueError) as error:
            raise IdentityError(
                "The issuer's state (issuer.json) is damaged", "Remove it; tokens handed out so far are void then"
            ) from error

    def _keep(self, state: _State) -> None:
        forget = self._clock.wall() - KEEP_EXPIRED_S
        self._folder.keep_issuer_state(
            {
                "join_port": state.join_port,
                "tokens": {
                    token.token_id: {
                        "secret": token.secret,
                        "expires_at": token.expires_at,
                        "uses_left": token.uses_left,
                        "nonces": token.nonces,
                        "trust": str(token.trust),
                    }
                    for token in state.tokens.values()
                    if token.expires_at > forget
                },
                "issued": {node_id: {"key": one.key, "at": one.at} for node_id, one in sorted(state.issued.items())},
            }
        )


def _proves(token: _Token, attempt: JoinAttempt) -> bool:
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
