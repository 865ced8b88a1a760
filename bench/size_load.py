"""From a start to the first token, and the memory that takes: this tree, the earlier one and llama.cpp in turns, the file in the page cache."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.fakes.seeded_models import shape, write_gguf

from contender import Contender, ContenderError, Kind
from endpoint import Endpoint
from engines.worker import Job
from size_builds import Build, fresh_home, read_into_cache
from size_rows import Row, spread

CONTEXT = 1024
QUESTION = "What is a paceline?"
START_S = 900.0
ANONYMOUS = ("RssAnon", "RssShmem")


@dataclass(frozen=True, slots=True)
class Start:
    """One start."""

    ready_s: float
    first_token_s: float
    anonymous_bytes: int
    """Most at any moment until the first token."""
    mapped_bytes: int
    """File pages in use at the first token."""


class MemoryWatch:
    """Looks at a process's memory 100 times a second, from its start on. Linux alone; elsewhere it sees nothing."""

    def __init__(self) -> None:
        self.anonymous = self.mapped = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._watch, args=(Path(f"/proc/{pid}/status"),), daemon=True)
        self._thread.start()

    def _watch(self, status: Path) -> None:
        while not self._over.wait(0.01):
            try:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            except OSError:
                return
            taken = {name: int(value.split()[0]) * 1024 for name, value in fields.items() if name.startswith("Rss")}
            self.anonymous = max(self.anonymous, sum(taken.get(name, 0) for name in ANONYMOUS))
            self.mapped = taken.get("RssFile", 0)

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()


def first_token(port: int, tokens: int = 1, **more: Any) -> float:
    """Ask, and when the first of the answer came, on this process's clock."""
    url = f"http://127.0.0.1:{port}/v1"
    with httpx.Client(timeout=START_S, trust_env=False) as client:
        name = client.get(f"{url}/models").json()["data"][0]["id"]
        body = {
            "model": name,
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
            "max_tokens": tokens,
            "temperature": 0,
            **more,
        }
        at_s = 0.0
        with client.stream("POST", f"{url}/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not at_s and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    at_s = time.perf_counter()
    if not at_s:
        raise RuntimeError("the answer was empty")
    return at_s


def start(build: Build, model: Path, home: Path, threads: int, log: Path) -> Start:
    """`paceline up`, to the first token of its first answer."""
    watch = MemoryWatch()
    endpoint = Endpoint(
        "--model",
        str(model),
        "--threads",
        str(threads),
        "--context",
        str(CONTEXT),
        "--kv-tokens",
        str(CONTEXT),
        "--draft",
        "off",
        log=log,
        environment=build.environment(home),
        start_s=START_S,
        on_started=watch.begin,
    )
    try:
        ready_s = time.perf_counter() - endpoint.began_s
        first_s = first_token(endpoint.port) - endpoint.began_s
        watch.end()
        return Start(ready_s, first_s, watch.anonymous, watch.mapped)
    finally:
        watch.end()
        endpoint.close()


def start_llama(kind: Kind, model: Path, threads: int, log: Path) -> float:
    """llama.cpp's, through its C API from Python: imports, load, a prompt of 40 tokens, one token."""
    began_s = time.perf_counter()
    contender = Contender(kind, Job(str(model), kind.settings[0], threads, 1, CONTEXT), log)
    try:
        contender.resume()
        contender.run([tuple(range(100, 140))], 1)
        return time.perf_counter() - began_s
    finally:
        contender.kill()


def warm_up(build: Build, scratch: Path, threads: int, log: Path) -> None:
    """Have all kernels that the model needs compiled: a start of a small one of the same mix."""
    small = scratch / "small-q4-k-m.gguf"
    if not small.exists():
        write_gguf(small, shape("llama-8b", n_layers=8, hidden=1024, n_heads=8, n_kv_heads=2, ffn=2048, vocab=2048))
    with fresh_home(scratch, "warm-up") as home:
        start(build, small, home, threads, log)


def measure(
    ours: Build, before: Build | None, llama: Kind | None, model: Path, scratch: Path, *, threads: int, rounds: int
) -> Iterator[Row]:
    """All starts, in turns. The earlier tree starts once: its starts are alike."""
    log = scratch / "load.log"
    found: dict[str, list[Start]] = {"first": [], "second": [], "before": []}
    peer: list[float] = []
    notes = ["kernels compiled, file in the page cache, a fresh home for each first start"]
    for build in (ours, before):
        if build is not None:
            warm_up(build, scratch, threads, log)
    for turn in range(rounds):
        read_into_cache(model)
        with fresh_home(scratch, "load") as home:
            found["first"].append(start(ours, model, home, threads, log))
            found["second"].append(start(ours, model, home, threads, log))
        if llama is not None:
            try:
                peer.append(start_llama(llama, model, threads, log))
            except (ContenderError, OSError) as error:
                notes.append(f"llama.cpp failed: {error}")
                llama = None
        if before is not None and turn == 0:
            with fresh_home(scratch, "before") as home:
                found["before"].append(start(before, model, home, threads, log))
    beside = [f"llama.cpp {spread(peer, 's')}"] if peer else ["llama.cpp not measured"]
    if before is not None:
        beside.append(f"{before.name} {spread([each.first_token_s for each in found['before']], 's', 0)}")
    figures = {name: [asdict(each) for each in starts] for name, starts in found.items()} | {"llama_s": peer}
    size = model.stat().st_size
    allowed = 1.10 * size + 300e6
    for which, at_most, reach in (("first", 40.0, 20.0), ("second", 6.0, 3.0)):
        seconds = [each.first_token_s for each in found[which]]
        yield Row(
            f"{which} start of {model.name} ({size / 1e9:.2f} GB) to its first token",
            f"{spread(seconds, 's')} beside {', '.join(beside)}",
            f"at most {at_most:.0f} s",
            f"{reach:.0f} s",
            sorted(seconds)[len(seconds) // 2] <= at_most,
            "; ".join(notes),
            figures,
        )
    for which in ("first", "second"):
        peak = max(each.anonymous_bytes for each in found[which])
        yield Row(
            f"peak anonymous memory of the {which} start",
            f"{peak / 1e9:.2f} GB = {(peak - 300e6) / size:.2f}x the file + 300 MB; {found[which][-1].mapped_bytes / 1e9:.2f} GB of file pages beside it",
            "1.10x + 300 MB",
            "1.05x + 300 MB",
            peak <= allowed,
            f"highest of {rounds}; with what KV the first answer touched, a block",
        )
