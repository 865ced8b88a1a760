"""What a node's fleet life leaves on disk, beside its identity: the versions of its card it has used up, and that it runs and where.

version        no card of this node has a higher one
running.json   process id and port of the node that runs now
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from paceline.transport.trust.folder import FleetFolder


@dataclass(frozen=True, slots=True)
class Running:
    """A node of this machine that serves its fleet."""

    pid: int
    address: str
    """host:port, for this machine itself."""


def read_version(folder: FleetFolder) -> int:
    """The highest version used; 0 where none was, or nobody knows."""
    try:
        return int((folder.root / "version").read_bytes())
    except (OSError, ValueError):
        return 0


def keep_version(folder: FleetFolder, version: int) -> None:
    """Before a card of this version is announced. Blocks."""
    folder.write_secret(folder.root / "version", str(version).encode())


def keep_running(folder: FleetFolder, running: Running) -> None:
    """For `paceline status` and its like. Blocks."""
    data = json.dumps({"pid": running.pid, "address": running.address}).encode()
    folder.write_secret(folder.root / "running.json", data)


def forget_running(folder: FleetFolder) -> None:
    """This process ends."""
    if (running := read_running(folder)) is not None and running.pid == os.getpid():
        (folder.root / "running.json").unlink(missing_ok=True)


def read_running(folder: FleetFolder) -> Running | None:
    """What said last that it runs; whether it still does shows when it is called."""
    try:
        value: Any = json.loads((folder.root / "running.json").read_bytes())
        return Running(int(value["pid"]), str(value["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
