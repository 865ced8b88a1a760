"""Starting a fleet, joining it, leaving it; and each way in which a machine is not where it should be for that."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, IdentityError, JoinRefused, MembershipError, TokenError, Unreachable
from paceline.core.ports import find_port
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.issuer import Issuer
from paceline.net.trust.tokens import JoinToken
from paceline.node import enrolment


def free_port() -> int:
    return find_port("127.0.0.1")


@pytest.fixture
def first(tmp_path: Path) -> FleetFolder:
    folder = FleetFolder(tmp_path / "first")
    enrolment.start_fleet(folder, "first-1", free_port())
    return folder


@pytest.fixture
def second(tmp_path: Path) -> FleetFolder:
    return FleetFolder(tmp_path / "second")


def invite(folder: FleetFolder, **how: float) -> JoinToken:
    return enrolment.invite(folder, ttl_s=how.get("ttl_s", 60), uses=int(how.get("uses", 1)), addresses=["127.0.0.1"])


async def let_in(folder: FleetFolder, token: JoinToken, newcomer: FleetFolder, name: str) -> list[str]:
    """Wait for joins on one machine while another joins."""
    names: list[str] = []
    waiting = asyncio.create_task(enrolment.wait_for_joins(folder, token, lambda _: None, names.append, look_s=0.01))
    try:
        while True:
            try:
                await enrolment.enrol(newcomer, token.text, name)
            except Unreachable:
                await asyncio.sleep(0)  # the port opens in a moment
            else:
                break
        assert await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    return names


def test_a_fleet_of_two(first: FleetFolder, second: FleetFolder) -> None:
    async def main() -> None:
        token = invite(first)
        assert await let_in(first, token, second, "second-1") == ["second-1"]

    asyncio.run(main())
    assert second.identity().node_id == "second-1"
    assert second.identity().root.fingerprint == first.identity().root.fingerprint
    assert second.peers()
    assert not second.has_authority
    for folder in (first, second):
        assert all(file.stat().st_mode & 0o077 == 0 for file in folder.root.glob("*.*") if not file.name.startswith("."))
    # Whoever is in a fleet neither starts nor joins another.
    with pytest.raises(MembershipError, match="in a fleet already, as second-1"):
        enrolment.start_fleet(second, None, None)
    with pytest.raises(MembershipError, match="in a fleet already, as second-1"):
        asyncio.run(enrolment.enrol(second, invite(first).text, None))
    # Only the machine with the CA lets others in or puts them out.
    for refused in (
        lambda: invite(second),
        lambda: enrolment.revoke(second, "first-1"),
        lambda: enrolment.export_authority(second, Path("x")),
    ):
        with pytest.raises(MembershipError, match="CA is not on this machine") as caught:
            refused()
        assert "paceline init" in caught.value.hint


def test_revoking_is_done_once_and_by_name(first: FleetFolder, second: FleetFolder) -> None:
    asyncio.run(let_in(first, invite(first), second, "second-1"))
    with pytest.raises(MembershipError, match="No certificate was issued to secnd-1") as caught:
        enrolment.revoke(first, "secnd-1")
    assert "second-1" in caught.value.hint
    with pytest.raises(MembershipError, match="first-1 is this machine"):
        enrolment.revoke(first, "first-1")
    assert enrolment.revoke(first, "second-1").is_news
    assert not enrolment.revoke(first, "second-1").is_news
    assert enrolment.revoke(first, "never-seen-1", anyway=True).is_news
    assert len(first.sealed_revocations()) == 2


def test_the_ca_moves_with_its_backup(first: FleetFolder, second: FleetFolder, tmp_path: Path) -> None:
    asyncio.run(let_in(first, invite(first), second, "second-1"))
    backup = tmp_path / "ca.backup"
    enrolment.export_authority(first, backup)
    assert backup.stat().st_mode & 0o777 == 0o600
    with pytest.raises(MembershipError, match="overwrites nothing"):
        enrolment.export_authority(first, backup, lambda: pytest.fail("a passphrase is asked for in vain"))
    with pytest.raises(MembershipError, match="on this machine already"):
        enrolment.import_authority(first, backup)
    stranger = FleetFolder(tmp_path / "stranger")
    with pytest.raises(MembershipError, match="in no fleet"):
        enrolment.import_authority(stranger, backup)
    enrolment.start_fleet(stranger, None, None)
    stranger.authority_file.unlink()
    with pytest.raises(MembershipError, match="another fleet"):
        enrolment.import_authority(stranger, backup)
    backup.chmod(0o644)
    with pytest.raises(IdentityError, match="read by others"):
        enrolment.import_authority(second, backup)
    backup.chmod(0o600)
    enrolment.import_authority(second, backup)
    assert enrolment.revoke(second, "first-1", anyway=True).is_news
    # What it issued before it came here is not known here, but who this machine is.
    with pytest.raises(JoinRefused, match="second-1 is another machine's"):
        asyncio.run(let_in(second, invite(second), FleetFolder(tmp_path / "third"), "second-1"))


def test_a_backup_with_a_passphrase_wants_that_one(first: FleetFolder, tmp_path: Path) -> None:
    backup = tmp_path / "ca.backup"
    with pytest.raises(ConfigError, match="at least 12"):
        enrolment.export_authority(first, backup, lambda: "short")
    enrolment.export_authority(first, backup, lambda: "five words on a line")
    first.authority_file.unlink()
    with pytest.raises(IdentityError, match="no passphrase was given"):
        enrolment.import_authority(first, backup)
    with pytest.raises(IdentityError, match="the passphrase is another"):
        enrolment.import_authority(first, backup, lambda: "six words on a line then")
    enrolment.import_authority(first, backup, lambda: "five words on a line")
    assert first.authority().root.pin == first.identity().root.pin


def test_two_fleets_on_one_machine_join_at_two_ports(first: FleetFolder, second: FleetFolder) -> None:
    port = Issuer(first.authority(), first, SystemClock()).join_port
    enrolment.start_fleet(second, "second-1", port)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        (address,) = invite(second).addresses
        assert 0 < int(address.rpartition(":")[2]) - port < enrolment.JOIN_PORTS
        with pytest.raises(MembershipError, match=f"The join port {port} is used by something else") as caught:
            enrolment.invite(second, ttl_s=60, uses=1, join_port=port)
        assert "--join-port" in caught.value.hint
    # By request it goes back; tokens say where.
    token = enrolment.invite(second, ttl_s=60, uses=1, addresses=["127.0.0.1"], join_port=port)
    assert token.addresses == (f"127.0.0.1:{port}",)


def test_the_port_that_this_fleet_keeps_is_not_taken(first: FleetFolder) -> None:
    async def main() -> None:
        earlier = invite(first)
        waiting = asyncio.create_task(enrolment.wait_for_joins(first, earlier, lambda _: None, lambda _: None, look_s=0.01))
        try:
            port = int(earlier.addresses[0].rpartition(":")[2])
            while await asyncio.to_thread(enrolment.is_free, port):
                continue
            assert (await asyncio.to_thread(invite, first)).addresses == earlier.addresses
            # Moved, it is open at the new one in a moment.
            moved = await asyncio.to_thread(lambda: enrolment.invite(first, ttl_s=60, uses=1, join_port=free_port()))
            while await asyncio.to_thread(enrolment.is_free, int(moved.addresses[0].rpartition(":")[2])):
                continue
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())


def test_a_machine_in_no_fleet_is_told(second: FleetFolder) -> None:
    for refused in (lambda: invite(second), lambda: enrolment.revoke(second, "a"), second.identity):
        with pytest.raises(MembershipError, match="in no fleet") as caught:
            refused()
        assert "paceline init" in caught.value.hint
    with pytest.raises(TokenError):
        asyncio.run(enrolment.enrol(second, "hello", None))
    assert not second.root.exists()


def test_an_init_that_was_cut_short_goes_on(first: FleetFolder) -> None:
    authority = first.authority().root.fingerprint
    first.identity_file.unlink()
    enrolment.start_fleet(first, "again-1", None)
    assert first.identity().root.fingerprint == authority


@pytest.mark.parametrize(("ttl_s", "uses"), [(0, 1), (1e9, 1), (60, 0), (60, 1001)])
def test_tokens_have_limits(first: FleetFolder, ttl_s: float, uses: int) -> None:
    with pytest.raises(ConfigError):
        invite(first, ttl_s=ttl_s, uses=uses)


def test_addresses_are_checked_and_get_the_join_port(first: FleetFolder) -> None:
    token = enrolment.invite(first, ttl_s=60, uses=1, addresses=["10.0.0.1", "10.0.0.1:9", "fd00::1", "host.lan"])
    port = token.addresses[0].rpartition(":")[2]
    assert token.addresses == (f"10.0.0.1:{port}", "10.0.0.1:9", f"[fd00::1]:{port}", f"host.lan:{port}")
    for wrong in ("a b", "0.0.0.0", "[::]:8155", "224.0.0.1", "fe80::1", "[fe80::1]:8155"):
        with pytest.raises(ConfigError, match="is not an address"):
            enrolment.invite(first, ttl_s=60, uses=1, addresses=[wrong])
    assert enrolment.invite(first, ttl_s=60, uses=1, addresses=["127.0.0.1"]).addresses  # a person tries several nodes on one machine


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (["169.254.9.1"], ["169.254.9.1"]),
        (["10.0.0.1", "169.254.9.1"], ["10.0.0.1", "169.254.9.1"]),
        (["127.0.0.1", "::1"], None),
        ([], None),
    ],
)
def test_a_token_names_only_addresses_that_others_can_reach(
    first: FleetFolder, monkeypatch: pytest.MonkeyPatch, own: list[str], expected: list[str] | None
) -> None:
    monkeypatch.setattr(enrolment, "own_hosts", lambda: tuple(own))
    if expected is not None:
        assert [address.rpartition(":")[0] for address in enrolment.invite(first, ttl_s=60, uses=1).addresses] == expected
        return
    with pytest.raises(MembershipError) as refused:
        enrolment.invite(first, ttl_s=60, uses=1)
    assert refused.value.hint
    assert not enrolment.list_tokens(first)


def test_names(second: FleetFolder) -> None:
    for name in ("Upper", "a b", "", "-a", "a" * 64):
        with pytest.raises(ConfigError, match="can't name a machine"):
            enrolment.start_fleet(second, name, None)
    assert enrolment.choose_node_id("Mini Attic.local").startswith("mini-attic-")
    assert enrolment.choose_node_id("???").startswith("node-")
    assert enrolment.choose_node_id("x") != enrolment.choose_node_id("x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cant_be_written_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(MembershipError, match="can't be written"):
        enrolment.start_fleet(FleetFolder(tmp_path / "fleet"), None, None)


def test_a_revoked_machine_stays_out_until_it_joins_anew(first: FleetFolder, second: FleetFolder, tmp_path: Path) -> None:
    asyncio.run(let_in(first, invite(first), second, "second-1"))
    third = FleetFolder(tmp_path / "third")
    with pytest.raises(JoinRefused, match="another machine's"):
        asyncio.run(let_in(first, invite(first), third, "second-1"))
    enrolment.revoke(first, "second-1")
    asyncio.run(let_in(first, invite(first), third, "second-1"))
    assert third.sealed_revocations() == first.sealed_revocations()
