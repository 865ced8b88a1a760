"""The endpoints that run on this machine for this home: the models each one serves and has loaded, its load, and its resources.

Each `paceline up` leaves a note of itself while it serves. A note counts only if its process runs and answers as the note says.
`cli.loaded` asks an endpoint by its note, with the owner's key in it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import ssl
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.backends.memory import human
from paceline.cli.terminal import counted, print_lines
from paceline.core.files import write_file
from paceline.core.text import printable
from paceline.server.settings import OWNER_HEADER
from paceline.store.home import Home, read_json_object
from paceline.store.kv_folder import BLOCK_COUNTS

if TYPE_CHECKING:
    import httpx

    from paceline.machine.foreign.state import EngineState

logger = logging.getLogger(__name__)

ANSWERS_S = 2.0
"""Seconds that an endpoint on this machine gets to answer."""


@dataclass(frozen=True, slots=True)
class RunningEndpoint:
    url: str
    process: int
    has_key: bool
    certificate: str = ""
    """File (PEM) that it is known by, where it speaks TLS."""
    owner_key: str = field(default="", repr=False)
    """For what only this machine's owner may do."""
    home: str = ""
    """Where it keeps its identity, if it is a node: that of nodes that are only tried is their own."""
    is_ready: bool = True
    """False: it still loads, and does not answer."""

    @property
    def authority(self) -> Path | None:
        """Return the path of the certificate, if there is one."""
        return Path(self.certificate) if self.certificate else None

    def client(self, api_key: str | None = None, wait_s: float | None = ANSWERS_S) -> httpx.Client:
        """Return a client for short requests to the endpoint.

        Args:
            wait_s: timeout for an answer; None: no timeout.

        Raises:
            OSError: its certificate can't be read any more.
        """
        import httpx  # a start takes a note of itself, and asks no endpoint

        headers = {"Authorization": f"Bearer {api_key}"} if api_key and self.has_key else {}
        verify = ssl.create_default_context(cafile=self.certificate) if self.certificate else True
        headers |= {OWNER_HEADER: self.owner_key} if self.owner_key else {}
        timeout = httpx.Timeout(ANSWERS_S, read=wait_s)
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, headers=headers, verify=verify)


