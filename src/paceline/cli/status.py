"""`paceline status`: the endpoints of this machine with their load, and its fleet (`cli.fleet_status`)."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.cli.running import EndpointLoad, endpoints_here, fleet_homes, show_endpoints
from paceline.cli.terminal import Terminal, print_json, print_lines
from paceline.core.background import run_interruptibly
from paceline.core.errors import UserError
from paceline.store.home import Home

if TYPE_CHECKING:
    from paceline.core.errors import MembershipError
    from paceline.net.member.state import Looked

WATCH_S = 1.0


def run_status(*, as_json: bool, watch: bool) -> None:
    """Print this machine's endpoints and its fleet, once or whenever either changes.

    Raises:
        UserError: nothing runs here: no endpoint, and no node of a fleet; or this machine's node does not.
    """
    console, home = Terminal(), Home.from_environment()
    last: object = None
    while True:
        endpoints = endpoints_here(home)
        looked, error = _look(home, endpoints)
        facts = _facts(looked, endpoints)
        if facts != last:
            last = facts
            _print(looked, endpoints, console, as_json=as_json, watch=watch, alone=error is None)
        if error is not None and not looked:
            raise error
        if not endpoints and not looked:
            raise UserError(
                "Nothing runs here: no endpoint, and this machine is in no fleet",
                "Start an endpoint: paceline up. Begin a fleet: paceline init, or join one: paceline join.",
            )
        if not watch:
            return
        time.sleep(WATCH_S)


def _look(home: Home, endpoints: list[EndpointLoad]) -> tuple[list[Looked], MembershipError | None]:
    """Ask the running nodes for the state of their fleets. Returns also the error of the first node that does not answer."""
    homes = list(fleet_homes(home, endpoints))
    if not homes:
        return [], None
    from paceline.cli.fleet_status import look_at

    return run_interruptibly(look_at(homes))


def _facts(looked: list[Looked], endpoints: list[EndpointLoad]) -> object:
    """Return the facts that make `--watch` print again if they change: everything but the passing of time."""
    loads = [
        (one.url, one.state, one.models, one.requests, one.running, one.waiting, one.reading_tokens_read, one.engines) for one in endpoints
    ]
    if not looked:
        return loads, []
    from paceline.cli.fleet_status import facts

    return loads, [facts(each) for each in looked]


def _print(looked: list[Looked], endpoints: list[EndpointLoad], console: Console, *, as_json: bool, watch: bool, alone: bool) -> None:
    """Args: alone: this machine is in no fleet, where none was seen."""
    if as_json:
        if looked or endpoints:
            print_json(_said(looked[0] if looked else None, endpoints), on_one_line=watch)
        return
    show_endpoints(endpoints, console)
    if looked:
        from paceline.cli.fleet_status import show

        for each in looked:
            show(each, console)
    if endpoints and not looked and alone:
        print_lines(console, "This machine is in no fleet: paceline init, or paceline join, makes one of several.", style="dim")


def _said(looked: Looked | None, endpoints: list[EndpointLoad]) -> dict[str, Any]:
    """Return the whole status as JSON values, for programs."""
    said: dict[str, Any] = {"endpoints": [asdict(one) for one in endpoints]}
    if looked is not None:
        from paceline.cli.fleet_status import as_json

        said |= as_json(looked)
    return said
