"""PACELINE_HOME/fleet: what a node keeps of its membership.

    identity.pem         this node's key, its certificate, the CA's certificate
    authority.pem        the CA's key and certificate; only where `paceline init` ran
    issuer.json          join tokens and the holders of issued ids; only there
    revocations.json     the revocations, as the CA signed them
    revocation-list      the CA's newest signed statement that those are all
    peers.json           where members were last reached

Each file is written whole, and only its owner can read it. A secret that others could read is refused, not used. A process that changes a file which
another process may change too holds the folder's lock meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import errno
import fcntl
import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import IdentityError, MembershipError
from paceline.core.files import WRITABLE_HINT, Under, write_file
from paceline.net.trust.authority import Authority, AuthorityProcess
from paceline.net.trust.certificates import FleetRoot
from paceline.net.trust.identity import MAX_FILE_BYTES, Identity, read_secret

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class FleetFolder:
    """Paths and files under PACELINE_HOME/fleet. The folder is created by the first write."""

    root: Path

    identity_file = Under("identity.pem")
    authority_file = Under("authority.pem")
    issuer_file = Under("issuer.json")
    revocations_file = Under("revocations.json")
    list_file = Under("revocation-list")
    peers_file = Under("peers.json")
    host_lock_file = Under(".join-port")
    """Lock of the process that serves the join port."""

    @property
    def is_member(self) -> bool:
        return self.identity_file.exists()

    @property
    def has_authority(self) -> bool:
        return self.authority_file.exists()

    def identity(self) -> Identity:
        """Load this node's identity.

        Raises:
            MembershipError: the machine is in no fleet.
            IdentityError: the file is open to others, or damaged.
        """
        if not self.is_member:
            raise MembershipError(
                "This machine is in no fleet",
                "Start one here: paceline init. Or join one: paceline join, with a token from paceline token",
            )
        return Identity.from_pem(read_secret(self.identity_file))

    def authority(self) -> Authority:
        """Load the fleet's CA, key included.

        Raises:
            MembershipError: the CA is on another machine.
            IdentityError: its file is open to others, or damaged.
        """
        if not self.has_authority:
            raise _elsewhere()
        return Authority.from_pem(read_secret(self.authority_file))

    def served_authority(self, root: FleetRoot) -> AuthorityProcess:
        """Return the fleet's CA for a process that serves others. The key stays out of that process.

        Args:
            root: the CA's certificate, from this machine's identity.

        Raises:
            MembershipError: the CA is on another machine.
        """
        if not self.has_authority:
            raise _elsewhere()
        return AuthorityProcess(self.authority_file, root)

    def write_secret(self, path: Path, data: bytes) -> None:
        """Write a file of this folder so that a power cut can't lose it.

        Raises:
            MembershipError: it can't be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(path, data, durable=True)
        except OSError as error:
            raise _can_not_write(path, error) from error

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the folder's lock while the block runs, so that no other process changes its files.

        Raises:
            MembershipError: the folder can't be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = (self.root / ".lock").open("wb")
        except OSError as error:
            raise _can_not_write(self.root, error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def hold(self, file: Path) -> IO[bytes] | None:
        """Take a lock file for this process. The lock lasts until the returned file is closed.

        Returns:
            The open lock file; None if another process holds it.

        Raises:
            MembershipError: the lock file can't be written.
        """
        try:
            lock = file.open("ab")
        except OSError as error:
            raise _can_not_write(file, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

    def sealed_revocations(self) -> list[bytes]:
        """Return the serialised SignedRevocations on disk, unchecked.

        Raises:
            IdentityError: the file is damaged.
        """
        values = _read_json(self.revocations_file)
        try:
            if values is None:
                return []
            # Any other content is damage: treating it as empty would forget revoked nodes.
            if not isinstance(values, list):
                raise TypeError
            return [base64.b64decode(value, validate=True) for value in values]  # pyright: ignore[reportUnknownVariableType]
        except (binascii.Error, TypeError, ValueError):
            raise _damaged(self.revocations_file) from None

    def keep_revocations(self, sealed: Iterable[bytes]) -> None:
        """Add revocations to those on disk, without duplicates."""
        with self.locked():
            known = self.sealed_revocations()
            new = [one for one in dict.fromkeys(sealed) if one not in known]
            if new:
                data = json.dumps([base64.b64encode(one).decode() for one in known + new], indent=1).encode()
                self.write_secret(self.revocations_file, data)

    def sealed_list(self) -> bytes | None:
        """Return the serialised SignedRevocationList on disk, unchecked; None if there is none."""
        try:
            return self.list_file.read_bytes()[:MAX_FILE_BYTES]
        except OSError:
            return None

    def keep_list(self, sealed: bytes) -> None:
        self.write_secret(self.list_file, sealed)

    def peers(self) -> list[str]:
        """Return the addresses (host:port) at which members were last reached; none if the file is damaged."""
        try:
            values = _read_json(self.peers_file)
        except IdentityError:
            return []  # an address book can be rebuilt
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []  # pyright: ignore[reportUnknownVariableType]

    def keep_peers(self, addresses: Iterable[str]) -> None:
        self.write_secret(self.peers_file, json.dumps(sorted(set(addresses)), indent=1).encode())

    def issuer_state(self) -> dict[str, Any]:
        """Load the issuer's state; empty if there is none.

        Raises:
            IdentityError: the file is damaged, or open to others.
        """
        if not self.issuer_file.exists():
            return {}
        try:
            value: Any = json.loads(read_secret(self.issuer_file))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise _damaged(self.issuer_file)
        return value  # pyright: ignore[reportUnknownVariableType]

    def keep_issuer_state(self, state: dict[str, Any]) -> None:
        self.write_secret(self.issuer_file, json.dumps(state, indent=1).encode())

    def stamp(self) -> Stamp:
        """Return a value that changes whenever tokens or revocations change on disk."""
        return tuple(_stamp(path) for path in (self.issuer_file, self.revocations_file))


def _can_not_write(path: Path, error: OSError) -> MembershipError:
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    hint = "Free some space on its disk, and try again." if full else WRITABLE_HINT
    return MembershipError(f"{path} can't be written: {error.strerror}", hint)


def _elsewhere() -> MembershipError:
    return MembershipError(
        "The fleet's CA is not on this machine",
        "Do this on the machine where paceline init ran, or bring its backup here: paceline ca import FILE",
    )


def _read_json(path: Path) -> object:
    """Return the content of a JSON file; None if the file does not exist.

    Raises:
        IdentityError: the file is damaged.
    """
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if value is None:
        raise _damaged(path)
    return value


def _damaged(path: Path) -> IdentityError:
    return IdentityError(f"{path} is damaged", "Restore it from a backup, or remove it if there is none")


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)
