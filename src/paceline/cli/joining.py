"""Commands by which machines come to a fleet and go, and their options. Their work is in `cli.enrolment`, imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.core.ids import Trust

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
    from paceline.cli.enrolment import run_init

    run_init(name=name, join_port=join_port, ttl=ttl, uses=uses, addresses=address or [])


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
    from paceline.cli.enrolment import run_token, run_token_list, run_token_void

    if void is not None:
        run_token_void(void)
        return
    if list_:
        run_token_list()
        return
    run_token(ttl=ttl, uses=uses, addresses=address or [], trust=trust, join_port=join_port, wait=not no_wait)


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
    from paceline.cli.enrolment import run_join

    run_join(token, name=name)


@app.command()
def revoke(
    node: Annotated[str, typer.Argument(help="The node's id, as paceline status shows it.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Even if this machine never let such a node in.")] = False,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Leave open tokens as they are: who has one may join, that machine too.")
    ] = False,
) -> None:
    """Put a machine out of the fleet, at once and for good: its certificate and all open tokens are void."""
    from paceline.cli.enrolment import run_revoke

    run_revoke(node, anyway=anyway, keep_tokens=keep_tokens)


@ca.command("export")
def ca_export(
    file: Annotated[Path, typer.Argument(help="A new file. A secret.")],
    passphrase_file: PassphraseFile = None,
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Do not encrypt it: who can read the file can let any machine in.")
    ] = False,
) -> None:
    """Back up the fleet's CA, encrypted with a passphrase."""
    from paceline.cli.enrolment import run_ca_export

    run_ca_export(file, passphrase_file=passphrase_file, encrypt=not no_passphrase)


@ca.command("import")
def ca_import(
    file: Annotated[Path, typer.Argument(help="What paceline ca export wrote.")],
    passphrase_file: PassphraseFile = None,
) -> None:
    """Let this machine, a member, take over from the one that ran paceline init."""
    from paceline.cli.enrolment import run_ca_import

    run_ca_import(file, passphrase_file=passphrase_file)


app.add_typer(ca, name="ca")
