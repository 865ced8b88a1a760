"""Commands by which machines come to a fleet and go: `paceline init`, `token`, `join`, `revoke` and `ca`: their options and their words. What they do is in
`node.enrolment`, imported when one runs.
"""

from __future__ import annotations

import getpass
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.terminal import Terminal, counted, print_lines
from paceline.core.background import run_interruptibly
from paceline.core.errors import ConfigError
from paceline.core.ids import Trust

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

app = typer.Typer()
ca = typer.Typer(no_args_is_help=True, help="Keep a copy of the fleet's CA.")

Ttl = Annotated[str, typer.Option("--ttl", help="How long the token is good: 30m, 1h, 2d.")]
Uses = Annotated[int, typer.Option("--uses", min=1, help="How many machines may join by it.")]
JoinPort = Annotated[
    int | None,
    typer.Option("--join-port", min=1, max=65535, help="Where others join, while a token is good. Default: 8155, or the next one free."),
]
Addresses = Annotated[
    list[str] | None,
    typer.Option("--address", help="Where others reach this machine: host or host:port. May be repeated. Default: its interfaces."),
]
PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", help="Where its passphrase is. Default: the terminal is asked, if it has one.")
]
Name = Annotated[str | None, typer.Option("--name", help="What this machine is called. Default: its host's name and four random letters.")]


@app.command()
def init(
    name: Name = None,
    join_port: JoinPort = None,
    ttl: Ttl = "1h",
    uses: Uses = 1,
    address: Addresses = None,
) -> None:
    """Start a fleet: this machine is its first, and lets others in."""
    from paceline.node import enrolment

    console = Terminal()
    ttl_s = seconds(ttl, "--ttl")
    folder = enrolment.open_folder()
    identity = enrolment.start_fleet(folder, name, join_port)
    print_lines(console, f"Started a fleet; this machine is {identity.node_id}.", "\nNow, here:\n  paceline up")
    if address or enrolment.reachable_hosts():
        made = enrolment.invite(folder, ttl_s=ttl_s, uses=uses, addresses=address or [])
        print_lines(console, f"And on {_machines(uses)}, {_until(ttl_s)}:\n  paceline join\nwhich asks for this token:\n\n{made.text}\n")
        if uses == 1:
            print_lines(console, "For further machines: paceline token --uses N")
    else:
        print_lines(console, f"\n{enrolment.NO_ADDRESS}.\n{enrolment.NO_ADDRESS_HINT}\n")
    print_lines(console, "The fleet's CA is on this machine alone. Keep a copy elsewhere: paceline ca export FILE")


@app.command()
def token(
    ttl: Ttl = "1h",
    uses: Uses = 1,
    address: Addresses = None,
    trust: Annotated[
        Trust,
        typer.Option(
            "--trust", help="How far those who join are trusted: guests may ask, and get no requests, layers or models of others."
        ),
    ] = Trust.MEMBER,
    join_port: JoinPort = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Where no node runs here: end, instead of letting them in from here.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the tokens that machines may still join by, and make none.")] = False,
    void: Annotated[str | None, typer.Option("--void", metavar="ID|all", help="Void a token, by the id that --list shows.")] = None,
) -> None:
    """Print what other machines join by, and let them in: from the node that runs here, or else from here until Ctrl-C."""
    from paceline.node import enrolment

    console = Terminal()
    if void is not None:
        voided = enrolment.void_tokens(enrolment.open_folder(), void)
        print_lines(console, f"Voided {counted(voided, 'token')}: no machine joins by {'it' if voided == 1 else 'them'} any more.")
        return
    if list_:
        _list_tokens(console)
        return
    ttl_s = seconds(ttl, "--ttl")
    folder = enrolment.open_folder()
    made = enrolment.invite(folder, ttl_s=ttl_s, uses=uses, addresses=address or [], trust=trust, join_port=join_port)
    kind = "" if trust is Trust.MEMBER else f" ({trust})"

    def show_token(*, waits: bool) -> None:
        print_lines(console, f"On {_machines(uses)}{kind}, {_until(ttl_s)}: paceline join, which asks for this token:\n{made.text}\n")
        if waits:
            # On standard error: a script that reads the token should not read this.
            words = "Waiting for them. (Ctrl-C stops; then the token is good only while paceline up or paceline token runs here.)"
            print_lines(Terminal(stderr=True), words)

    if no_wait:
        show_token(waits=False)
        print_lines(console, "It is good while paceline up runs here.")
        return

    try:
        served_here = run_interruptibly(
            enrolment.wait_for_joins(
                folder,
                made,
                on_open=lambda here: show_token(waits=here),
                on_joined=lambda node_id: print_lines(console, f"{node_id} joined"),
            )
        )
    except KeyboardInterrupt:
        print_lines(console, "\nStopped. The token stays good while paceline up or paceline token runs here.")
        return
    print_lines(console, "The token is used up or has expired." if served_here else "The node that runs here lets them in.")


