"""Trust that stays fresh: certificates that renew themselves, and revocations of which a node knows how old its knowledge is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop, make_node, running, until, until_seen

from paceline.core.errors import FleetError, GossipRefused, IdentityError, MalformedMessage, MembershipError, NotTrusted, RevokedNode
from paceline.core.ids import NodeId
from paceline.fleet.card import RevocationList, SealedList
from paceline.fleet.eligibility import Use
from paceline.net.channels import Purpose
from paceline.net.member.state import OLD_S
from paceline.net.trust.authority import NODE_HOLDS, Authority, AuthorityProcess
from paceline.net.trust.certificates import make_key, make_request
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import RENEW_BELOW_S, RENEW_EVERY_S, Issuer
from paceline.net.trust.seals import open_kept_list, open_list, sign_list
from paceline.net.trust.signing import SignedKind
from paceline.net.wire import fleet_pb2 as wire

DAY_S = 86400.0


def old_fleet() -> TestFleet:
    return TestFleet(Authority.create(time.time() - NODE_HOLDS.total_seconds()))


def holds_authority(fleet: TestFleet, folder: FleetFolder) -> None:
    folder.write_secret(folder.authority_file, fleet.authority.to_pem())


@in_loop
async def test_a_certificate_renews_itself_at_the_node_with_the_ca(tmp_path: Path) -> None:
    fleet = old_fleet()
    # Issued a hundred days ago.
    ago = time.time() - 100 * DAY_S
    folder = FleetFolder(tmp_path / "b" / "fleet")
    folder.write_secret(folder.identity_file, fleet.member("b", at=ago).to_pem())
    a = make_node(fleet, tmp_path, "a")
    holds_authority(fleet, FleetFolder(tmp_path / "a" / "fleet"))
    before = folder.identity().member
    async with running(a), running(b := make_node(fleet, tmp_path, "b", a)):
        await until_seen(a, "a", "b")
        # The very object changes: whoever holds this identity has the new certificate.
        await until(lambda: b.identity.member.serial != before.serial)
        await until(lambda: folder.identity().member == b.identity.member)
        assert b.identity.member.expires_at - time.time() > RENEW_BELOW_S
        assert b.identity.member.trust is before.trust
        # The new one is what it shows, and what others hold of it.
        await until(lambda: (known := a.gossip.opener.member(NodeId("b"))) is not None and known.serial == b.identity.member.serial)
        met = await a.pool.meet(b.addresses[0], 30)
        assert met.serial == b.identity.member.serial


@in_loop
async def test_a_renewed_certificate_that_can_not_be_kept_is_used_and_kept_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = old_fleet()
    folder = FleetFolder(tmp_path / "b" / "fleet")
    folder.write_secret(folder.identity_file, fleet.member("b", at=time.time() - 100 * DAY_S).to_pem())
    a = make_node(fleet, tmp_path, "a")
    holds_authority(fleet, FleetFolder(tmp_path / "a" / "fleet"))
    before, write = folder.identity().member, FleetFolder.write_secret

    def full(at: FleetFolder, path: Path, data: bytes) -> None:
        if path == folder.identity_file:
            raise MembershipError(f"{path} can't be written: No space left on device")
        write(at, path, data)

    async with running(a), running(b := make_node(fleet, tmp_path, "b", a)):
        with monkeypatch.context() as patch:
            patch.setattr(FleetFolder, "write_secret", full)
            await until(lambda: (known := a.gossip.opener.member(NodeId("b"))) is not None and known.serial != before.serial)
            await until(lambda: "this node goes on, but: " in caplog.text and "No space left" in caplog.text)
            assert folder.identity().member == before
        await until(lambda: folder.identity().member == b.identity.member)
    assert folder.identity().member.expires_at > before.expires_at


@in_loop
async def test_every_node_hears_from_the_ca_that_it_knows_all_revocations(tmp_path: Path) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    holds_authority(fleet, FleetFolder(tmp_path / "a" / "fleet"))
    async with running(a), running(b := make_node(fleet, tmp_path, "b", a)):
        await until(lambda: (said := b.gossip.revocation_list) is not None and said.said.issuer == "a")
        first = b.gossip.revocation_list
        a.gossip.learn((fleet.revoke("c"),))
        await until(lambda: b.gossip.revocation_list not in {None, first})
        assert b.view().revoked == ("c",)
        assert b.sight().revocations_as_of >= int(time.time()) - 600
        kept = FleetFolder(tmp_path / "b" / "fleet")
        await until(lambda: kept.sealed_list() == (b.gossip.revocation_list and b.gossip.revocation_list.sealed))


@in_loop
async def test_what_is_known_of_revocations_may_be_too_old_to_trust_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a person asked for it; everywhere it is warned of. What brings news goes on."""
    fleet = old_fleet()
    folder = FleetFolder(tmp_path / "b" / "fleet")
    folder.write_secret(folder.identity_file, fleet.member("b", at=time.time() - OLD_S - DAY_S).to_pem())
    a = make_node(fleet, tmp_path, "a")
    monkeypatch.setattr("paceline.net.member.upkeep.FIRST_NEWS_S", 0)
    async with running(a), running(b := make_node(fleet, tmp_path, "b", a)):
        b.trust_keeper._max_age_s = 7 * DAY_S
        await until_seen(b, "a", "b")
        await until(lambda: "is more than 30 days old" in caplog.text)
        with pytest.raises(NotTrusted, match=r"list of revoked nodes 31\.0 days ago"):
            b.channel(NodeId("a"), a.addresses, Use.ANSWER)
        b.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member)
        b.gossip.complete(sign_list(fleet.authority, RevocationList(int(time.time()), b.gossip.revocations_digest, NodeId("a"))))
        b.channel(NodeId("a"), a.addresses, Use.ANSWER)


