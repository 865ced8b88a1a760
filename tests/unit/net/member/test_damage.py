"""A node's folder that is damaged, full or closed to it while it runs: it goes on with what it has, says so, and recovers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import Still, in_loop, make_node, running, until, until_seen

from paceline.core.errors import IdentityError, MembershipError
from paceline.fleet.card import ModelOffer, Role
from paceline.net.member.node import FleetNode
from paceline.net.trust.authority import NODE_HOLDS, Authority
from paceline.net.trust.folder import FleetFolder


def offer(node: FleetNode, name: str) -> None:
    """Its card has to change."""
    portrait = node._portrait  # type: ignore[attr-defined]
    assert isinstance(portrait, Still)
    portrait.offers = (ModelOffer(name, Role.VERIFIER, "int4", digest="1" * 64),)


def offered(node: FleetNode) -> list[str]:
    live = node.view().get(node.node_id)
    assert live is not None
    return [offer.model_id for offer in live.card.models]


@in_loop
async def test_a_damaged_ca_keeps_nobody_from_hearing_of_this_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a = make_node(TestFleet(), tmp_path, "a")
    async with running(a):
        folder = FleetFolder(tmp_path / "a" / "fleet")
        folder.write_secret(folder.authority_file, b"damaged")
        await until(lambda: "The file of the fleet's CA is damaged" in caplog.text)
        offer(a, "new")
        await until(lambda: offered(a) == ["new"])
        assert caplog.text.count("The file of the fleet's CA is damaged") == 1


@in_loop
async def test_a_full_disk_keeps_nobody_from_hearing_of_this_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)

        def full(folder: FleetFolder, path: Path, data: bytes) -> None:
            raise MembershipError(f"{path} can't be written: No space left on device")

        async with running(b):
            with monkeypatch.context() as patch:
                patch.setattr(FleetFolder, "write_secret", full)
                offer(a, "new")
                await until_seen(a, "a", "b")
                await until(lambda: offered(a) == ["new"])
                await until(lambda: "this node goes on, but: " in caplog.text)
                assert "version can't be written: No space left" in caplog.text
            offer(a, "newer")
            await until(lambda: FleetFolder(tmp_path / "a" / "fleet").peers() == list(b.addresses))
            await until(lambda: offered(a) == ["newer"])


@in_loop
async def test_a_start_that_fails_lets_go_of_all_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: FleetFolder, version: int) -> None:
        raise MembershipError("version can't be written: No space left on device")

    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    with monkeypatch.context() as patch:
        patch.setattr("paceline.net.member.gossip.keep_version", full)
        with pytest.raises(MembershipError, match="No space left"):
            await a.start()
    assert a.gossip.view().cards == ()
    async with running(make_node(fleet, tmp_path, "a")):
        pass


@pytest.mark.parametrize("damaged", ["{}", "null", "7", "[1]", '["!"]', "", "[" * 100_000])
def test_revocations_are_not_forgotten_by_damage(tmp_path: Path, damaged: str) -> None:
    folder = FleetFolder(tmp_path)
    folder.revocations_file.write_text(damaged)
    with pytest.raises(IdentityError, match="revocations"):
        folder.sealed_revocations()
    with pytest.raises(IdentityError, match="revocations"):
        folder.keep_revocations([b"another"])
    assert folder.revocations_file.read_text() == damaged


@in_loop
async def test_a_certificate_that_ends_soon_and_is_not_renewed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet(Authority.create(time.time() - 2 * NODE_HOLDS.total_seconds()))
    folder = FleetFolder(tmp_path / "b" / "fleet")
    made = fleet.clock.wall() - NODE_HOLDS.total_seconds() + 30.5 * 86400
    folder.write_secret(folder.identity_file, fleet.member("b", at=made).to_pem())
    async with running(make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "b")):
        await until(lambda: "certificate ends in 30 days and was not renewed" in caplog.text)
    assert caplog.text.count("was not renewed") == 1
