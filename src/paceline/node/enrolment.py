"""How a machine becomes part of a fleet and stops being one: what `init`, `token`, `join`, `revoke` and `ca` do, without their words.

Nothing here needs a running node. What changes on disk is noticed by the one that runs.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, MembershipError, NotTrusted
from paceline.core.files import WRITABLE_HINT, nearest_folder, write_file
from paceline.core.ids import NodeId, Trust
from paceline.fleet.eligibility import Revocations
from paceline.fleet.links import may_be_reached
from paceline.fleet.presets import FLEET_PORT
from paceline.net.discovery import own_hosts
from paceline.net.join_client import join
from paceline.net.join_host import JoinHost
from paceline.net.trust.authority import Authority, is_encrypted
from paceline.net.trust.certificates import is_address, is_node_id, join_host, make_key, make_request, read_join_certificate
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity, choose_node_id, read_secret
from paceline.net.trust.issuer import Issuer, OpenToken, check_id
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import open_revocations
from paceline.net.trust.tokens import JoinToken
from paceline.store.home import Home

MAX_TTL_S = 30 * 86400.0
MAX_USES = 1000
MAX_TOKEN_ADDRESSES = 8
MIN_PASSPHRASE = 12
JOIN_PORTS = 16
"""Looked through for a free one."""
LOCAL_S = 1.0
"""Longest wait for a process of this machine."""


def open_folder() -> FleetFolder:
    """This machine's."""
    return FleetFolder(Home.from_environment().fleet)


def start_fleet(folder: FleetFolder, name: str | None, join_port: int | None) -> Identity:
    """Make a CA and this machine its first member.

    Raises:
        MembershipError: this machine is in a fleet, or the files can't be written.
        ConfigError: the name can't be a node's.
    """
    clock = SystemClock()
    check_free(folder)
    node_id = _name(name)
    # An init that was cut short left a CA without a member.
    authority = folder.authority() if folder.has_authority else Authority.create(clock.wall())
    folder.write_secret(folder.authority_file, authority.to_pem())
    issuer = Issuer(authority, folder, clock)
    usable_join_port(issuer, join_port)
    key = make_key()
    identity = Identity.assemble(key, issuer.issue_own(make_request(key, node_id), node_id), authority.root, clock.wall())
    folder.write_secret(folder.identity_file, identity.to_pem())
    return identity


def invite(
    folder: FleetFolder,
    *,
    ttl_s: float,
    uses: int,
    addresses: Sequence[str] = (),
    trust: Trust = Trust.MEMBER,
    join_port: int | None = None,
) -> JoinToken:
    """A token for other machines.

    Args:
        folder: of the machine with the CA.
        addresses: host or host:port where this machine can be reached; empty: `reachable_hosts`.
        join_port: where machines join from now on; None: where they did, or at a free one where something else has taken that.

    Raises:
        MembershipError: the CA is on another machine, or no other machine can reach this one.
        ConfigError: an argument makes no sense.
    """
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise ConfigError("A token lives from a second to 30 days", "Such as --ttl 1h")
    if not 1 <= uses <= MAX_USES:
        raise ConfigError(f"A token is good for 1 to {MAX_USES} machines", "Such as --uses 4")
    issuer = _issuer(folder)
    port = usable_join_port(issuer, join_port)
    hosts = addresses or reachable_hosts()[:MAX_TOKEN_ADDRESSES]
    if not hosts:
        raise MembershipError(NO_ADDRESS, NO_ADDRESS_HINT)
    named = tuple(one if is_address(one) else join_host(one.strip("[]"), port) for one in hosts)
    for one in named:
        if not is_address(one):
            raise ConfigError(f"{one} is not an address", "Give host, host:port or [IPv6]:port")
        if not _can_be_dialled(one):
            raise ConfigError(
                f"{one} is not an address that another machine can call", "Give one that it can reach. Default: leave out --address"
            )
    return issuer.mint(named, ttl_s=ttl_s, uses=uses, trust=trust)


NO_ADDRESS = "This machine is on no network: there is no address by which another machine could join"
NO_ADDRESS_HINT = (
    "Connect it to a network or by a cable to the other machine, then run paceline token. To try several nodes on this machine alone: "
    "--address 127.0.0.1"
)


