"""`paceline share` itself: looks at an engine, and keeps in the home that it is offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.options import read_key
from paceline.cli.terminal import Terminal, counted, print_json, print_lines
from paceline.core.background import run_interruptibly
from paceline.core.errors import ConfigError, EngineGone
from paceline.core.text import printable
from paceline.fleet.engines import marks
from paceline.machine.foreign.shares import EngineShare, add_share, change_shares, check_url, read_shares
from paceline.store.home import Home


def run_share(url: str, *, name: str, models: tuple[str, ...], key_file: Path | None, plain_http: bool) -> None:
    """Look at an engine, say what it has, and offer it from now on.

    Raises:
        ConfigError: the address can't be shared, no engine answers there, or it has no such model.
    """
    console, home = Terminal(), Home.from_environment()
    kept, leaves = check_url(url, plain_http=plain_http)
    share = EngineShare(kept, name, models, read_key(None, key_file) or "", plain_http, leaves)
    read_shares(home)  # a damaged file is named before the engine is asked
    found = run_interruptibly(_look(share))
    unknown = [model for model in models if model not in found.models]
    if unknown:
        raise ConfigError(
            f"{found.engine} at {kept} has no model {printable(unknown[0])}",
            f"It has: {', '.join(map(printable, found.models)) or 'none'}.",
        )
    offered = models or found.models
    if name and len(offered) != 1:
        raise ConfigError(f"--name names one model, and {found.engine} has {len(offered)}", "Say which one with --models.")
    add_share(home, share)
    print_lines(
        console, f"{found.engine} at {kept}: {counted(len(offered), 'model')} shared: {', '.join(map(printable, offered)) or 'none yet'}"
    )
    if leaves:
        print_lines(console, "Prompts for it leave your network: it answers only requests that name its models.")
    if share.sharing.plain_http:
        print_lines(console, "Prompts for it cross the network unencrypted.")
    print_lines(console, "A node that runs here offers it within seconds. Otherwise: paceline up --no-model")


def run_unshare(url: str) -> None:
    """Offer an engine no more.

    Raises:
        ConfigError: it is not shared.
    """
    home = Home.from_environment()
    kept, _ = check_url(url, plain_http=True)

    def without(shares: Sequence[EngineShare]) -> list[EngineShare]:
        if all(one.url != kept for one in shares):
            raise ConfigError(f"{kept} is not shared", f"Shared: {', '.join(one.url for one in shares) or 'none'}.")
        return [one for one in shares if one.url != kept]

    change_shares(home, without)
    print_lines(Terminal(), f"{kept} is shared no more. The engine itself was not touched.")


def list_shares(*, as_json: bool) -> None:
    """Print what is shared, without keys."""
    shares = read_shares(Home.from_environment())
    if as_json:
        print_json([{"url": one.url, "name": one.name, "models": list(one.models), "has_key": bool(one.api_key)} for one in shares])
        return
    console = Terminal()
    for one in shares:
        what = ", ".join(map(printable, one.models)) or "all its models"
        words = marks(leaves_network=one.leaves_network, plain_http=one.sharing.plain_http)
        print_lines(
            console, f"{one.url}  {what}{f' as {printable(one.name)}' if one.name else ''}{''.join(f'  [{mark}]' for mark in words)}"
        )
    if not shares:
        print_lines(console, "No engine is shared. Share one: paceline share http://127.0.0.1:8080")


@dataclass(frozen=True, slots=True)
class Found:
    """An engine at a URL."""

    engine: str
    """Name and version."""
    models: tuple[str, ...]
    """Names that the engine uses."""


async def _look(share: EngineShare) -> Found:
    from paceline.engines.table import identify

    try:
        engine, identity = await identify(share.door)
        try:
            return Found(str(identity), tuple(model.name for model in await engine.models()))
        finally:
            await engine.close()
    except EngineGone as error:
        raise ConfigError(
            f"No engine that Paceline knows answers at {share.url}",
            "Start it first, or look at its port. Its address is the one without /v1.",
        ) from error