def issuer_of(tmp_path: Path, fleet: TestFleet, clock: FakeClock) -> Issuer:
    return Issuer(fleet.authority, FleetFolder(tmp_path / "fleet"), clock)


def test_only_ones_own_certificate_is_renewed_and_not_too_early(tmp_path: Path) -> None:
    fleet, clock = old_fleet(), FakeClock(wall=time.time())
    issuer = issuer_of(tmp_path, fleet, clock)
    alice, bob = fleet.member("alice-1"), fleet.member("bob-1")
    request = make_request(alice.key, alice.node_id)
    with pytest.raises(GossipRefused, match="holds for long enough"):
        issuer.renew(request, alice.member)
    clock.advance(100 * DAY_S)
    again = fleet.authority.root.member(issuer.renew(request, alice.member), clock.wall())
    assert (again.node_id, again.public_key) == (alice.node_id, alice.member.public_key)
    assert again.expires_at > alice.member.expires_at
    signed = FleetFolder(tmp_path / "fleet").issuer_state()
    for _ in range(3):  # it shows the certificate before that one, again and again
        with pytest.raises(GossipRefused, match="renewed a moment ago"):
            issuer.renew(request, alice.member)
    assert FleetFolder(tmp_path / "fleet").issuer_state() == signed, "nothing was signed, and nothing written"
    clock.advance(RENEW_EVERY_S)
    assert issuer.renew(request, alice.member), "its answer may have been lost"
    set_back = Issuer(fleet.authority, FleetFolder(tmp_path / "fleet"), FakeClock(wall=clock.wall() - DAY_S))
    assert set_back.renew(request, alice.member)
    for wrong in (make_request(make_key(), alice.node_id), make_request(alice.key, bob.node_id), make_request(bob.key, bob.node_id)):
        with pytest.raises(NotTrusted, match="another name or key"):
            issuer.renew(wrong, alice.member)
    issuer.revoke(alice.node_id)
    with pytest.raises(RevokedNode):
        issuer.renew(request, alice.member)


def test_what_a_ca_with_a_clock_far_ahead_signs_cuts_no_node_off(tmp_path: Path) -> None:
    """An hour with a wrong clock would else last until that time comes."""
    fleet, now = old_fleet(), time.time()
    ahead = issuer_of(tmp_path, fleet, FakeClock(wall=now + 200 * DAY_S))
    alice = fleet.member("alice-1", at=now - 100 * DAY_S)
    before = alice.member
    certificate = ahead.renew(make_request(alice.key, alice.node_id), before)
    with pytest.raises(NotTrusted, match="begins ahead of this machine's clock"):
        alice.renewed(certificate, now)
    assert alice.member is before
    alice.renewed(certificate, now + 199.5 * DAY_S)
    said = ahead.sign_list(b"", NodeId("a"))
    message = wire.SignedRevocationList.FromString(said.sealed)
    with pytest.raises(MalformedMessage, match=r"from (199|200) days ahead"):
        open_list(message, fleet.authority.root, now)
    assert open_kept_list(said.sealed, fleet.authority.root, now) is None
    assert open_list(message, fleet.authority.root, now + 199.5 * DAY_S) == said


def test_a_certificate_that_ended_by_this_clock_asks_for_a_look_at_the_clock_first() -> None:
    long_ago = time.time() - NODE_HOLDS.total_seconds() - 2 * DAY_S
    authority, key, name = Authority.create(long_ago), make_key(), NodeId("alice-1")
    alice = Identity.assemble(key, authority.issue(make_request(key, name), name, long_ago), authority.root, long_ago)
    with pytest.raises(IdentityError, match=r"certificate ended on .*, and this machine's clock says") as caught:
        Identity.from_pem(alice.to_pem())
    assert caught.value.hint.index("set it") < caught.value.hint.index("remove")