def reachable_hosts() -> tuple[str, ...]:
    """Addresses of this machine that other machines may reach, the likeliest first."""
    return tuple(host for host in own_hosts() if not ip_address(host).is_loopback)


def _can_be_dialled(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ip_address(host)
    except ValueError:
        return True  # a name
    return may_be_reached(ip, (ip,))


async def wait_for_joins(
    folder: FleetFolder, token: JoinToken, on_open: Callable[[bool], None], on_joined: Callable[[str], None], look_s: float = 1.0
) -> bool:
    """Keep the join port until the token is spent or expired.

    Args:
        on_open: called once, when machines can join: with True if they join here, False at the node that runs.

    Returns:
        False, at once, where a running node keeps the port.

    Raises:
        MembershipError: the port is taken.
    """

    def peers() -> list[str]:
        """Return the addresses that joiners call next: this machine's node will be there."""
        return [*folder.peers(), *(join_host(host, FLEET_PORT) for host in own_hosts())]

    host = JoinHost(folder, SystemClock(), Refusals(), peers=peers, on_joined=on_joined)
    if not host.claim():
        on_open(False)
        return False
    try:
        await host.refresh()
        on_open(True)
        while await asyncio.to_thread(host.issuer.is_live, token):
            await host.refresh()
            await asyncio.sleep(look_s)
    finally:
        await host.close()
    return True


async def enrol(folder: FleetFolder, text: str, name: str | None) -> Identity:
    """Join by a token; what is kept afterwards is all that a node needs.

    Raises:
        MembershipError: this machine is in a fleet already.
        TokenError: that is no token.
        JoinRefused: the issuer says no, or what answers is not the issuer.
        Unreachable: no address answers.
    """
    clock = SystemClock()
    check_free(folder)
    token = JoinToken.parse(text)
    joined = await join(token, _name(name), clock)
    folder.keep_peers(joined.peers)
    folder.keep_revocations(one.sealed for one in joined.revocations)
    # Last, because with it this machine is a member.
    folder.write_secret(folder.identity_file, joined.identity.to_pem())
    return joined.identity


def list_tokens(folder: FleetFolder) -> tuple[OpenToken, ...]:
    """Tokens that machines may still join by.

    Raises:
        MembershipError: the CA is on another machine.
    """
    return _issuer(folder).open_tokens()


def void_tokens(folder: FleetFolder, which: str) -> int:
    """Void tokens; returns how many.

    Args:
        which: the beginning of a token's id, or `all`.

    Raises:
        MembershipError: the CA is on another machine.
        ConfigError: no token's id begins so, or several do.
    """
    issuer = _issuer(folder)
    tokens = issuer.open_tokens()
    found = [one.token_id for one in tokens if which == "all" or (which and one.token_id.startswith(which))]
    if which != "all" and len(found) != 1:
        raise ConfigError(f"{which!r} is {'the beginning of several tokens' if found else 'no open token'}", "See paceline token --list")
    issuer.void_tokens(found)
    return len(found)


def _issuer(folder: FleetFolder) -> Issuer:
    return Issuer(folder.served_authority(folder.identity().root), folder, SystemClock())


@dataclass(frozen=True, slots=True)
class Revoking:
    """What came of a `revoke`."""

    is_news: bool
    """False: the node was revoked before and has not joined since, so nothing was done."""
    voided_tokens: int


def revoke(folder: FleetFolder, node_id: str, *, anyway: bool = False, keep_tokens: bool = False) -> Revoking:
    """Void a node's certificates, and the tokens by which its owner could come again.

    Args:
        folder: of the machine with the CA.
        anyway: even where no certificate was issued to it by this machine.
        keep_tokens: leave tokens as they are: who has one may come again.

    Raises:
        MembershipError: the CA is on another machine, no such node is known, or it is this machine.
    """
    own, issuer = folder.identity().node_id, _issuer(folder)
    known = issuer.issued()
    if anyway and is_node_id(node_id):
        known = (*known, NodeId(node_id))
    checked = check_id(node_id, known, own)
    before = Revocations(open_revocations(folder.sealed_revocations(), issuer.authority.root))
    issued_at = issuer.issued_at(checked)
    if issued_at is not None and before.voids(checked, issued_at):
        return Revoking(is_news=False, voided_tokens=0)
    voided = 0 if keep_tokens else len(issuer.open_tokens())
    issuer.revoke(checked, keep_tokens=keep_tokens)
    return Revoking(is_news=True, voided_tokens=voided)


def export_authority(folder: FleetFolder, file: Path, ask: Callable[[], str | None] = lambda: None) -> None:
    """Write a backup of the CA.

    Args:
        ask: for the passphrase that encrypts it, once nothing else is in the way; None: a person who reads the file has the CA.

    Raises:
        MembershipError: the CA is on another machine, or the file is there or can't be written.
    """
    folder.identity()
    authority = folder.authority()
    if file.exists():
        raise MembershipError(f"{file} is there already, and a backup overwrites nothing", "Choose another name.")
    passphrase = ask()
    if passphrase is not None and len(passphrase) < MIN_PASSPHRASE:
        raise ConfigError(f"A passphrase has at least {MIN_PASSPHRASE} characters", "Such as five words.")
    try:
        write_file(file, authority.to_pem(passphrase), durable=True)
    except OSError as error:
        raise MembershipError(f"{file} can't be written: {error.strerror}", "Choose another place") from error


def import_authority(folder: FleetFolder, file: Path, ask: Callable[[], str | None] = lambda: None) -> None:
    """Make this machine, a member, the one that holds its fleet's CA.

    Args:
        ask: for the passphrase of a backup that has one.

    Raises:
        MembershipError: the CA is here already, this machine is in no fleet, or the backup is another fleet's.
        IdentityError: the backup is damaged, or open to others.
    """
    identity = folder.identity()
    if folder.has_authority:
        raise MembershipError("The fleet's CA is on this machine already", "Nothing needs to be done")
    data = read_secret(file)
    authority = Authority.from_pem(data, ask() if is_encrypted(data) else None)
    if authority.root.fingerprint != identity.root.fingerprint:
        raise MembershipError(f"{file} is the CA of another fleet than this machine's", "Use the backup of this fleet")
    folder.write_secret(folder.authority_file, authority.to_pem())


def usable_join_port(issuer: Issuer, asked: int | None) -> int:
    """Settle where machines join: two fleets on one machine can't have one port.

    Args:
        asked: what the person wants; None: the port that was kept, or the next one that is free.

    Raises:
        MembershipError: none is free.
    """
    kept = issuer.join_port
    tried = range(kept, min(kept + JOIN_PORTS, 65536)) if asked is None else (asked,)
    port = next((one for one in tried if is_free(one) or _is_ours(one, issuer)), None)
    if port is None:
        what = f"The join port {asked} is" if asked is not None else f"The join ports {tried[0]} to {tried[-1]} are"
        raise MembershipError(f"{what} used by something else on this machine", "Choose another: --join-port PORT")
    if port != kept:
        issuer.set_join_port(port)
    return port


def is_free(port: int) -> bool:
    """Whether no socket listens at a port, at any address."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - it is asked whether it could be
        try:
            with socket.socket(family) as listening:
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((host, port))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
    return True


def _is_ours(port: int, issuer: Issuer) -> bool:
    """Whether this fleet's join port is open there, kept by another process."""
    for host in ("127.0.0.1", *own_hosts()):
        try:
            pem = ssl.get_server_certificate((host, port), timeout=LOCAL_S)
        except (OSError, ValueError):
            continue
        try:
            read_join_certificate(ssl.PEM_cert_to_DER_cert(pem), issuer.authority.root.pin)
        except NotTrusted:
            return False
        return True
    return False


def check_free(folder: FleetFolder) -> None:
    """That this machine may start or join a fleet.

    Raises:
        MembershipError: it is in one, or the files can't be written.
    """
    if folder.is_member:
        raise MembershipError(
            f"This machine is in a fleet already, as {folder.identity().node_id}",
            f"It holds that fleet's CA. To give the fleet up: remove {folder.root}, and that of every member"
            if folder.has_authority
            else f"To leave: paceline revoke {folder.identity().node_id} on the machine with the fleet's CA, then remove {folder.root} here",
        )
    if not os.access(nearest_folder(folder.root), os.W_OK):
        raise MembershipError(f"{folder.root} can't be written", WRITABLE_HINT)


def _name(name: str | None) -> NodeId:
    if name is None:
        return choose_node_id(socket.gethostname())
    if not is_node_id(name):
        raise ConfigError(f"{name!r} can't name a machine", "Small letters, digits and hyphens, at most 63")
    return NodeId(name)
