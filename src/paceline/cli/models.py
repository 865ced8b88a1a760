"""`paceline models`: what is on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.table import Table

from paceline.backends.memory import human
from paceline.cli.terminal import Terminal
from paceline.store.catalog import list_models
from paceline.store.home import Home
from paceline.store.partial import list_parts


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