def _list_tokens(console: Terminal) -> None:
    """List the tokens that machines can still join with. Their secrets are not shown again."""
    from paceline.node import enrolment

    tokens = enrolment.list_tokens(enrolment.open_folder())
    for each in tokens:
        until = time.strftime("%a %d %b %H:%M", time.localtime(each.expires_at))
        came = f"; joined by it: {', '.join(each.joined)}" if each.joined else ""
        print_lines(console, f"{each.token_id}  {each.trust}, for {_machines(each.uses_left)} until {until}{came}")
    if not tokens:
        print_lines(console, "There is no token that a machine could join by.")


@app.command()
def join(
    token: Annotated[
        str | None,
        typer.Argument(
            envvar="PACELINE_TOKEN",
            help="What paceline token printed. Other users of this machine see what is typed here: '-' reads it from standard input, "
            "and without it a terminal is asked.",
        ),
    ] = None,
    name: Name = None,
) -> None:
    """Make this machine part of a fleet."""
    from paceline.node import enrolment

    folder = enrolment.open_folder()
    enrolment.check_free(folder)
    identity = run_interruptibly(enrolment.enrol(folder, _token(token), name))
    print_lines(Terminal(), f"Joined: this machine is {identity.node_id}.\nNow: paceline up")


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


@app.command()
def revoke(
    node: Annotated[str, typer.Argument(help="The node's id, as paceline status shows it.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Even if this machine never let such a node in.")] = False,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Leave open tokens as they are: who has one may join, that machine too.")
    ] = False,
) -> None:
    """Put a machine out of the fleet, at once and for good: its certificate and all open tokens are void."""
    from paceline.node import enrolment

    console = Terminal()
    done = enrolment.revoke(enrolment.open_folder(), node, anyway=anyway, keep_tokens=keep_tokens)
    if not done.is_news:
        print_lines(console, f"{node} was revoked before, and has not joined since.")
        return
    print_lines(console, f"Revoked {node}. The others hear of it from paceline up on this machine, or as soon as that runs.")
    if done.voided_tokens:
        print_lines(console, f"{counted(done.voided_tokens, 'open token')} voided with it, by which it could have come again.")
    elif keep_tokens:
        print_lines(console, "Open tokens were kept: who has one may join, that machine too. See paceline token --list")


@ca.command("export")
def ca_export(
    file: Annotated[Path, typer.Argument(help="A new file. A secret.")],
    passphrase_file: PassphraseFile = None,
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Do not encrypt it: who can read the file can let any machine in.")
    ] = False,
) -> None:
    """Back up the fleet's CA, encrypted with a passphrase."""
    from paceline.node import enrolment

    enrolment.export_authority(enrolment.open_folder(), file, lambda: None if no_passphrase else _passphrase(passphrase_file, twice=True))
    having = "it" if no_passphrase else "it and the passphrase"
    print_lines(Terminal(), f"Wrote {file}. Anyone with {having} can let any machine into the fleet.")


@ca.command("import")
def ca_import(
    file: Annotated[Path, typer.Argument(help="What paceline ca export wrote.")],
    passphrase_file: PassphraseFile = None,
) -> None:
    """Let this machine, a member, take over from the one that ran paceline init."""
    from paceline.node import enrolment

    enrolment.import_authority(enrolment.open_folder(), file, lambda: _passphrase(passphrase_file, twice=False))
    print_lines(
        Terminal(),
        "The fleet's CA is on this machine now: paceline token and paceline revoke work here.",
        "It learns which names are taken from the members that paceline up here sees: admit machines while all members run.",
    )


app.add_typer(ca, name="ca")


def _passphrase(file: Path | None, *, twice: bool) -> str:
    """Return the passphrase of a copy of the CA. It is never an argument, because other users of this machine can see arguments."""
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


def seconds(text: str, option: str) -> float:
    """Parse a span of time such as 90s, 30m, 1h, 2d or 1h30m into seconds.

    Raises:
        ConfigError: the text is not such a span.
    """
    if not re.fullmatch(r"(\d{1,6}[smhd])+", text):
        raise ConfigError(f"{option} {text!r} is no span of time", "Such as 30m, 1h or 2d.")
    return float(sum(int(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)([smhd])", text)))


def _machines(uses: int) -> str:
    return "one machine" if uses == 1 else f"up to {uses} machines"


def _until(ttl_s: float) -> str:
    return f"until {time.strftime('%a %H:%M', time.localtime(time.time() + ttl_s))}"
