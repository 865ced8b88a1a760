"""A door and two machines that have the model, each in a network namespace of its own where there are such: one of the two is struck again and again.

Struck is whatever a machine may suffer: its process is killed, or stopped for a while, its cable is pulled, or a person presses Ctrl-C. At most one is
down at a time. Clients ask while something happens, and rest between: what they ask when nothing can go wrong shows nothing.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.error import HTTPError

from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import BOUND_S, BRIEF, EMPTY, Machine, free_port, machines, token_in, until
from tests.fleet.network import Network, enter, network, why_not
from tests.soak.soak import BEGINNINGS, LONGEST_S, Tally, answer, metrics

from paceline.store.home import Home

MODEL_OPTIONS = ("--threads", "1", "--context", "1024", "--kv-tokens", "8192", "--drain-s", "0.1", "--fleet-port", "0")
DOWN_S = (4.2, 4.8)
"""How long a machine is stopped, or cut off: until it was left."""
MOST_BETWEEN = 60
"""Tokens between two faults, of all streams together, at most."""
EACH = 2
"""Answers for each client from one fault to the next: one that is struck, and one that is asked for while a machine is away."""
AGAIN_S = 0.1
"""Until a client that was refused asks again."""

Right = Sequence[tuple[dict[str, Any], tuple[str, str]]]
Value = TypeVar("Value")


@dataclass(slots=True)
class Seen(Tally):
    """What clients saw, and for how long each of them saw nothing."""

    longest_s: float = 0.0
    last_s: dict[int, float] = field(default_factory=dict[int, float])
    begun: set[int] = field(default_factory=set[int])
    """Clients whose answer has begun."""
    of_client: Counter[int] = field(default_factory=Counter[int])
    """Right answers, by client."""
    outlasted: int = 0
    """Answers that their door ended, as they went on for longer than it drains."""

    def begins(self) -> None:
        """A client asks."""
        with self.lock:
            self.last_s[threading.get_ident()] = time.monotonic()
            self.begun.discard(threading.get_ident())

    def token(self) -> None:
        now_s, client = time.monotonic(), threading.get_ident()
        with self.lock:
            self.tokens += 1
            self.longest_s = max(self.longest_s, now_s - self.last_s[client])
            self.last_s[client] = now_s
            self.begun.add(client)


class Places:
    """Where each machine's API can be reached: on loopback, of its own namespace where it has one."""

    def __init__(self, net: Network | None) -> None:
        self._net = net

    def enter(self, name: str) -> None:
        """Have this thread be where a machine is, for good."""
        if self._net is not None:
            enter(self._net.namespace(name))

    def at(self, name: str, work: Callable[[], Value]) -> Value:
        """Do something there."""
        with ThreadPoolExecutor(1, initializer=self.enter, initargs=(name,)) as there:
            return there.submit(work).result()


class Trio:
    """The door, which has no model, and two machines that have. Clients find the door at one place, however often it is started anew."""

    def __init__(self, model: Path, door: Machine, runs: Sequence[Machine], net: Network | None, port: int) -> None:
        self.door, self.runs, self._net, self._port = door, tuple(runs), net, port
        self._model = str(model)
        self.url = f"http://127.0.0.1:{port}"
        self.places = Places(net)

    @property
    def faults(self) -> tuple[str, ...]:
        """What a machine may suffer here."""
        return ("kill", "stop", "sleep", *(("cut",) if self._net is not None else ()))

    def strike(self, fault: str, victim: Machine, for_s: float) -> None:
        """Have a machine suffer something, and get over it."""
        process = victim.node.process
        match fault:
            case "kill":
                victim.node.kill()
            case "stop":
                victim.node.stop()
            case "sleep":
                process.send_signal(signal.SIGSTOP)
                time.sleep(for_s)
                process.send_signal(signal.SIGCONT)
            case _:
                assert self._net is not None
                self._net.sides = (frozenset({victim.name}), frozenset({self.door.name, *(one.name for one in self.runs)} - {victim.name}))
                time.sleep(for_s)
                self._net.sides = ()
        if not victim.is_up:
            self.start(victim)
        until(self.sees_all)

    def start(self, machine: Machine) -> None:
        machine.up("--model", self._model, *MODEL_OPTIONS)

    def restart_door(self, *options: str) -> None:
        """In order, as a person does; with other options from then on."""
        self.door.node.stop()
        self.start_door(*options)
        until(self.sees_all)

    def start_door(self, *options: str) -> None:
        """Where clients look for it."""
        self.door.up(*EMPTY, "--port", str(self._port), *options)

    def sees_all(self) -> bool:
        """Whether the door sees both. A machine that is ready was seen: its start waits for that."""
        return self.metric(self.door, "paceline_fleet_nodes") == 1 + len(self.runs)

    def metric(self, machine: Machine, name: str) -> float:
        return self.places.at(machine.name, lambda: metrics(machine.node.url))[name]


