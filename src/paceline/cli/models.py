"""`paceline models` and `paceline pull`: what is on this machine, and bringing a model here, from the fleet or from the hub, as `up` does first too."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from paceline.backends import cpu
from paceline.backends.memory import human
from paceline.backends.table import mlx_lacks, torch_refuses
from paceline.cli.progress import byte_bar
from paceline.cli.terminal import Terminal, own_command, print_json, print_lines, table_of
from paceline.core.errors import HubSilent, ModelNotFound, NotAtHub, PacelineError
from paceline.store.catalog import LocalModel, list_models, locations, resolve
from paceline.store.families import FAMILIES
from paceline.store.hf_folder import JsonObject, spec_from_config
from paceline.store.home import Home
from paceline.store.partial import list_parts
from paceline.store.selection import from_url, is_path, parse_ref


def is_here(ref: str, home: Home) -> bool:
    """Return whether a name means a model on this machine, or can only mean a path."""
    try:
        resolve(ref, home)
    except ModelNotFound:
        return is_path(ref)
    return True


def from_fleet(ref: str, home: Home, console: Console) -> LocalModel | None:
    """Fetch a model from another machine of the fleet, and trust that machine's word. Returns None without a fleet, or if no node has the model.

    Raises:
        UserError: the download can't be finished, or the model can't run.
    """
    if not home.is_in_fleet:
        return None
    from paceline.machine.weights import pull_from_fleet

    with byte_bar(console, f"Fetching {ref}", "Checking it") as progress:
        return pull_from_fleet(ref, home, progress, partial(print_lines, console))


def from_hub(ref: str, home: Home, console: Console) -> LocalModel:
    """Fetch the files that the hub lists under a name: from the fleet, if a machine has the same files, else from the hub.

    A name that is not a hub's name means a local path.

    Raises:
        NotAtHub, HubSilent: the hub does not say what the name means.
        UserError: the model can't be found, its download can't be finished, or it can't run.
    """
    from paceline.store.pull import pull

    mirror = None
    with byte_bar(console, f"Pulling {ref}", "Checking it") as progress:
        if home.is_in_fleet:
            from paceline.machine.weights import Pulls

            mirror = Pulls(home, progress, partial(print_lines, console)).mirror
        return pull(ref, home, progress, mirror=mirror)


def ensure(ref: str, console: Console) -> None:
    """Fetch a model that is not on this machine from the fleet, if a machine has it. Otherwise opening the model later reports what can be done.

    The hub decides which files a name means. If no hub can say, the fleet's word is trusted, and a line says so.

    Raises:
        UserError: the download can't be finished, or the model can't run.
    """
    from paceline.store.pull import list_at_hub

    home = Home.from_environment()
    if is_here(ref, home) or not home.is_in_fleet:
        return
    hub_ref = parse_ref(ref)
    try:
        listed = None if hub_ref is None else list_at_hub(hub_ref)
    except (HubSilent, NotAtHub) as error:
        print_lines(console, error.message)
        listed = None
    if listed is None:
        from_fleet(ref, home, console)
        return
    from paceline.machine.weights import Pulls

    with byte_bar(console, f"Fetching {ref}", "Checking it") as progress:
        Pulls(home, progress, partial(print_lines, console)).mirror(listed)


def lies_elsewhere(ref: str, console: Console) -> Path | None:
    """Return the path of a model outside this home, once its digest is in the caches that homes share. None for any other model.

    Raises:
        UserError: the model can't be read, or run.
    """
    from paceline.machine.capability import learn_digest

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


def run_models(*, as_json: bool) -> None:
    """Print a table and what is here in part, or JSON: a list of objects with the fields of `LocalModel`, of whole models alone."""
    home = Home.from_environment()
    models = list_models(home)
    if as_json:
        print_json([{**asdict(model), "path": str(model.path)} for model in models])
        return
    console = Terminal()
    parts = list_parts(home)
    if not models and not parts:
        console.print("No models here yet. `paceline pull org/name` gets one.")
        return
    table = table_of("name", "size", "format", "family", "context", left=("name", "format", "family"))
    for model in models:
        if model.problem is None:
            table.add_row(model.name, human(model.nbytes), model.format, model.family, str(model.context))
    if models:
        console.print(table)
    for model in models:
        if model.problem is None and (why := _why_calls_are_unread(model)):
            print_lines(console, f"{model.name}: {why}", style="dim")
    for part in parts:
        layers = ", ".join(map(str, part.layers))
        what = f"layers {layers} of {part.n_layers}, {human(part.nbytes)}" if part.problem is None else f"damaged: {part.problem}"
        print_lines(console, f"{part.name} in part: {what}; pull it to have all of it", style="dim")
    encoders = [model.name for model in models if model.problem is not None and _is_encoder(model)]
    for name in encoders:
        print_lines(console, f"{name} is an encoder: paceline up --embeddings {shlex.quote(name)}", style="dim")
    unusable = [model for model in models if model.problem is not None and model.name not in encoders]
    for model in unusable:
        print_lines(console, f"{model.name} can't be used: {model.problem}", style="yellow")
    if unusable:
        print_lines(console, f"Pull again to repair; to forget one, delete its folder under {home.models}")


def _is_encoder(model: LocalModel) -> bool:
    from paceline.store.encoder_files import is_encoder

    try:
        return is_encoder(model.path)
    except PacelineError:
        return False


def _why_calls_are_unread(model: LocalModel) -> str | None:
    """Return why the model's own form of tool calls is not used; None if it is, or if its template can't be read."""
    from paceline.server.formats.find import find_format
    from paceline.store.tokenizer_files import template_text

    try:
        return find_format(template_text(model.path)).why_unread
    except PacelineError:
        return None


_SIZES = {
    "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024,
    "vocab_size": 1024, "max_position_embeddings": 8192, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
}  # fmt: skip
"""Sizes of a small model that stands for its family."""


def run_supported(*, as_json: bool) -> None:
    """Print the families of models that run, and what runs each: a table, or JSON, a list of objects that also say why something does not."""
    rows = list[dict[str, str]]()
    for family in FAMILIES:
        spec = spec_from_config(JsonObject(Path("config.json"), {"model_type": family.name, **_SIZES, **family.example}))
        runs = {"compiled": cpu.refuses(spec), "torch": torch_refuses(spec), "mlx": mlx_lacks(spec)}
        named = {"family": family.name, "gguf": family.arch, "models": family.shown}
        rows.append(named | {by: reason or "yes" for by, reason in runs.items()})
    if as_json:
        print_json(rows)
        return
    columns = "family", "GGUF", "models", "compiled kernels", "torch, GPUs too", "MLX"
    table = table_of(*columns, left=columns)
    for family, gguf, models, *by in (row.values() for row in rows):
        table.add_row(family, gguf, models, *("yes" if said == "yes" else "no" for said in by))
    Terminal().print(table)


def run_pull(ref: str) -> None:
    """Pull `ref` and say what came: the hub says which files it is, and a node of the fleet that has them is asked before the hub is.

    Raises:
        UserError: it can't be found, finished, or run.
    """
    console = Terminal()
    home = Home.from_environment()
    ref = from_url(ref)
    if not console.is_terminal:
        print_lines(console, f"Pulling {ref}")
    try:
        model = _pulled(ref, home, console)
    except KeyboardInterrupt:
        console.print("Interrupted. What was fetched is kept: pull again to go on from there.")
        raise
    if is_embedder := model.problem is not None:
        print_lines(console, f"{model.name}: an encoder, which makes embeddings")
    else:
        print_lines(console, f"{model.name}: {human(model.nbytes)}, {model.format}, {model.family}, context {model.context}")
    if not model.path.is_relative_to(home.root):
        print_lines(console, f"It is used where it lies, not copied: {model.path}")
    print_lines(console, f"Try: {own_command()} up {'--embeddings' if is_embedder else '--model'} {shlex.quote(model.name)}")


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
        print_lines(console, f"{error.message}. The fleet is asked instead.")
        model = from_fleet(ref, home, console)
        if model is None:
            raise
        return model
