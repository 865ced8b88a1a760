"""Conversations that wander over machines of a fleet while one of these is killed, or stopped for a moment, again and again.

One machine computes prompts for two others; each keeps KV on its disk. A turn is asked at any machine that lives; one that is lost is asked no more, and
another is, from the history that the client has. The bytes that are due were drawn by one machine with nothing to share.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.fakes.shallow_model import MODEL
from tests.fleet.kv_machines import Saboteur, saboteurs
from tests.fleet.machines import BOUND_S, until
from tests.fleet.test_kv_moves import SMALL
from tests.soak.soak import LONGEST_S, answer

from paceline.store.home import Home

SPEEDS = {"a": 5000.0, "b": 10.0, "c": 10.0}
"""Of prompts, as each says: the first computes them for the others, and what these have is fetched."""
TURNS = 3
BETWEEN = (4, 12)
"""Turns from one fault to the next."""
AWAY = (0, 8)
"""Turns for which one that was killed stays away."""
SLEEPS_S = (0.5, 6.0)
COMMON = "The riders keep a book. " + " ".join(
    f"On day {day} they rode {day * 7 % 31} miles, and drank {day * 5 % 11} cups." for day in range(1, 13)
)
KINDS = ("paceline_kv_peer_blocks_total", "paceline_kv_pushes_total", "paceline_kv_prefills_total", "paceline_kv_disk_blocks_total")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, turn for turn, and what is due."""

    bodies: Sequence[dict[str, Any]]
    due: Sequence[str]


def converse(machine: Saboteur, seed: int, count: int) -> list[Conversation]:
    """As many conversations, as one machine has them: half of them begin alike."""
    rng, made = random.Random(seed), list[Conversation]()
    for number in range(count):
        text = COMMON if number % 2 else f"{number}. {' '.join(rng.sample(COMMON.split(), 60))}"
        bodies: list[dict[str, Any]] = []
        due: list[str] = []
        for turn in range(TURNS):
            text += f"\nAsked {number}.{turn}: {' '.join(rng.sample(COMMON.split(), 12))}?\nTold: "
            sampling = {"temperature": rng.choice((0.0, 0.8)), "seed": number, "max_tokens": rng.randint(4, 16)}
            bodies.append({"model": MODEL, "prompt": text, "stream": True, **sampling})
            told, ended = answer(machine.node.url, bodies[-1])
            assert ended in {"stop", "length"}, ended
            due.append(told)
            text += told
        made.append(Conversation(bodies, due))
    return made


def start(machine: Saboteur) -> None:
    machine.up(*SMALL, "--kv-disk", "1GB", "--role", "prefill" if machine.name == "a" else "both")


@dataclass(slots=True)
class Wandering:
    """Clients and somebody who strikes."""

    machines: Sequence[Saboteur]
    seed: int
    turns: int = 0
    moved: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    seen: Counter[str] = field(default_factory=Counter[str])
    """What machines counted until they were killed, and in the end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, conversations: Sequence[Conversation], clients: int) -> None:
        """Have them all, with so many at a time."""
        striking = threading.Thread(target=self._strike)
        striking.start()
        try:
            with ThreadPoolExecutor(clients) as pool:
                for done in [pool.submit(self._have, number, one) for number, one in enumerate(conversations)]:
                    done.result()
        finally:
            self._over.set()
            striking.join(3 * BOUND_S)
        assert not striking.is_alive()
        for machine in self.machines:
            self.seen += counted_of(machine)

    def _have(self, number: int, conversation: Conversation) -> None:
        rng = random.Random(f"{self.seed} {number}")
        for body, due in zip(conversation.bodies, conversation.due, strict=True):
            told = self._turn(body, rng)
            with self._lock:
                self.turns += 1
                if told != due:
                    self.wrong.append(f"{body}: {told!r} where {due!r} was due")
            if self.wrong:
                return

    def _turn(self, body: dict[str, Any], rng: random.Random) -> str:
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            machine = rng.choice([one for one in self.machines if one.is_up and one.node.url])
            try:
                told, ended = answer(machine.node.url, body)
            except (OSError, HTTPException):
                ended = "lost"
            if ended in {"stop", "length"}:
                return told
            with self._lock:
                self.moved += 1
            self._over.wait(0.05)
        return "nothing"

    def _turns_went(self, count: int) -> bool:
        """Wait for so many turns. False: there are no more."""
        due = self.turns + count
        while self.turns < due:
            if self._over.wait(0.01):
                return False
        return True

    def _strike(self) -> None:
        rng = random.Random(self.seed)
        while True:
            if not self._turns_went(rng.randint(*BETWEEN)):
                return
            victim, fault = rng.choice(self.machines), rng.choice(("kill", "kill", "sleep"))
            self.faults[fault] += 1
            if fault == "kill":
                self.seen += counted_of(victim)
                victim.node.kill()
                self._turns_went(rng.randint(*AWAY))
                start(victim)
            else:
                victim.node.process.send_signal(signal.SIGSTOP)
                self._over.wait(rng.uniform(*SLEEPS_S))
                victim.node.process.send_signal(signal.SIGCONT)


def counted_of(machine: Saboteur) -> Counter[str]:
    """What became of KV there, since it started."""
    found = Counter[str]()
    with urlopen(f"{machine.node.url}/metrics", timeout=BOUND_S) as page:
        for line in page.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(KINDS):
                found[name] += int(float(value))
    return found


def left_of(machine: Saboteur) -> list[str]:
    """Files on the disk that a process which lives did not end. What a killed one left is removed in time."""
    home = Home(machine.home)
    unfinished = [path for path in home.kv.rglob(".*") if path.is_file()] if home.kv.exists() else []
    return [str(path) for path in unfinished if path.name.split(".")[2] == str(machine.node.process.pid)]


@contextmanager
def wandering(root: Path, seed: int, count: int) -> Iterator[tuple[Wandering, list[Conversation]]]:
    """Three machines that run, and what one of them says while it is alone."""
    conversations: list[Conversation] = []
    with saboteurs(root, SPEEDS, start, lambda one: conversations.extend(converse(one, seed, count))) as made:
        until(lambda: all(machine.sees() == set(SPEEDS) for machine in made))
        yield Wandering(made, seed), conversations
