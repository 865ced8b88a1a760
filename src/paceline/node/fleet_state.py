"""What a node's fleet life leaves on disk, beside its identity: the versions of its card it has used up, and that it runs and where.

version        no card of this node has a higher one
running.json   process id and port of the node that runs now
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import IO, Any

from paceline.core.errors import ConfigError, MembershipError
from paceline.transport.trust.addresses import join_host
from paceline.transport.trust.folder import FleetFolder


@dataclass(frozen=True, slots=True)
class Running:
    """A node of this machine that serves its fleet."""

    pid: int
    address: str
    """host:port, for this machine itself."""


def read_version(folder: FleetFolder) -> int:
    """The highest version used; 0 where none was, or it is not known."""
    try:
        return int((folder.root / "version").read_bytes())
    except (OSError, ValueError):
        return 0


def keep_version(folder: FleetFolder, version: int) -> None:
    """Before a card of this version is announced. Blocks."""
    folder.write_secret(folder.root / "version", str(version).encode())


def claim_running(folder: FleetFolder) -> IO[bytes]:
    """Be the process that runs this identity, until the file that is returned is closed.

    Raises:
        MembershipError: another process is, or the folder can't be written.
    """
    lock = folder.hold(folder.root / ".running")
    if lock is None:
        running = read_running(folder)
        which = f" (process {running.pid}, at {running.address})" if running is not None else ""
        raise MembershipError(
            f"This machine's node runs already{which}",
            "Stop it first. A second one on one machine needs a PACELINE_HOME and an identity of its own",
        )
    return lock


def check_startable(folder: FleetFolder, host: str, port: int) -> None:
    """What would keep a node from starting, found out before a model is loaded for it.

    Raises:
        MembershipError: this machine's node runs already.
        ConfigError: its port is taken, or its address not this machine's.
    """
    claim_running(folder).close()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {join_host(host or '0.0.0.0', port)} for the fleet: {error.strerror}",  # noqa: S104 - shown, not bound
                "Stop what listens there, or choose another --fleet-port or --fleet-host.",
            ) from error


def keep_running(folder: FleetFolder, running: Running) -> None:
    """For `paceline status` and its like. Blocks."""
    data = json.dumps({"pid": running.pid, "address": running.address}).encode()
    folder.write_secret(folder.root / "running.json", data)


def forget_running(folder: FleetFolder) -> None:
    """This process ends."""
    if (running := read_running(folder)) is not None and running.pid == os.getpid():
        with contextlib.suppress(OSError):  # nothing answers there any more, which is what counts
            (folder.root / "running.json").unlink(missing_ok=True)


def read_running(folder: FleetFolder) -> Running | None:
    """What said last that it runs; whether it still does shows when it is called."""
    try:
        value: Any = json.loads((folder.root / "running.json").read_bytes())
        return Running(int(value["pid"]), str(value["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