@contextmanager
def announced(url: str, *, has_key: bool, certificate: Path | None, owner_key: str | None, is_ready: bool = True) -> Generator[None]:
    """Leave a note of this process's endpoint while the block runs. The system lets go of it, however the process ends."""
    home = Home.from_environment()
    place = home.running / f"{os.getpid()}.json"
    known_by = "" if certificate is None else str(certificate.absolute())
    note = RunningEndpoint(url, os.getpid(), has_key, known_by, owner_key or "", str(home.root), is_ready)
    with ExitStack() as held:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_file(place, json.dumps(asdict(note)).encode())
            fcntl.flock(held.enter_context(place.open("rb")), fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s can't be written (%s): chat and status will not find this endpoint by themselves", place, error.strerror)
        try:
            yield
        finally:
            with suppress(OSError):
                place.unlink()


def fleet_homes(home: Home, endpoints: Iterable[RunningEndpoint | EndpointLoad]) -> list[Home]:
    """Return the homes of this machine's own node and of the nodes that `paceline up --local-nodes` runs here."""
    homes = dict.fromkeys([home, *(Home(Path(one.home)) for one in endpoints if one.home)])
    return [each for each in homes if each.is_in_fleet]


def starting(home: Home) -> list[RunningEndpoint]:
    """Endpoints that do not answer yet: they load, or compile what they run."""
    notes = [(place, endpoint) for place in home.running.glob("*.json") if (endpoint := _read(place)) is not None and not endpoint.is_ready]
    return [endpoint for place, endpoint in notes if _is_held(place)]


def _is_held(place: Path) -> bool:
    """Return whether the process that wrote a note lives. Its number does not prove that: another process may have it by now."""
    try:
        with place.open("rb") as note:
            fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def running(home: Home) -> list[RunningEndpoint]:
    """Endpoints that answer, the one that started last first. Notes of processes that are gone are removed."""
    found: list[tuple[float, RunningEndpoint]] = []
    for place in home.running.glob("*.json"):
        endpoint = _read(place)
        if endpoint is None or not lives(endpoint.process):
            with suppress(OSError):
                place.unlink()
        elif endpoint.is_ready and _answers(endpoint):
            with suppress(OSError):
                found.append((place.stat().st_mtime, endpoint))
    return [endpoint for _, endpoint in sorted(found, key=lambda each: each[0], reverse=True)]


def _read(place: Path) -> RunningEndpoint | None:
    fields = read_json_object(place) or {}
    match fields:
        case {"url": str(url), "process": int(process), "has_key": bool(has_key), "certificate": str(certificate)} if process > 0:
            owner_key, root = (str(fields.get(each, "")) for each in ("owner_key", "home"))
            return RunningEndpoint(url, process, has_key, certificate, owner_key, root, fields.get("is_ready") is not False)
        case _:
            return None


def lives(process: int) -> bool:
    """Return whether a process with this id runs, under any user."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _answers(endpoint: RunningEndpoint) -> bool:
    import httpx

    try:
        with endpoint.client() as client:
            answer = client.get("/health")
    except (httpx.HTTPError, OSError):
        return False
    return isinstance(answer.headers.get("content-type"), str) and "status" in answer.text


RATE_S = 0.5
"""Over which tokens a second are counted."""
GONE, STARTING = "gone", "starting"
_FIGURES = {
    "paceline_requests_running": "running",
    "paceline_requests_waiting": "waiting",
    "paceline_reading_tokens": "reading",
    "paceline_reading_tokens_read": "reading_read",
    "paceline_generated_tokens_total": "tokens",
    "paceline_kv_blocks_total": "blocks",
    "paceline_kv_blocks_used": "used",
    "process_resident_memory_bytes": "memory",
    "paceline_http_in_flight": "requests",
    "paceline_ttft_seconds_count": "first_tokens",
    "paceline_inter_token_seconds_count": "later_tokens",
    "paceline_kv_disk_bytes": "disk_bytes",
    "paceline_kv_leases": "leases",
    **{f"paceline_kv_disk_blocks_total {what}": what for what in BLOCK_COUNTS},
    **{f"paceline_kv_peer_blocks_total {what}": f"peer_{what}" for what in ("fetched", "pushed", "missed", "given")},
    "paceline_kv_transport_bytes_total taken nixl": "peer_nixl",
}


_PUSHES, NOT_WHOLE = "paceline_kv_pushes_total ", "not whole: "
_LIES, LIED = "paceline_kv_lies_total ", "lied: "


@dataclass(frozen=True, slots=True)
class KvDiskLoad:
    """KV that an endpoint keeps on the disk. Blocks are counted since it started."""

    n_bytes: int
    """Bytes of all models and processes, at the last look."""
    read: int
    missed: int
    """Asked for, and not there or not whole."""
    written: int
    failed: int
    """Not written, or damaged when they were read."""
    evicted: int
    read_per_s: float | None
    written_per_s: float | None

    def __str__(self) -> str:
        rates = [f" ({rate:.0f}/s)" if rate else "" for rate in (self.read_per_s, self.written_per_s)]
        done = f"{self.read} read{rates[0]}, {self.missed} missed, {self.written} written{rates[1]}, {self.failed} failed, {self.evicted} evicted"
        return f"{human(self.n_bytes)}; blocks: {done}"


@dataclass(frozen=True, slots=True)
class KvPeerLoad:
    """Blocks of KV between an endpoint's node and others, since it started."""

    fetched: int
    missed: int
    """Asked for, and not come: they were computed."""
    given: int
    pushed: int = 0
    """Computed there for this node."""
    fetched_per_s: float | None = None
    pushed_per_s: float | None = None
    leases: int = 0
    """Prompts that are computed here for others now."""
    nixl_bytes: int = 0
    """Bytes of the KV received that were read out of another process's memory."""
    failed: Mapping[str, int] = field(default_factory=dict[str, int])
    """Prompts that did not come whole from elsewhere, by how that ended."""
    liars: Sequence[str] = ()
    """Nodes that gave wrong KV."""

    def __str__(self) -> str:
        rates = [f" ({rate:.0f}/s)" if rate else "" for rate in (self.fetched_per_s, self.pushed_per_s)]
        pushed = f", {self.pushed} computed there{rates[1]}" if self.pushed else ""
        nixl = f"; {human(self.nixl_bytes)} came by NIXL" if self.nixl_bytes else ""
        leases = f"; {counted(self.leases, 'prompt')} computed here for others now" if self.leases else ""
        failed = f"; prompts not whole: {', '.join(f'{count} {end}' for end, count in self.failed.items())}" if self.failed else ""
        lied = f"; WRONG KV CAME FROM {', '.join(self.liars)}: left out for an hour" if self.liars else ""
        return f"{self.fetched} fetched{rates[0]}{pushed}, {self.missed} missed, {self.given} given{nixl}{leases}{failed}{lied}"


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """One endpoint, now."""

    url: str
    process: int
    state: str
    """Status that /health reports: ok, stalled, recovering, failed, stopping."""
    models: tuple[str, ...] | None = None
    """None, as are all figures, where the endpoint asks for a key that is not known here."""
    requests: int | None = None
    """Requests that its clients wait for, on whatever machine they run."""
    client_tokens_per_s: float | None = None
    """Tokens per second that its clients get."""
    running: int | None = None
    """Sequences that this process itself runs, for its clients or for other machines'; so are all figures below."""
    waiting: int | None = None
    reading_tokens_read: int | None = None
    """Tokens that were read of the prompts being read now..."""
    reading_tokens: int | None = None
    """...and all of their tokens."""
    tokens_per_s: float | None = None
    kv_used: float | None = None
    """Share of the KV blocks that live answers hold."""
    memory_bytes: int | None = None
    """Memory of the process, in bytes."""
    kv_disk: KvDiskLoad | None = None
    """None: it keeps none there."""
    kv_peers: KvPeerLoad | None = None
    """None: nothing came or went."""
    home: str = ""
    """Home of the endpoint, see `RunningEndpoint`."""
    engines: tuple[EngineState, ...] = ()
    """Engines of other makers that it shares; none where the owner's key is not known here."""
    error: str = ""
    """Error that /health reports; empty if the status is ok."""
    failing: tuple[str, ...] = ()
    """Parts that /health reports as failing, though its status may be ok."""


def endpoints_here(home: Home) -> list[EndpointLoad]:
    """Return every endpoint that runs here, and last those that still start. Takes `RATE_S` if an endpoint runs."""
    found = running(home)
    before = [_figures(one) for one in found]
    if any(before):
        time.sleep(RATE_S)
    loads = [_load(one, first, _figures(one)) for one, first in zip(found, before, strict=True)]
    return loads + [EndpointLoad(one.url, one.process, STARTING, home=one.home) for one in starting(home)]


def show_endpoints(endpoints: list[EndpointLoad], console: Console) -> None:
    """Three lines for each, and one for KV on the disk and of other machines each, where there is some."""
    for one in endpoints:
        serves = (
            "asks for a key, which PACELINE_API_KEY can give" if one.models is None else f"serves {', '.join(one.models) or 'no model now'}"
        )
        state = f"{one.state} ({one.error})" if one.error else one.state
        lines = [f"{one.url}/v1: {state}" + (f", {serves}" if one.state not in (GONE, STARTING) else "")]
        if one.requests is not None:
            rate = "" if one.client_tokens_per_s is None else f", {one.client_tokens_per_s:.0f} tokens/s"
            lines.append(f"  its clients: {counted(one.requests, 'request')} under way{rate}")
        if one.running is not None:
            parts = [f"{one.running} running", f"{one.waiting} waiting"]
            parts += [f"{one.reading_tokens_read} of {one.reading_tokens} prompt tokens read"] if one.reading_tokens else []
            parts += [] if one.tokens_per_s is None else [f"{one.tokens_per_s:.0f} tokens/s"]
            parts += [] if one.kv_used is None else [f"{one.kv_used:.0%} of KV in use"]
            parts += [] if one.memory_bytes is None else [human(one.memory_bytes)]
            lines.append(f"  this process: {', '.join(parts)}")
        if one.kv_disk is not None:
            lines.append(f"  KV on the disk: {one.kv_disk}")
        if one.kv_peers is not None:
            lines.append(f"  KV of other machines: blocks: {one.kv_peers}")
        if one.engines:
            from paceline.cli.shared_engines import state_lines

            lines += [f"  {line}" for state in one.engines for line in state_lines(state)]
        if one.failing:
            lines.append(f"  keeps failing: {'; '.join(one.failing)}")
        print_lines(console, *lines)


def _load(one: RunningEndpoint, first: dict[str, float], last: dict[str, float]) -> EndpointLoad:
    import httpx

    (state, error, failing), models, engines = (GONE, "", ()), None, ()
    try:
        with one.client(os.environ.get("PACELINE_API_KEY")) as client:
            health = client.get("/health").json()
            state, error, failing = _read_health(health)
            models = tuple(printable(str(model["id"])) for model in client.get("/v1/models").json()["data"])
            engines = _engines(client) if one.owner_key else ()
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if not last:
        return EndpointLoad(one.url, one.process, state, models, home=one.home, engines=engines, error=error, failing=failing)

    peers = ("peer_fetched", "peer_missed", "peer_given", "peer_pushed")

    def rate(*names: str) -> float | None:
        passed_s = last["at"] - first.get("at", last["at"])
        return sum(max(0.0, last[name] - first[name]) for name in names) / passed_s if passed_s > 0 else None

    return EndpointLoad(
        one.url,
        one.process,
        state,
        models,
        requests=max(0, int(last["requests"]) - 1),  # but for the one that asked
        client_tokens_per_s=rate("first_tokens", "later_tokens"),
        running=int(last["running"]),
        waiting=int(last["waiting"]),
        reading_tokens_read=int(last["reading_read"]),
        reading_tokens=int(last["reading"]),
        tokens_per_s=rate("tokens"),
        kv_used=last["used"] / last["blocks"] if last["blocks"] else None,
        memory_bytes=int(last["memory"]) or None,
        kv_disk=KvDiskLoad(
            int(last["disk_bytes"]),
            *(int(last[what]) for what in ("read", "missed", "written")),
            failed=int(last["failed"] + last["damaged"]),
            evicted=int(last["evicted"]),
            read_per_s=rate("read"),
            written_per_s=rate("written"),
        )
        if last["keeps"]
        else None,
        kv_peers=KvPeerLoad(
            *(int(last[what]) for what in peers),
            fetched_per_s=rate("peer_fetched"),
            pushed_per_s=rate("peer_pushed"),
            leases=int(last["leases"]),
            nixl_bytes=int(last["peer_nixl"]),
            failed={name.removeprefix(NOT_WHOLE): int(count) for name, count in last.items() if name.startswith(NOT_WHOLE) and count},
            liars=sorted(name.removeprefix(LIED) for name in last if name.startswith(LIED)),
        )
        if any(last[what] for what in (*peers, "leases"))
        else None,
        home=one.home,
        engines=engines,
        error=error,
        failing=failing,
    )


def _engines(client: httpx.Client) -> tuple[EngineState, ...]:
    """Ask an endpoint which engines it shares. An older one shares none."""
    said = client.get("/owner/models").json().get("engines")
    if not said:
        return ()
    from paceline.cli.shared_engines import read_states

    return read_states(said)


def _read_health(health: Mapping[str, object]) -> tuple[str, str, tuple[str, ...]]:
    """Read an endpoint's /health: its status, its error, and the parts that fail while it goes on. Raises KeyError if it has no status."""
    failing = health.get("failing")
    each = failing if isinstance(failing, list) else []
    return printable(str(health["status"])), printable(str(health.get("error") or ""), 300), tuple(printable(str(one), 300) for one in each)


def _figures(one: RunningEndpoint) -> dict[str, float]:
    """Figures of the endpoint's own page, and when they were read; empty where it does not give them."""
    import httpx

    try:
        with one.client(os.environ.get("PACELINE_API_KEY")) as client:
            answer = client.get("/metrics")
        if answer.is_error:
            return {}
        samples = dict(_samples(answer.text))
        found = {"at": time.monotonic(), **{figure: samples.get(name, 0.0) for name, figure in _FIGURES.items()}}
        ends = {name.removeprefix(_PUSHES): count for name, count in samples.items() if name.startswith(_PUSHES)}
        found |= {NOT_WHOLE + end: count for end, count in ends.items() if end not in {"whole", "left"}}
        found |= {name.replace(_LIES, LIED): count for name, count in samples.items() if name.startswith(_LIES)}
        return {**found, "keeps": float("paceline_kv_disk_blocks_total read" in samples)}
    except (httpx.HTTPError, OSError, ValueError):
        return {}


def _samples(page: str) -> Iterator[tuple[str, float]]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = (sample.labels.get(label) for label in ("what", "transport", "outcome", "node"))
            yield " ".join([sample.name, *filter(None, labels)]), sample.value
