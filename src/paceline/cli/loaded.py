"""The commands `ps`, `load`, `unload` and `rm`: ask the endpoints of this machine for their owner.

The note of an endpoint (`cli.running`) has the owner's key.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import httpx
from rich.console import Console

from paceline.backends.memory import human
from paceline.cli.endpoint import EndpointError
from paceline.cli.running import RunningEndpoint, running
from paceline.cli.terminal import Terminal, counted, print_json, print_lines, table_of
from paceline.core.errors import ConfigError, ModelNotFound
from paceline.core.text import printable
from paceline.store.home import Home

if TYPE_CHECKING:
    from paceline.fleet.card import ModelOffer

Use = dict[str, Any]  # fields of `machine.memory_budget.ModelUse`


def run_ps(*, as_json: bool) -> None:
    """Print a table for each endpoint of this machine, or JSON: a list of objects with its URL, its models and the engines that it shares."""
    found = [(one, _ask(one, "models", None)) for one in _endpoints()]
    if as_json:
        print_json([{"url": one.url, "models": said["models"], "engines": said["engines"]} for one, said in found])
        return
    from paceline.cli.shared_engines import read_states, state_lines

    console = Terminal()
    for one, said in found:
        if len(found) > 1:
            print_lines(console, f"{one.url}/v1")
        _show(said["models"], console)
        for state in read_states(said["engines"]) if said["engines"] else ():
            print_lines(console, *state_lines(state))


def run_load(ref: str) -> None:
    """Have a model loaded, which the fleet brings here first where it is not; raises UserError where it can't be."""
    from paceline.cli.models import ensure
    from paceline.store.catalog import locations, resolve

    console, home = Terminal(), Home.from_environment()
    one = _endpoints()[0]
    name = ref
    if ref not in {use["name"] for use in _in_use(one) if use["state"] == "loaded"}:
        ensure(ref, console)
        location = resolve(ref, home)
        print_lines(console, f"Loading {location.name}")
        name = _ask(one, "load", {"model": location.name if location in locations(home) else str(location.path)})["model"]
    print_lines(console, f"{name} is loaded at {one.url}/v1")


def run_unload(name: str, wait_s: float) -> None:
    """Have a model's memory freed once its answers have ended; raises UserError where it can't be."""
    endpoints = _endpoints()
    one = next((each for each in endpoints if name in {use["name"] for use in _in_use(each)}), endpoints[0])
    _ask(one, "unload", {"model": name, "wait_s": wait_s})
    print_lines(Terminal(), f"{name} is unloaded")


def run_rm(ref: str) -> None:
    """Delete a pulled model from the disk; raises UserError where it is loaded, or was not pulled."""
    from paceline.store.catalog import resolve
    from paceline.store.pull import remove_model

    home = Home.from_environment()
    path = ""  # of a model that is here in part
    with suppress(ModelNotFound):
        path = str(resolve(ref, home).path)
    for one in running(home):
        for use in _in_use(one):
            if use["path"] == path or (use["state"] == "loading" and use["name"] == ref):
                raise ConfigError(f"{ref} is loaded at {one.url}/v1", f"Unload it first: paceline unload {use['name']}")
    removed = remove_model(ref, home)
    what = f"; {removed.location.path} stays" if removed.kept else ""
    print_lines(Terminal(), f"{removed.location.name} is removed: {human(removed.freed_bytes)} freed{what}")


def _endpoints() -> list[RunningEndpoint]:
    """Raises ConfigError where there is none."""
    found = running(Home.from_environment())
    if not found:
        raise ConfigError("No endpoint runs on this machine", "Start one with `paceline up`.")
    return found


def _in_use(one: RunningEndpoint) -> list[Use]:
    return cast("list[Use]", _ask(one, "models", None)["models"])


def loaded_here() -> frozenset[str]:
    """Names of the models that endpoints of this machine have loaded."""
    found = set[str]()
    for one in running(Home.from_environment()):
        with suppress(EndpointError):
            found |= {str(use["name"]) for use in _in_use(one) if use["state"] == "loaded"}
    return frozenset(found)


def shared_here() -> list[ModelOffer]:
    """Return the models of engines that endpoints of this machine share and that answer now."""
    from paceline.cli.shared_engines import read_states

    found: list[ModelOffer] = []
    for one in running(Home.from_environment()):
        with suppress(EndpointError, ValueError):
            states = read_states(_ask(one, "models", None).get("engines", []))
            found += [model.offer for state in states if not state.trouble for model in state.models if not model.trouble]
    return found


def _ask(one: RunningEndpoint, what: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Ask an endpoint as its owner. Returns its answer; raises EndpointError if the endpoint can't be reached, or refuses."""
    try:
        with one.client(wait_s=None) as client:
            answer = client.get(f"/owner/{what}") if body is None else client.post(f"/owner/{what}", json=body)
        if answer.is_error:
            raise EndpointError(printable(str(answer.json()["error"]["message"]), 2000))
        return answer.json()
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        raise EndpointError(f"{one.url} can't be asked: {printable(str(error), 200)}", "See `paceline status`.") from error


def _show(uses: list[Use], console: Console) -> None:
    if not uses:
        console.print("No model is loaded.")
        return
    table = table_of("name", "weights", "KV", "memory", "context", "answers", "idle for", left=("name",))
    for use in uses:
        name, state = printable(str(use["name"])), use["state"]
        if state == "loading":
            table.add_row(name, f"loading, {use['percent']}%", *[""] * 5)
            continue
        kind = f"{use['stored_as']} {human(use['weights_bytes'])}" if use["weights_bytes"] else ""
        taken = [human(use[key]) if use[key] else "" for key in ("kv_bytes", "memory_bytes")]
        seconds = int(use["idle_s"])
        idle = "" if use["live"] else counted(seconds, "second") if seconds < 120 else counted(seconds // 60, "minute")
        table.add_row(name if state == "loaded" else f"{name} ({state})", kind, *taken, str(use["context"]), str(use["live"]), idle)
    console.print(table)
