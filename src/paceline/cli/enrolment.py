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

from paceline.cli.terminal import counted
from paceline.core.errors import ConfigError
from paceline.core.ids import Trust
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
    _say(
        console,
        f"\nNow, here:\n  paceline up\nAnd on {_machines(uses)}, {_until(ttl_s)}:\n  paceline join\nwhich asks for this token:\n\n{token.text}\n",
    )
    if uses == 1:
        _say(console, "For further machines: paceline token --uses N")
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
    kind = "" if trust is Trust.MEMBER else f" ({trust})"
    _say(console, f"On {_machines(uses)}{kind}, {_until(ttl_s)}: paceline join, which asks for this token:\n{token.text}\n")

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
    from paceline.net.trust.tokens import PREFIX

    text = ""
    # `paceline token` prints other words too, and goes on: what follows the token is not waited for.
    for line in sys.stdin if given == "-" else ():
        for word in line.split():
            if word.startswith(PREFIX):
                return word
        text = text or line.strip()
    if not text:
        raise ConfigError(
            "There is no token",
            "paceline token prints one, where the fleet began: paceline join asks for it, and paceline join - reads it from a pipe",
        )
    return text


def run_token_list() -> None:
    """Show the tokens that machines may still join by. Their secrets are not shown again.

    Raises:
        UserError: it can't be done here.
    """
    console = Console(highlight=False)
    tokens = enrolment.list_tokens(enrolment.open_folder())
    for token in tokens:
        until = time.strftime("%a %d %b %H:%M", time.localtime(token.expires_at))
        came = f"; joined by it: {', '.join(token.joined)}" if token.joined else ""
        _say(console, f"{token.token_id}  {token.trust}, for {_machines(token.uses_left)} until {until}{came}")
    if not tokens:
        _say(console, "There is no token that a machine could join by.")


def run_token_void(which: str) -> None:
    """Void a token, or all of them.

    Raises:
        UserError: it can't be done here, or there is no such token.
    """
    voided = enrolment.void_tokens(enrolment.open_folder(), which)
    _say(Console(highlight=False), f"Voided {counted(voided, 'token')}: no machine joins by {'it' if voided == 1 else 'them'} any more.")


def run_revoke(node: str, *, anyway: bool, keep_tokens: bool) -> None:
    """Put a node out of the fleet.

    Raises:
        UserError: it can't be done here, or there is no such node.
    """
    console = Console(highlight=False)
    done = enrolment.revoke(enrolment.open_folder(), node, anyway=anyway, keep_tokens=keep_tokens)
    if done.is_news:
        _say(console, f"Revoked {node}. The others hear of it from paceline up on this machine, or as soon as that runs.")
        if done.voided_tokens:
            _say(console, f"{counted(done.voided_tokens, 'open token')} voided with it, by which it could have come again.")
        elif keep_tokens:
            _say(console, "Open tokens were kept: who has one may join, that machine too. See paceline token --list")
    else:
        _say(console, f"{node} was revoked before, and has not joined since.")


def run_ca_export(file: Path, *, passphrase_file: Path | None, encrypt: bool) -> None:
    """Back up the CA.

    Raises:
        UserError: it can't be done here.
    """
    passphrase = _passphrase(passphrase_file, twice=True) if encrypt else None
    enrolment.export_authority(enrolment.open_folder(), file, passphrase)
    having = "it" if passphrase is None else "it and the passphrase"
    _say(Console(highlight=False), f"Wrote {file}. Who has {having} can let any machine into the fleet.")


def run_ca_import(file: Path, *, passphrase_file: Path | None) -> None:
    """Take over the CA from a backup.

    Raises:
        UserError: it can't be done here.
    """
    enrolment.import_authority(enrolment.open_folder(), file, lambda: _passphrase(passphrase_file, twice=False))
    _say(Console(highlight=False), "The fleet's CA is on this machine now: paceline token and paceline revoke work here.")
    _say(
        Console(highlight=False),
        "Which names are taken it knows from the members that paceline up here sees: let somebody in while all of them run.",
    )


def _passphrase(file: Path | None, *, twice: bool) -> str:
    """Of a copy of the CA. It is never an argument: other users of this machine see those."""
    if file is not None:
        try:
            return file.read_text().rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} can't be read", "It holds the passphrase, on one line") from error
    if not sys.stdin.isatty():
        raise ConfigError("There is no terminal to ask for a passphrase at", "--passphrase-file FILE, or to leave it out: --no-passphrase")
    text = getpass.getpass("Passphrase for the copy of the fleet's CA (it is not shown): ")
    if twice and text != getpass.getpass("The same again: "):
        raise ConfigError("The two differ", "Run it again")
    return text


def seconds(text: str) -> float:
    """What 90s, 30m, 1h, 2d or 1h30m is in seconds.

    Raises:
        ConfigError: it is none of these.
    """
    if not re.fullmatch(r"(\d{1,6}[smhd])+", text):
        raise ConfigError(f"{text!r} is no span of time", "Such as 30m, 1h or 2d")
    return float(sum(int(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)([smhd])", text)))


def _machines(uses: int) -> str:
    return "one machine" if uses == 1 else f"up to {uses} machines"


def _until(ttl_s: float) -> str:
    return f"until {time.strftime('%a %H:%M', time.localtime(time.time() + ttl_s))}"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
