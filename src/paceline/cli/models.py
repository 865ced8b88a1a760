"""`paceline models` and `paceline pull`: what is on this machine, and bringing a model here."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from paceline.backends.memory import human
from paceline.cli.bring import from_fleet, from_hub, is_here
from paceline.cli.terminal import Terminal, own_command
from paceline.core.errors import HubSilent, NotAtHub
from paceline.store.catalog import LocalModel, list_models
from paceline.store.home import Home
from paceline.store.partial import list_parts
from paceline.store.selection import from_url, parse_ref


def run_models(*, as_json: bool) -> None:
    """Print a table and what is here in part, or JSON: a list of objects with the fields of `LocalModel`, of whole models alone."""
    home = Home.from_environment()
    models = list_models(home)
    if as_json:
        json.dump([{**asdict(model), "path": str(model.path)} for model in models], sys.stdout, indent=2)
        print()
        return
    console = Terminal()
    parts = list_parts(home)
    if not models and not parts:
        console.print("No models here yet. `paceline pull org/name` gets one.")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("name", "size", "format", "family", "context"):
        table.add_column(heading, justify="right" if heading in {"size", "context"} else "left", overflow="fold")
    for model in models:
        if model.problem is None:
            table.add_row(model.name, human(model.nbytes), model.format, model.family, str(model.context))
    if models:
        console.print(table)
    for part in parts:
        layers = ", ".join(map(str, part.layers))
        what = f"layers {layers} of {part.n_layers}, {human(part.nbytes)}" if part.problem is None else f"damaged: {part.problem}"
        console.print(f"{part.name} in part: {what}; pull it to have all of it", markup=False, soft_wrap=True, style="dim")
    unusable = [model for model in models if model.problem is not None]
    for model in unusable:
        console.print(f"{model.name} can't be used: {model.problem}", markup=False, soft_wrap=True, style="yellow")
    if unusable:
        console.print(f"Pull again to repair; to forget one, delete its folder under {home.models}", markup=False, soft_wrap=True)


def run_pull(ref: str) -> None:
    """Pull `ref` and say what came: the hub says which files it is, and a node of the fleet that has them is asked before the hub is.

    Raises:
        UserError: it can't be found, finished, or run.
    """
    console = Terminal()
    home = Home.from_environment()
    ref = from_url(ref)
    if not console.is_terminal:
        console.print(f"Pulling {ref}", markup=False, soft_wrap=True)
    try:
        model = _pulled(ref, home, console)
    except KeyboardInterrupt:
        console.print("Interrupted. What was fetched is kept: pull again to go on from there.")
        raise
    console.print(f"{model.name}: {human(model.nbytes)}, {model.format}, {model.family}, context {model.context}", markup=False)
    if not model.path.is_relative_to(home.root):
        console.print(f"It is used where it lies, not copied: {model.path}", markup=False, soft_wrap=True)
    console.print(f"Try: {own_command()} up --model {shlex.quote(model.name)}", markup=False, soft_wrap=True)


def _pulled(ref: str, home: Home, console: Console) -> LocalModel:
    if is_here(ref, home):
        return from_hub(ref, home, console)
    if parse_ref(ref) is None:
        return from_fleet(ref, home, console) or from_hub(ref, home, console)
    try:
        return from_hub(ref, home, console)
    except (HubSilent, NotAtHub) as error:
        if not home.is_in_fleet:
            raise
        console.print(f"{error.message}. The fleet is asked instead.", markup=False, soft_wrap=True)
        model = from_fleet(ref, home, console)
        if model is None:
            raise
        return model
