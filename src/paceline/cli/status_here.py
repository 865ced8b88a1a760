"""The endpoints of this machine, for `paceline status`: what each serves, how busy it is, and what it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.backends.memory import human
from paceline.cli.running import Running, running
from paceline.core.shown import printable
from paceline.store.home import Home

RATE_S = 0.5
"""Over which tokens a second are counted."""
_FIGURES = {
    "paceline_requests_running": "running",
    "paceline_requests_waiting": "waiting",
    "paceline_generated_tokens_total": "tokens",
    "paceline_kv_blocks_total": "blocks",
    "paceline_kv_blocks_used": "used",
    "process_resident_memory_bytes": "memory",
}


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """One endpoint, now."""

    url: str
    process: int
    state: str
    """What /health says: ok, busy, stalled, failed, stopping."""
    models: tuple[str, ...] = ()
    """Empty where the endpoint asks for a key that is not known here, as are all figures."""
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    kv_used: float | None = None
    """Share of the KV blocks that live answers hold."""
    memory_bytes: int | None = None
    """Of the process."""


def endpoints_here(home: Home) -> list[EndpointLoad]:
    """Every endpoint that runs here. Takes `RATE_S` where there is one."""
    found = running(home)
    before = [_figures(one) for one in found]
    if any(before):
        time.sleep(RATE_S)
    return [_load(one, first, _figures(one)) for one, first in zip(found, before, strict=True)]


def show_endpoints(endpoints: list[EndpointLoad], console: Console) -> None:
    """A table; nothing where there is no endpoint."""
    if not endpoints:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("endpoint", "serves", "state", "running", "waiting", "tokens/s", "KV in use", "memory"):
        table.add_column(heading, no_wrap=not console.is_terminal, overflow="fold")
    for one in endpoints:
        memory = "" if one.memory_bytes is None else human(one.memory_bytes)
        figures = (_shown(one.running), _shown(one.waiting), _shown(one.tokens_per_s, ".0f"), _shown(one.kv_used, ".0%"), memory)
        table.add_row(*map(Text, (f"{one.url}/v1", "\n".join(one.models) or "(it asks for a key)", one.state, *figures)))
    console.print(table)


def _shown(figure: float | None, form: str = "d") -> str:
    return "" if figure is None else format(figure, form)


def _load(one: Running, first: dict[str, float], last: dict[str, float]) -> EndpointLoad:
    state, models = "gone", list[str]()
    try:
        with one.client(_key()) as client:
            state = printable(str(client.get("/health").json()["status"]))
            models = [printable(str(model["id"])) for model in client.get("/v1/models").json().get("data", [])]
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if not last:
        return EndpointLoad(one.url, one.process, state, tuple(models))
    passed = last["at"] - first.get("at", 0)
    rate = max(0.0, last["tokens"] - first["tokens"]) / passed if first and passed > 0 else None
    share = last["used"] / last["blocks"] if last["blocks"] else None
    return EndpointLoad(
        *(one.url, one.process, state, tuple(models), int(last["running"]), int(last["waiting"]), rate, share, int(last["memory"]) or None)
    )


def _figures(one: Running) -> dict[str, float]:
    """Figures of the endpoint's own page, and when they were read; empty where it does not give them."""
    try:
        with one.client(_key()) as client:
            answer = client.get("/metrics")
        if answer.is_error:
            return {}
        found = {"at": time.monotonic(), **dict.fromkeys(_FIGURES.values(), 0.0)}
        return found | {_FIGURES[name]: value for name, value in _samples(answer.text) if name in _FIGURES}
    except (httpx.HTTPError, OSError, ValueError):
        return {}


def _samples(page: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.value


def _key() -> str | None:
    return os.environ.get("PACELINE_API_KEY")
