"""A model too large for any one node, over three: each under a memory limit that bites, layers fetched from the first over loopback; then a kill.

Law: the fleet is what a person would have: `paceline up` with homes of their own, that share compiled kernels and nothing else. Bytes are compared with
those of one unlimited node that starts in the same run.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.fakes.fleets import TestFleet
from tests.fakes.memory_limit import MemoryLimit, NoMemoryLimitsError

from endpoint import Endpoint
from paceline.core.errors import MembershipError
from paceline.core.ids import NodeId
from paceline.core.ports import find_port
from paceline.fleet.card import ModelOffer
from paceline.net.member.state import look
from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home
from size_builds import Build, fresh_home, read_into_cache
from size_load import warm_up
from size_rows import Row

GIB = 1 << 30
LIMIT_BYTES = int(2.5 * GIB)
NAMES = ("one", "two", "three", "four")
PROMPT = "The history of bicycle racing begins with"
ANSWER = 48
KILL_AT = 16
OPEN_S = 1200.0
MODEL_OPTIONS = ("--context", "2048", "--kv-tokens", "4096", "--draft", "off")


@dataclass(slots=True)
class Answer:
    """What a client got, and when."""

    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """When, and which."""

    @property
    def longest_gap_s(self) -> float:
        """Between two pieces of text."""
        return max(later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))


def ask(port: int, tokens: int = ANSWER, at: tuple[int, threading.Event] | None = None, prompt: str = PROMPT) -> Answer:
    """A greedy completion, streamed; `at` so many pieces an event is set."""
    answer, url = Answer(), f"http://127.0.0.1:{port}/v1"
    with httpx.Client(timeout=OPEN_S, trust_env=False) as client:
        name = client.get(f"{url}/models").json()["data"][0]["id"]
        body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        with client.stream("POST", f"{url}/completions", json={**body, "stream_options": {"include_events": True}}) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("event: "):
                    answer.events.append((time.perf_counter(), line.removeprefix("event: ")))
                elif line.startswith("data: {"):
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        raise RuntimeError(f"the answer broke off: {piece['error']}")
                    if piece.get("choices") and piece["choices"][0].get("text"):
                        answer.text += piece["choices"][0]["text"]
                        answer.arrivals_s.append(time.perf_counter())
                        if at is not None and len(answer.arrivals_s) == at[0]:
                            at[1].set()
    return answer


class Nodes:
    """Nodes of one fleet on this machine, each limited."""

    def __init__(self, build: Build, scratch: Path, threads: int, limit_bytes: int, stack: ExitStack) -> None:
        fleet = TestFleet()
        self.homes: dict[str, Path] = {}
        self.limits: dict[str, MemoryLimit] = {}
        self.running: dict[str, Endpoint] = {}
        self._build, self._scratch, self._threads, self._stack = build, scratch, threads, stack
        for name in NAMES:
            home = self.homes[name] = stack.enter_context(fresh_home(scratch, name))
            folder = FleetFolder(Home(home).fleet)
            folder.write_secret(folder.identity_file, fleet.member(name).to_pem())
            self.limits[name] = stack.enter_context(MemoryLimit(name, limit_bytes))
        self._port = find_port("127.0.0.1")

    def start(self, name: str, *options: str) -> Endpoint:
        """Start a node; returns once it serves."""
        first = name == NAMES[0]
        fleet = ["--fleet-host", "127.0.0.1", "--no-mdns", "--fleet-preset", "desk,exchange_s=0.5,restamp_s=2,ttl_s=10"]
        fleet += ["--fleet-port", str(self._port)] if first else ["--fleet-port", "0", "--peer", f"127.0.0.1:{self._port}"]
        self.running[name] = self._stack.enter_context(
            _ended(
                Endpoint(
                    *options,
                    *fleet,
                    "--threads",
                    str(self._threads),
                    log=self.log(name),
                    prefix=self.limits[name].prefix,
                    environment=self._build.environment(self.homes[name]),
                    start_s=OPEN_S,
                )
            )
        )
        return self.running[name]

    def host(self, name: str) -> Endpoint:
        return self.start(name, "--no-model", "--serve-shards")

    def log(self, name: str) -> Path:
        return self._scratch / f"{name}.log"

    @property
    def kills(self) -> int:
        return sum(limit.kills for limit in self.limits.values())


@contextmanager
def _ended(endpoint: Endpoint) -> Generator[Endpoint]:
    try:
        yield endpoint
    finally:
        endpoint.close()


def stages(endpoint: Endpoint, log: Path) -> dict[str, str]:
    """Layers by node, of the route that was opened last, as the orchestrator says: `three` may have `8-19`."""
    said = "".join(endpoint.said) + log.read_text(errors="replace")
    routes = re.findall(r"(?:goes on over|Loaded in [^\n]*: )([^\n]* on [^\n]*)", said)
    found = re.findall(r"(\d+(?: to |-)\d+) on (\w+)", routes[-1]) if routes else []
    return {node: layers.replace(" to ", "-") for layers, node in found}


class LoadWatch:
    """Looks at what a node says of the layers it has for others, some times a second, in a thread."""

    def __init__(self, name: str, home: Path) -> None:
        self._name, self._home = NodeId(name), Home(home)
        self.loaded_s: float | None = None
        """When layers were first seen to be there, by `time.perf_counter`."""
        self.layers = ""
        """Those that are there, as `stages` has them."""
        self.percent = 0
        """Of what was last seen to come."""
        self.loaded = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2) and self.loaded_s is None:
            with suppress(MembershipError):
                self._note(self._shards())

    def _shards(self) -> list[ModelOffer]:
        live = asyncio.run(look(FleetFolder(self._home.fleet))).sight.view.get(self._name)
        return [] if live is None else [offer for offer in live.card.models if offer.shard is not None]

    def _note(self, shards: list[ModelOffer]) -> None:
        for offer in shards:
            if offer.warm and offer.shard is not None:
                self.layers = str(offer.shard.layers)
                self.loaded_s = time.perf_counter()
                self.loaded.set()
            elif offer.shard is not None:
                self.percent = offer.shard.loaded_percent

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def measure(build: Build, model: Path, scratch: Path, *, threads: int, limit_bytes: int = LIMIT_BYTES) -> Iterator[Row]:
    """Start, answer, lose a stage twice: once with a spare that has no layers yet, once with one that has."""
    for log in scratch.glob("*.log"):
        log.unlink()  # of runs before
    warm_up(build, scratch, threads, scratch / "warm-up.log")
    read_into_cache(model)
    with fresh_home(scratch, "alone") as home:
        alone = Endpoint(
            "--model",
            str(model),
            "--threads",
            str(threads),
            *MODEL_OPTIONS,
            log=scratch / "alone.log",
            environment=build.environment(home),
            start_s=OPEN_S,
        )
        try:
            right = ask(alone.port)
            alone_s = right.arrivals_s[0] - alone.began_s
        finally:
            alone.close()
    size = model.stat().st_size
    with ExitStack() as stack:
        try:
            nodes = Nodes(build, scratch, threads, limit_bytes, stack)
        except NoMemoryLimitsError as error:
            yield Row("three limited nodes", f"not measured: {error}", "2.5x", "1.5x", None, "needs root, or a control group of one's own")
            return
        for name in NAMES[1:3]:
            nodes.host(name)
        first = nodes.start(NAMES[0], "--model", str(model), "--pipeline", *MODEL_OPTIONS)
        opened = ask(first.port)
        opened_s = opened.arrivals_s[0] - first.began_s
        shown = sorted(set(re.findall(r"\d+ %", "".join(first.said))), key=lambda each: int(each.split()[0]))
        route = stages(first, nodes.log(NAMES[0]))
        yield Row(
            f"{model.name} ({size / GIB:.1f} GiB) over three nodes of {limit_bytes / GIB:.1f} GiB, cold: from command to first answer",
            f"{opened_s:.1f} s, one unlimited node {alone_s:.1f} s: {opened_s / alone_s:.2f}x; bytes {'equal' if opened.text == right.text else 'DIFFER'}",
            "2.5x, with progress shown",
            "1.5x",
            opened_s <= 2.5 * alone_s and bool(shown) and opened.text == right.text and not nodes.kills,
            f"route {route or 'not found'}; progress shown: {', '.join(shown) or 'none'}; killed for memory: {nodes.kills}",
            {"opened_s": opened_s, "alone_s": alone_s, "route": route},
        )
        for loaded in (False, True):
            yield _kill(nodes, first, right, loaded=loaded)


def _kill(nodes: Nodes, first: Endpoint, right: Answer, *, loaded: bool) -> Row:
    """SIGKILL to a stage in the middle of an answer, beside a spare."""
    route = stages(first, nodes.log(NAMES[0]))
    spare = next(name for name in NAMES[1:] if name not in route)
    began_s = time.perf_counter()
    prefill = ask(first.port, 1, prompt=PROMPT + right.text[: len(right.text) * KILL_AT // ANSWER])
    prefill_s = prefill.arrivals_s[0] - began_s
    nodes.host(spare)
    watch = LoadWatch(spare, nodes.homes[spare])
    if loaded and not watch.loaded.wait(OPEN_S):
        raise RuntimeError(f"{spare} did not become a spare: its log is {nodes.log(spare)}")
    # A spare stands by for one of the spans; one that has nothing yet may do so for any.
    victim = next(name for name in NAMES[1:] if name in route and (not loaded or route[name] == watch.layers))
    reached = threading.Event()
    had = -1

    def kill() -> None:
        nonlocal had
        reached.wait(OPEN_S)
        had = 100 if watch.loaded.is_set() else watch.percent
        nodes.running.pop(victim).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        seen = ask(first.port, at=(KILL_AT, reached))
    finally:
        reached.set()
        killer.join()
        watch.end()
    beyond_s = seen.longest_gap_s - prefill_s
    # From when the client was told that layers are being loaded: the spare is asked then.
    told_s = next((at_s for at_s, name in seen.events if name == "shard_status"), None)
    load_s = 0.0 if loaded or told_s is None or watch.loaded_s is None else watch.loaded_s - told_s
    most_s, reach_s = (2.0, 0.5) if loaded else (load_s + 3.0, load_s + 1.0)
    asked, reach = ("2 s", "0.5 s") if loaded else (f"its load time + 3 s = {most_s:.1f} s", f"+ 1 s = {reach_s:.1f} s")
    return Row(
        f"kill -9 of a stage ({victim}), with a spare ({spare}) that has {'loaded' if loaded else 'not loaded'} its layers: gap beyond prefill",
        f"{beyond_s:.2f} s ({seen.longest_gap_s:.2f} s of which a prefill {prefill_s:.2f}); bytes {'equal' if seen.text == right.text else 'DIFFER'}",
        asked,
        reach,
        beyond_s <= most_s and seen.text == right.text and not nodes.kills,
        f"token {KILL_AT} of {ANSWER}; route {route}; spare at {had} % when the stage was killed, its load then {load_s:.1f} s; "
        f"killed for memory: {nodes.kills}; events {', '.join(name for _, name in seen.events) or 'none'}",
        {"gap_s": seen.longest_gap_s, "prefill_s": prefill_s, "load_s": load_s, "reach_s": reach_s},
    )
