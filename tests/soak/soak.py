"""A fleet that is killed again and again while clients stream, and what must never be seen in it.

The orchestrator and the machines that run layers are real processes; the latter die by SIGKILL at tokens drawn from a seed, and start anew.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import Machine, until

from paceline.bench.fleet import LocalFleet

BEGINNINGS = (
    "The machines in the cellar",
    "A list of rivers, from the shortest to the longest:",
    "def fibonacci(n):\n",
    "Dear neighbours, on Saturday",
    "Once upon a time there was a pipeline that",
    "The capital of France is",
)
LONGEST_S = 300.0
"""An answer that takes longer, however often it was interrupted, hangs."""
MOST_BETWEEN = 80
"""Tokens between two kills, of all streams together, at most."""
EVERYBODY_EACH = 8
"""Every so many kills, all machines but the orchestrator die at once."""


def asked(seed: int, count: int) -> list[dict[str, Any]]:
    """Bodies of requests: greedy and drawn, short prompts and long ones."""
    rng = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        prompt = " ".join(rng.choices(BEGINNINGS, k=rng.choice((1, 1, 3, 12))))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randint(12, 64), "seed": number, "stream": True}
        bodies.append({**body, "temperature": rng.choice((0.0, 0.8))})
    return bodies


@dataclass(slots=True)
class Tally:
    """What clients have seen, all together."""

    tokens: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list[str])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def token(self) -> None:
        with self.lock:
            self.tokens += 1


def answer(url: str, body: dict[str, Any], tally: Tally | None = None) -> tuple[str, str]:
    """Ask, and read the stream to its end: its text, and how it ended."""
    text, reason = "", "broken off"
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=LONGEST_S) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            said = json.loads(line[6:])
            if "choices" not in said:
                return text, f"error: {said}"
            for choice in said["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                if tally is not None and choice["text"]:
                    tally.token()
    return text, reason


def metrics(url: str) -> dict[str, float]:
    """Samples without labels."""
    with urlopen(f"{url}/metrics", timeout=60) as page:
        found = re.findall(r"^(paceline_\w+) (\S+)$", page.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


class Soak:
    """Clients, and somebody who kills.

    Args:
        right: bodies, and what must come of them.
        clients: at once.
        seed: of everything that is drawn.
    """

    def __init__(
        self, fleet: LocalFleet, orchestrator: Machine, right: Sequence[tuple[dict[str, Any], tuple[str, str]]], clients: int, seed: int
    ) -> None:
        self.tally = Tally()
        self.resident: list[int] = []
        """Of the orchestrator, after each kill."""
        self._fleet, self._orchestrator, self._right = fleet, orchestrator, right
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(random.Random(seed + 1 + place),)) for place in range(clients)]

    @property
    def pid(self) -> int:
        return self._orchestrator.node.process.pid

    def run(self, kills: int) -> None:
        """Stream and kill; returns once every answer has ended."""
        for thread in self._threads:
            thread.start()
        try:
            for number in range(1, kills + 1):
                self._wait_for_tokens(self._rng.randint(1, MOST_BETWEEN))
                self._kill(everybody=number % EVERYBODY_EACH == 0)
                self.resident.append(resident_bytes(self.pid))
            self._wait_for_tokens(MOST_BETWEEN)
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(LONGEST_S)
        assert not any(thread.is_alive() for thread in self._threads), "an answer never ended"

    def run_for(self, times: int, every_s: float, span_s: float) -> list[int]:
        """Stream for some spans of time, and kill at a fixed pace. Returns how many answers ended in each, once every answer has ended."""
        ended: list[int] = []
        for thread in self._threads:
            thread.start()
        try:
            for _ in range(times):
                before, until_s = self.tally.answers, time.monotonic() + span_s
                while time.monotonic() < until_s and not self.tally.wrong:
                    time.sleep(every_s)
                    self._kill(everybody=False)
                ended.append(self.tally.answers - before)
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(LONGEST_S)
        assert not any(thread.is_alive() for thread in self._threads), "an answer never ended"
        return ended

    @property
    def growth(self) -> float:
        """Memory at the end over memory near the beginning."""
        tenth = max(1, len(self.resident) // 10)
        return statistics.median(self.resident[-2 * tenth :]) / statistics.median(self.resident[tenth : 3 * tenth])

    def sessions(self) -> int:
        """On all machines that run layers."""
        return sum(int(said.get("paceline_shard_sessions", 0)) for said in map(self._host_metrics, self._fleet.pids))

    def check_all_run(self) -> None:
        """Nobody ends but those who are killed here, and they are started again."""
        for name in set(self._fleet.names[1:]) - set(self._fleet.pids):
            raise AssertionError(f"{name} ended by itself: {self._fleet.log(name)}")

    def _wait_for_tokens(self, count: int) -> None:
        end, target = time.monotonic() + LONGEST_S, self.tally.tokens + count
        while self.tally.tokens < target and not self.tally.wrong:
            assert time.monotonic() < end, "nothing streams any more"
            time.sleep(0.005)

    def _kill(self, *, everybody: bool) -> None:
        """One that works, most of the time; sometimes any."""
        victims = running = list(self._fleet.pids)
        self.check_all_run()
        if not everybody:
            at_work = [name for name in running if self._host_metrics(name).get("paceline_shard_sessions", 0)]
            victims = [self._rng.choice(at_work if at_work and self._rng.random() < 0.9 else running)]
        for name in victims:
            self._fleet.kill(name)
        for name in victims:
            self._fleet.start(name)

    def _host_metrics(self, name: str) -> dict[str, float]:
        """Empty where it does not serve yet."""
        found = re.search(r"Ready at (http://\S+)/v1", self._fleet.log(name))
        try:
            return {} if found is None else metrics(found[1])
        except (URLError, OSError):
            return {}

    def _ask(self, rng: random.Random) -> None:
        while not self._stop.is_set() and not self.tally.wrong:
            body, expected = rng.choice(self._right)
            try:
                got = answer(self._orchestrator.node.url, body, self.tally)
            except OSError as error:
                got = ("", f"{type(error).__name__}: {error}")
            with self.tally.lock:
                self.tally.answers += 1
                if got != expected:
                    self.tally.wrong.append(f"{body}: {got!r} where {expected!r} was due")


def settle(orchestrator: Machine) -> None:
    """Wait until an orchestrator is idle."""
    url = orchestrator.node.url
    idle = ("paceline_requests_waiting", "paceline_requests_running", "paceline_kv_blocks_used")
    until(lambda: all(metrics(url)[name] == 0 for name in idle))
