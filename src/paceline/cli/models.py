"""`paceline models`: what is on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from paceline.backends.memory import human
from paceline.store.catalog import list_models
from paceline.store.home import Home


def run_models(*, as_json: bool) -> None:
    """Print a table, or JSON: a list of objects with the fields of `LocalModel`."""
    models = list_models(Home.from_environment())
    if as_json:
        json.dump([{**asdict(model), "path": str(model.path)} for model in models], sys.stdout, indent=2)
        print()
        return
    console = Console(highlight=False)
    if not models:
        console.print("No models here yet. `paceline pull org/name` gets one.")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("name", "size", "format", "family", "context"):
        table.add_column(heading, justify="right" if heading in {"size", "context"} else "left", overflow="fold")
    for model in models:
        sizes = (human(model.nbytes), model.format, model.family, str(model.context))
        table.add_row(model.name, *(sizes if model.problem is None else ("", f"damaged: {model.problem}", "", "")))
    console.print(table)
