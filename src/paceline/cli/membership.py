"""Whether this machine is in a fleet, and with which settings it takes part. Cheap to ask: most machines are in none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.errors import ConfigError, MembershipError
from paceline.fleet.card import NodeCard
from paceline.net.member.settings import FleetSettings, parse_preset
from paceline.store.home import Home


def fleet_view() -> Callable[[], Sequence[NodeCard]] | None:
    """The live cards of those that may answer, as this machine's running node sees the fleet; None where this machine is to be looked at alone."""
    home = Home.from_environment()
    if not home.is_in_fleet:
        return None
    import asyncio

    from paceline.fleet.eligibility import Use
    from paceline.machine.config_file import read_trust_policy
    from paceline.net.member.state import look
    from paceline.net.trust.folder import FleetFolder

    try:
        cards = read_trust_policy(home).eligible(asyncio.run(look(FleetFolder(home.fleet))).sight.view, Use.ANSWER).cards
    except MembershipError as error:
        print(f"note: {error.message}, so this is about this machine alone", file=sys.stderr)
        return None
    return lambda: cards


def fleet_settings(port: int, host: str, peers: Sequence[str], preset: str, *, mdns: bool, needed: bool) -> FleetSettings | None:
    """This node's part in its fleet; None where it is in none.

    Args:
        host: to listen on; empty: everything.
        peers: addresses of others.
        mdns: whether to look for others.
        needed: whether being in none is an error.

    Raises:
        ConfigError: an option makes no sense.
        MembershipError: this machine is in no fleet, and must be.
    """
    settings = FleetSettings(port, host, peers=tuple(peers), mdns=mdns, preset=parse_preset(preset))
    home = Home.from_environment()
    if not home.is_in_fleet:
        if needed or peers:
            raise MembershipError("This machine is in no fleet", "Start one here: paceline init. Or join one: paceline join.")
        return None
    from paceline.net.trust.certificates import is_address

    for peer in peers:
        if not is_address(peer):
            raise ConfigError(f"--peer {peer!r} is not host:port", "Such as 192.168.1.20:8154.")
    from paceline.machine.config_file import read_trust_policy

    return replace(settings, trust=read_trust_policy(home))
