"""Models that are not here yet, from the fleet, with a bar: what `pull` and `up` do before anything else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.progress import byte_bar
from paceline.core.errors import ModelNotFound
from paceline.store.home import Home

if TYPE_CHECKING:
    from paceline.store.catalog import LocalModel


def is_here(ref: str, home: Home) -> bool:
    """Whether a name is of a model on this machine, or could be of nothing else."""
    from paceline.store.catalog import resolve
    from paceline.store.selection import is_path

    try:
        resolve(ref, home)
    except ModelNotFound:
        return is_path(ref)
    return True


def from_fleet(ref: str, home: Home, console: Console) -> LocalModel | None:
    """A model from another machine of the fleet; None where there is no fleet, or no node has it.

    Raises:
        UserError: it can't be finished, or run.
    """
    # In no fleet there is no node to ask, and no need to import what would ask.
    if not (home.fleet / "identity.pem").exists():
        return None
    from paceline.node.weights import pull_from_fleet

    with byte_bar(console, f"Fetching {ref}", "Checking it") as progress:

        def announce(words: str) -> None:
            console.print(words, markup=False, soft_wrap=True)

        return pull_from_fleet(ref, home, progress, announce)


def ensure(ref: str, console: Console) -> None:
    """Bring a model that is not here from the fleet, if it has it. If not, opening it says what can be done.

    Raises:
        UserError: it can't be finished, or run.
    """
    home = Home.from_environment()
    if not is_here(ref, home):
        from_fleet(ref, home, console)


def lies_elsewhere(ref: str, console: Console) -> Path | None:
    """Where a model lies that is not among this home's, once its digest is known to all that share this home's caches. None for any other.

    Raises:
        UserError: it can't be read, or run.
    """
    from paceline.node.offers import learn_digest
    from paceline.store.catalog import locations, resolve

    home = Home.from_environment()
    try:
        location = resolve(ref, home)
    except ModelNotFound:
        return None  # the fleet may have it; if not, opening it says so
    if location in locations(home):
        return None
    with byte_bar(console, f"Reading {ref} for its digest, once", "Starting nodes") as progress:
        learn_digest(location, home, progress)
    return location.path
