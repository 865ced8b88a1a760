"""Models that are not here yet, from the fleet, with a bar: what `pull` and `up` do before anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.progress import byte_bar
from paceline.core.errors import HubSilent, ModelNotFound, NotAtHub
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
    """A model from another machine of the fleet, on its word; None where there is no fleet, or no node has it.

    Raises:
        UserError: it can't be finished, or run.
    """
    if not home.is_in_fleet:
        return None
    from paceline.machine.weights import pull_from_fleet

    with byte_bar(console, f"Fetching {ref}", "Checking it") as progress:
        return pull_from_fleet(ref, home, progress, _announcer(console))


def from_hub(ref: str, home: Home, console: Console) -> LocalModel:
    """What the hub lists under a name: from the fleet, where a machine has the same files, else from the hub. What is not a hub's name is what lies
    there.

    Raises:
        NotAtHub, HubSilent: the hub does not say what the name means.
        UserError: it can't be found, finished, or run.
    """
    from paceline.store.pull import pull

    mirror = None
    with byte_bar(console, f"Pulling {ref}", "Checking it") as progress:
        if home.is_in_fleet:
            from paceline.machine.weights import Pulls

            mirror = Pulls(home, progress, _announcer(console)).mirror
        return pull(ref, home, progress, mirror=mirror)


def ensure(ref: str, console: Console) -> None:
    """Bring a model that is not here from the fleet, if it has it. If not, opening it says what can be done. What the hub lists under a name decides
    which files those are; where no hub can say, the fleet's word is taken, and that is said.

    Raises:
        UserError: it can't be finished, or run.
    """
    from paceline.store.pull import list_at_hub
    from paceline.store.selection import parse_ref

    home = Home.from_environment()
    if is_here(ref, home) or not home.is_in_fleet:
        return
    hub_ref = parse_ref(ref)
    try:
        listed = None if hub_ref is None else list_at_hub(hub_ref)
    except (HubSilent, NotAtHub) as error:
        console.print(error.message, markup=False, soft_wrap=True)
        listed = None
    if listed is None:
        from_fleet(ref, home, console)
        return
    from paceline.machine.weights import Pulls

    with byte_bar(console, f"Fetching {ref}", "Checking it") as progress:
        Pulls(home, progress, _announcer(console)).mirror(listed)


def _announcer(console: Console) -> Callable[[str], None]:
    def announce(words: str) -> None:
        console.print(words, markup=False, soft_wrap=True)

    return announce


def lies_elsewhere(ref: str, console: Console) -> Path | None:
    """Where a model lies that is not among this home's, once its digest is known to all that share this home's caches. None for any other.

    Raises:
        UserError: it can't be read, or run.
    """
    from paceline.machine.capability import learn_digest
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