@in_loop
async def test_a_clock_that_is_behind_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on small computers without a battery, until the network has told them the time."""
    fleet = TestFleet()
    folder = FleetFolder(tmp_path / "b" / "fleet")
    folder.write_secret(folder.identity_file, fleet.member("b", at=time.time() + 40 * DAY_S).to_pem())
    async with running(make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "b")):
        await until(lambda: "for this machine's clock is wrong" in caplog.text)


def test_a_list_of_revocations_is_the_cas_and_fits_what_is_known(tmp_path: Path) -> None:
    fleet = TestFleet()
    sealed = issuer_of(tmp_path, fleet, FakeClock(wall=time.time())).sign_list(b"", NodeId("a"))
    message = wire.SignedRevocationList.FromString(sealed.sealed)
    assert open_list(message, fleet.authority.root, time.time()) == sealed
    with pytest.raises(NotTrusted):
        open_list(message, TestFleet().authority.root, time.time())
    with pytest.raises(NotTrusted):
        open_list(
            wire.SignedRevocationList(list=message.list, signature=fleet.authority.sign(SignedKind.REVOCATION, message.list)),
            fleet.authority.root,
            time.time(),
        )
    odd = message.list + b"\x22\x01x"
    with pytest.raises(FleetError):
        open_list(
            wire.SignedRevocationList(list=odd, signature=fleet.authority.sign(SignedKind.REVOCATION_LIST, odd)),
            fleet.authority.root,
            time.time(),
        )
    known = fleet.revocations
    assert known.complete(sealed)
    assert not known.complete(sealed)
    fleet.revoke("c")
    later = sign_list(fleet.authority, RevocationList(sealed.said.signed_at + 9, b"", NodeId("a")))
    # It does not say that what is known now is all.
    assert not known.complete(later)
    assert known.completed == sealed


def test_the_process_with_the_key_signs_and_refuses_as_the_ca_does(tmp_path: Path) -> None:
    fleet = TestFleet()
    file = tmp_path / "authority.pem"
    file.write_bytes(fleet.authority.to_pem())
    file.chmod(0o600)
    signer = AuthorityProcess(file, fleet.authority.root)
    key, now = make_key(), time.time()
    member = fleet.authority.root.member(signer.issue(make_request(key, NodeId("b")), NodeId("b"), now), now)
    assert member.node_id == "b"
    with pytest.raises(NotTrusted, match="asks for b, not c") as caught:
        signer.issue(make_request(key, NodeId("b")), NodeId("c"), now)
    assert caught.value.who == "b"


def test_a_revoked_node_that_holds_the_ca_is_not_told_to_remove_its_only_key(tmp_path: Path) -> None:
    fleet = TestFleet()
    for name in ("a", "b"):
        folder = FleetFolder(tmp_path / name / "fleet")
        folder.write_secret(folder.identity_file, fleet.member(name).to_pem())
        folder.keep_revocations([fleet.revoke(name).sealed])
    holds_authority(fleet, FleetFolder(tmp_path / "a" / "fleet"))
    with pytest.raises(MembershipError, match="was revoked from its fleet") as caught:
        make_node(fleet, tmp_path, "a")
    assert caught.value.hint.index("paceline ca export") < caught.value.hint.index("remove")
    with pytest.raises(MembershipError) as caught:
        make_node(fleet, tmp_path, "b")
    assert "ca export" not in caught.value.hint


@in_loop
async def test_two_nodes_that_hold_the_ca_do_not_sign_against_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    signed: list[NodeId] = []
    sign_here = Issuer.sign_list

    def sign(self: Issuer, digest: bytes, own: NodeId) -> SealedList:
        signed.append(own)
        return sign_here(self, digest, own)

    monkeypatch.setattr(Issuer, "sign_list", sign)
    for name in ("a", "b"):
        make_node(fleet, tmp_path, name)
        holds_authority(fleet, FleetFolder(tmp_path / name / "fleet"))
    async with running(a := make_node(fleet, tmp_path, "a")), running(b := make_node(fleet, tmp_path, "b", a)):
        await until(lambda: a.trust_keeper._has_signed and b.trust_keeper._has_signed)
        for _ in range(3):
            await until(lambda: a.gossip.revocation_list == b.gossip.revocation_list is not None)
            await a.trust_keeper.look()
            await b.trust_keeper.look()
        assert sorted(signed) == ["a", "b"]
