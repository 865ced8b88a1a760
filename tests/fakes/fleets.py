"""A fleet's CA and members without disks: what tests of trust begin with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import NodeCard, Revocation, SealedCard, SealedRevocation
from paceline.fleet.eligibility import Revocations
from paceline.net.trust.authority import Authority
from paceline.net.trust.certificates import make_key, make_request
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import sign_card, sign_revocation


def _new_authority() -> Authority:
    return Authority.create(SystemClock().wall())


@dataclass(slots=True)
class TestFleet:
    """A CA, and whom it let in."""

    __test__: ClassVar[bool] = False
    authority: Authority = field(default_factory=_new_authority)
    clock: SystemClock = field(default_factory=SystemClock)
    revocations: Revocations = field(default_factory=Revocations)

    def member(self, name: str, *, at: float | None = None, trust: Trust = Trust.MEMBER) -> Identity:
        """A new member of that id."""
        now = self.clock.wall()
        key = make_key()
        certificate = self.authority.issue(make_request(key, NodeId(name)), NodeId(name), now if at is None else at, trust=trust)
        return Identity.assemble(key, certificate, self.authority.root, now)

    def revoke(self, name: str) -> SealedRevocation:
        """Void the certificates that a member has now."""
        now = int(self.clock.wall())
        sealed = sign_revocation(self.authority, Revocation(NodeId(name), now, now))
        self.revocations.merge([sealed])
        return sealed


def card_of(identity: Identity, *, version: int = 1, addresses: tuple[str, ...] = ("127.0.0.1:1",)) -> NodeCard:
    """A card with little in it."""
    return NodeCard(identity.node_id, version, addresses, b"instance", 120, 1_800_000_000)


def sealed_card(identity: Identity, *, version: int = 1) -> SealedCard:
    return sign_card(identity, card_of(identity, version=version))
