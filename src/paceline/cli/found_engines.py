"""Engines that `paceline up` finds on this machine, and what becomes of them (`--engines`)."""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console

from paceline.cli.terminal import own_command, print_lines
from paceline.core.background import run_interruptibly
from paceline.core.text import printable
from paceline.engines.finding import FoundEngine, find_engines
from paceline.machine.foreign.shares import EngineShare, add_share, read_shares
from paceline.store.home import Home

Wanted = Literal["ask", "auto", "off"]


def found_shares(wanted: Wanted, home: Home, own_port: int, console: Console) -> tuple[EngineShare, ...]:
    """Look for engines on loopback, and return those to offer while this process runs. Only engines of this user are offered unasked.

    Args:
        wanted: `ask`: a person at a terminal decides for good, and otherwise the engine is named. `auto`: all are offered. `off`: nothing is looked for.
        own_port: port of this process's API, which is not asked.
    """
    if wanted == "off":
        return ()
    known = {share.url for share in read_shares(home)}
    found = [one for one in run_interruptibly(find_engines((own_port,))) if one.url not in known]
    if wanted == "auto":
        return tuple(EngineShare(one.url) for one in found if one.is_of_this_user)
    for one in found:
        _offer(one, home, console)
    return ()


def _offer(one: FoundEngine, home: Home, console: Console) -> None:
    what = f"{printable(str(one.identity))} runs at {one.url}"
    if not one.is_of_this_user:
        what += ", for another user"
    if sys.stdin.isatty() and console.is_terminal:
        console.print(f"{what}. Offer its models through Paceline? [y/N] ", end="", markup=False)
        if sys.stdin.readline().strip().lower() in {"y", "yes"}:
            add_share(home, EngineShare(one.url))
            return
    print_lines(console, f"{what}. To offer its models: {own_command()} share {one.url}")
