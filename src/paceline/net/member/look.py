"""What this machine's running node sees, asked by another command on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.core.errors import FleetError, MembershipError, NodeUnreachable
from paceline.net.control_service import Sight, control_channel, fleet_id, read_sight
from paceline.net.member.state import read_running
from paceline.net.trust.folder import FleetFolder

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
