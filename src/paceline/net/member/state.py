"""What a node's fleet life leaves on disk, beside its identity: the versions of its card it has used up, and that it runs and where.

version        no card of this node has a higher one
running.json   process id and port of the node that runs now

What this machine's running node sees, asked by another command on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass
from typing import IO, Any

from paceline.core.errors import FleetError, MembershipError, NodeUnreachable
from paceline.core.ports import hold_port
from paceline.fleet.presets import FleetSettings
from paceline.net.control_service import Sight, control_channel, fleet_id, read_sight
from paceline.net.tensor.listener import TENSOR_OPTIONS
from paceline.net.trust.folder import FleetFolder


@dataclass(frozen=True, slots=True)
class RunningNode:
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


class Claim:
    """What a node takes before a model is loaded for it: that no other process runs this identity, its ports, and a folder that can be written.

    Raises:
        MembershipError: this machine's node runs already, or its folder can't be written.
        ConfigError: a port is taken, or the address not this machine's.
    """

    def __init__(self, folder: FleetFolder, settings: FleetSettings) -> None:
        with contextlib.ExitStack() as taken:
            taken.enter_context(claim_running(folder))
            self.fleet = taken.enter_context(hold_port(settings.host, settings.port, "the fleet", "--fleet-port or --fleet-host"))
            """For gRPC, which takes a port by its number: to be closed just before."""
            self.tensors = taken.enter_context(hold_port(settings.host, settings.tensor_port, "activations", TENSOR_OPTIONS))
            keep_version(folder, read_version(folder))
            self._taken = taken.pop_all()

    def close(self) -> None:
        """Let go of all that is still held. Idempotent."""
        self._taken.close()


def keep_running(folder: FleetFolder, running: RunningNode) -> None:
    """For `paceline status` and its like. Blocks."""
    data = json.dumps({"pid": running.pid, "address": running.address}).encode()
    folder.write_secret(folder.root / "running.json", data)


def forget_running(folder: FleetFolder) -> None:
    """This process ends."""
    if (running := read_running(folder)) is not None and running.pid == os.getpid():
        with contextlib.suppress(OSError):  # nothing answers there any more, which is what counts
            (folder.root / "running.json").unlink(missing_ok=True)


def read_running(folder: FleetFolder) -> RunningNode | None:
    """What said last that it runs; whether it still does shows when it is called."""
    try:
        value: Any = json.loads((folder.root / "running.json").read_bytes())
        return RunningNode(int(value["pid"]), str(value["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Looked:
    """A fleet, as this machine's node sees it."""

    fleet_id: str
    sight: Sight


async def look(folder: FleetFolder) -> Looked:
    """Ask the node that runs on this machine.

    Raises:
        MembershipError: this machine is in no fleet, or its node does not run.
    """
    identity = folder.identity()
    running = await asyncio.to_thread(read_running, folder)
    if running is None:
        raise MembershipError(f"The node of this machine ({identity.node_id}) does not run", "Start it: paceline up")
    try:
        async with control_channel(identity, running.address) as channel:
            sight = await read_sight(channel, ASK_S)
    except NodeUnreachable as error:
        raise MembershipError(f"The node of this machine ({identity.node_id}) does not answer", "Start it: paceline up") from error
    except FleetError as error:  # it was revoked, and knows it
        anew = "Stop paceline up and start it again: it says how this machine can join anew"
        raise MembershipError(f"{identity.node_id} is no member any more: {error.message}", anew) from error
    return Looked(fleet_id(identity), sight)
