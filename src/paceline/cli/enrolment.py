"""`paceline init`, `token`, `join`, `revoke` and `ca`: their words. What they do is in `node.enrolment`."""

from __future__ import annotations

import asyncio
import getpass
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.core.errors import ConfigError
from paceline.core.trust import Trust
from paceline.node import enrolment

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def run_init(*, name: str | None, join_port: int | None, ttl: str, uses: int, addresses: Sequence[str]) -> None:
    """Start a fleet.

    Raises:
        UserError: it can't be done here.
    """
    console = Console(highlight=False)
    ttl_s = seconds(ttl)
    folder = enrolment.open_folder()
    identity = enrolment.start_fleet(folder, name, join_port)
    token = enrolment.invite(folder, ttl_s=ttl_s, uses=uses, addresses=addresses)
    _say(console, f"Started a fleet; this machine is {identity.node_id}.")
    _say(console, f"\nNow, here:\n  paceline up\nAnd on each other machine, {_until(ttl_s)}:\n  paceline join {token.text}\n")
    _say(console, "The fleet's CA is on this machine alone. Keep a copy elsewhere: paceline ca export FILE")


def run_token(*, ttl: str, uses: int, addresses: Sequence[str], trust: Trust, join_port: int | None, wait: bool) -> None:
    """Print a token; where no node runs here, and `wait` is set, answer those who come with it.

    Raises:
        UserError: it can't be done here.
    """
    console = Console(highlight=False)
    ttl_s = seconds(ttl)
    folder = enrolment.open_folder()
    token = enrolment.invite(folder, ttl_s=ttl_s, uses=uses, addresses=addresses, trust=trust, join_port=join_port)
    many = "one machine" if uses == 1 else f"up to {uses} machines"
    kind = "" if trust is Trust.MEMBER else f" ({trust})"
    _say(console, f"On {many}{kind}, {_until(ttl_s)}:\n  paceline join {token.text}\n")

    if not wait:
        _say(console, "It is good while paceline up runs here.")
        return

    def on_joined(node_id: str) -> None:
        _say(console, f"{node_id} joined")

    async def main() -> bool:
        waiting = asyncio.ensure_future(enrolment.wait_for_joins(folder, token, on_joined))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        if not done:
            # Not among what a script reads of this command: it would see nothing, and wonder what is waited for.
            told = Console(highlight=False, stderr=True)
            _say(told, "Waiting for them. (Ctrl-C stops; then the token is good only while paceline up or paceline token runs here.)")
        return await waiting

    try:
        served_here = asyncio.run(main())
    except KeyboardInterrupt:
        _say(console, "\nStopped. The token stays good while paceline up or paceline token runs here.")
        return
    _say(console, "The token is used up or has expired." if served_here else "The node that runs here lets them in.")


def run_join(token: str | None, *, name: str | None) -> None:
    """Join a fleet.

    Args:
        token: None: ask for it; `-`: read it.
        name: of this machine; None: choose one.

    Raises:
        UserError: it can't be done, and why.
    """
    console = Console(highlight=False)
    folder = enrolment.open_folder()
    enrolment.check_free(folder)
    identity = asyncio.run(enrolment.enrol(folder, _token(token), name))
    _say(console, f"Joined: this machine is {identity.node_id}.\nNow: paceline up")


def _token(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        return getpass.getpass("Token, as paceline token printed it (it is not shown): ")
    from paceline.transport.trust.tokens import PREFIX

    text = ""
    # `paceline token` prints other words too, and goes on: what follows the token is not waited for.
    for line in sys.stdin if given == "-" else ():
        for word in line.split():
            if word.startswith(PREFIX):
                return word
        text = text or line.strip()
    if not text:
        raise ConfigError(
            "There is no token", "paceline token prints one, where the fleet began: paceline join TOKEN, or pipe it to paceline join -"
        )
    return text


def run_revoke(node: str, *, anyway: bool) -> None:
    """Put a node out of the fleet.

    Raises:
        UserError: it can't be done here, or there is no such node.
    """
    console = Console(highlight=False)
    if enrolment.revoke(enrolment.open_folder(), node, anyway=anyway):
        _say(console, f"Revoked {node}. The others hear of it from paceline up on this machine, or as soon as that runs.")
    else:
        _say(console, f"{node} was revoked before, and has not joined since.")


def run_ca_export(file: Path) -> None:
    """Back up the CA.

    Raises:
        UserError: it can't be done here.
    """
    enrolment.export_authority(enrolment.open_folder(), file)
    _say(Console(highlight=False), f"Wrote {file}. Who has it can let anybody into the fleet: keep it where nobody else can read it.")


def run_ca_import(file: Path) -> None:
    """Take over the CA from a backup.

    Raises:
        UserError: it can't be done here.
    """
    enrolment.import_authority(enrolment.open_folder(), file)
    _say(Console(highlight=False), "The fleet's CA is on this machine now: paceline token and paceline revoke work here.")
    _say(
        Console(highlight=False),
        "Which names are taken it knows from the members that paceline up here sees: let somebody in while all of them run.",
    )


def seconds(text: str) -> float:
    """What 90s, 30m, 1h, 2d or 1h30m is in seconds.

    Raises:
        ConfigError: it is none of these.
    """
    if not re.fullmatch(r"(\d{1,6}[smhd])+", text):
        raise ConfigError(f"{text!r} is no span of time", "Such as 30m, 1h or 2d")
    return float(sum(int(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)([smhd])", text)))


def _until(ttl_s: float) -> str:
    return f"until {time.strftime('%a %H:%M', time.localtime(time.time() + ttl_s))}"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
