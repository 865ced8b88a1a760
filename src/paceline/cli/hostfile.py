"""`paceline hostfile`: writes the file of hosts that `mlx.launch` reads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.terminal import Terminal, own_command, print_lines
from paceline.core.errors import UserError

app = typer.Typer()


@app.command()
def hostfile(
    file: Annotated[Path, typer.Argument(help="To be written.")],
    host: Annotated[list[str], typer.Argument(help="The ranks' hosts, the one that serves first: a name or a number, or NAME=NUMBER.")],
) -> None:
    """Write a file of hosts for `mlx.launch` and `paceline launch`."""
    from paceline.cli.launch import create_hostfile, read_hostfile

    pairs = [each.partition("=") for each in host]
    if not all(name for name, _, _ in pairs):
        raise UserError("A host has no name", "Write each as NAME, or as NAME=NUMBER without blanks.")
    ranks = read_hostfile(create_hostfile([{"host": name, **({"ip": number} if number else {})} for name, _, number in pairs], file))
    start = f"mlx.launch --hostfile {shlex.quote(str(file))} -- {own_command()} launch"
    print_lines(Terminal(), f"{file} is written: a rank each for {', '.join(ranks)}; the first serves. Start them: {start}")