class Clients:
    """Ask at a door until they are told to stop.

    Args:
        right: bodies, and what must come of them.
    """

    def __init__(self, whole: Trio, right: Right, clients: int, seed: int) -> None:
        self.seen = Seen()
        self.may_be_refused = False
        """The door itself is started anew: what it does not begin to answer, or ends as it stops, is asked again."""
        self._whole, self._right = whole, right
        self._stop = threading.Event()
        self._due = threading.Condition()
        self._due_answers = 0
        """Of each client, since the start."""
        self._threads = [threading.Thread(target=self._ask, args=(random.Random(seed + place),)) for place in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._have_more(0)
        for thread in self._threads:
            thread.join(LONGEST_S)
        assert not any(thread.is_alive() for thread in self._threads), "an answer never ended"

    def wait_for_tokens(self, count: int) -> None:
        """Have each client ask for a few answers more, until so many tokens have come."""
        self._have_more(EACH)
        end, target = time.monotonic() + BOUND_S, self.seen.tokens + count
        while self.seen.tokens < target and not self.seen.wrong:
            assert time.monotonic() < end, "nothing streams any more"
            time.sleep(0.005)

    def wait_for_answers(self) -> None:
        """Until each client has had another one."""
        self._have_more(1)
        end, before = time.monotonic() + LONGEST_S, Counter(self.seen.of_client)
        while any(self.seen.of_client[thread.ident or 0] == before[thread.ident or 0] for thread in self._threads):
            assert time.monotonic() < end, "a client is not answered any more"
            assert not self.seen.wrong, self.seen.wrong
            time.sleep(0.05)

    def _have_more(self, answers: int) -> None:
        with self._due:
            self._due_answers += answers
            self._due.notify_all()

    def _ask(self, rng: random.Random) -> None:
        self._whole.places.enter(self._whole.door.name)
        asked = 0
        while True:
            with self._due:
                self._due.wait_for(lambda asked=asked: self._stop.is_set() or asked < self._due_answers)
            if self._stop.is_set() or self.seen.wrong:
                return
            body, expected = rng.choice(self._right)
            self.seen.begins()
            try:
                got = answer(self._whole.url, body, self.seen)
            except HTTPError as error:
                if self.may_be_refused and error.code == 503:
                    self._stop.wait(AGAIN_S)
                    continue
                got = ("", f"{error.code}: {error.read().decode()}")
            except OSError as error:
                if self.may_be_refused and threading.get_ident() not in self.seen.begun:
                    self._stop.wait(AGAIN_S)
                    continue
                got = ("", f"{type(error).__name__}: {error}")
            asked += 1
            with self.seen.lock:
                self.seen.answers += 1
                if got == expected:
                    self.seen.of_client[threading.get_ident()] += 1
                elif self.may_be_refused and "server_stopping" in got[1] and expected[0].startswith(got[0]):
                    self.seen.outlasted += 1
                else:
                    self.seen.wrong.append(f"{body}: {got!r} where {expected!r} was due")


def asked(seed: int, count: int) -> list[dict[str, Any]]:
    """Bodies of requests: greedy and drawn, short prompts and long ones."""
    rng = random.Random(seed)
    return [
        {
            "model": MODEL,
            "prompt": " ".join(rng.choices(BEGINNINGS, k=rng.choice((1, 1, 3, 12)))),
            "max_tokens": rng.randint(32, 160),
            "temperature": rng.choice((0.0, 0.8)),
            "seed": number,
            "stream": True,
        }
        for number in range(count)
    ]


@contextmanager
def trio(root: Path, model: Path) -> Iterator[Trio]:
    """Three machines that run."""
    names = ("door", "b", "c")
    with ExitStack() as stack:
        net = stack.enter_context(network(*names)) if not why_not() else None
        made = stack.enter_context(machines(root, Home.from_environment().kernels, *names, preset=BRIEF))
        for machine in made if net is not None else ():
            machine.prefix = net.inside(machine.name)
            machine.options = ("--fleet-host", net.address(machine.name), "--no-mdns")
        door, *runs = made
        address = "127.0.0.1" if net is None else net.address("door")
        door.init("--join-port", str(free_port()), "--address", address)
        whole = Trio(model, door, runs, net, free_port())
        whole.start_door()
        for machine in runs:
            machine.run("join", token_in(door.run("token", "--address", address)), "--name", machine.name)
            whole.start(machine)
        until(whole.sees_all)
        yield whole
