"""`paceline pull`: bring a model here, with a bar. Interrupted, it says that the next pull goes on from there."""

from __future__ import annotations

import shlex

from rich.console import Console

from paceline.backends.memory import human
from paceline.cli.bring import from_fleet, is_here
from paceline.cli.progress import byte_bar
from paceline.cli.terminal import Terminal, own_command
from paceline.core.errors import DownloadError, FetchInProgress
from paceline.store.catalog import LocalModel
from paceline.store.home import Home
from paceline.store.pull import pull
from paceline.store.selection import parse_ref


def run_pull(ref: str) -> None:
    """Pull `ref`, from the fleet where somebody has it and else from the hub, and say what came.

    Raises:
        UserError: it can't be found, finished, or run.
    """
    console = Terminal()
    home = Home.from_environment()
    if not console.is_terminal:
        console.print(f"Pulling {ref}", markup=False, soft_wrap=True)
    try:
        model = (None if is_here(ref, home) else _from_fleet(ref, home, console)) or _from_hub(ref, home, console)
    except KeyboardInterrupt:
        console.print("Interrupted. What was fetched is kept: pull again to go on from there.")
        raise
    console.print(f"{model.name}: {human(model.nbytes)}, {model.format}, {model.family}, context {model.context}", markup=False)
    if not model.path.is_relative_to(home.root):
        console.print(f"It is used where it lies, not copied: {model.path}", markup=False, soft_wrap=True)
    console.print(f"Try: {own_command()} up --model {shlex.quote(model.name)}", markup=False, soft_wrap=True)


def _from_fleet(ref: str, home: Home, console: Console) -> LocalModel | None:
    try:
        return from_fleet(ref, home, console)
    except FetchInProgress:
        raise
    except DownloadError as error:
        if parse_ref(ref) is None:
            raise
        console.print(f"{error.message}. The hub is asked instead.", markup=False, soft_wrap=True)
        return None


def _from_hub(ref: str, home: Home, console: Console) -> LocalModel:
    with byte_bar(console, f"Pulling {ref}", "Checking it") as progress:
        return pull(ref, home, progress)
