"""Machines of a fleet as real processes: `paceline` with a PACELINE_HOME of its own, alone on loopback or in a network namespace."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.shallow_model import MODEL as SHALLOW
from tests.fakes.shallow_model import shallow_model
from tests.fakes.warm import Forked, Warm
from tests.fleet.network import INSIDE

from paceline.core.ids import NodeId
from paceline.core.ports import find_port
from paceline.fleet.card import NodeCard
from paceline.net.member.state import Sight, look
from paceline.net.trust.folder import FleetFolder
from paceline.store.catalog import MANIFEST
from paceline.store.home import Home

BOUND_S = 150.0
"""Longest wait for anything a test waits for; reached only when it fails."""
MOST_BETWEEN_LOOKS_S = 0.3
BRIEF = "desk,ttl_s=4,exchange_s=0.4,restamp_s=0.4,rpc_timeout_s=1.5"
"""A preset whose cards expire while a machine that is struck is away."""
QUICK = "desk,ttl_s=12,exchange_s=0.4,restamp_s=0.4,rpc_timeout_s=4"
"""A preset whose cards expire within a test's patience, and not while a machine waits for its turn on a busy processor."""
LOOPBACK = ("--fleet-host", "127.0.0.1", "--no-mdns")
EMPTY = ("--no-model", "--port", "0", "--fleet-port", "0")


@dataclass(slots=True)
class Machine:
    """One PACELINE_HOME, and what runs under it."""

    name: str
    home: Path
    preset: str = QUICK
    prefix: tuple[str, ...] = ()
    """Put before every command: `ip netns exec ...`."""
    options: tuple[str, ...] = LOOPBACK
    """Of `paceline up`."""
    warm: Warm | None = None
    """Forks its nodes."""
    running: list[Up] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PACELINE_HOME": str(self.home), "PACELINE_FLEET_PRESET": self.preset}

    def command(self, *arguments: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "paceline", *arguments]

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end; what it printed."""
        process = self.start(*arguments)
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read()
        assert process.wait(BOUND_S) == code, said
        return said

    def start(self, *arguments: str) -> subprocess.Popen[str] | Forked:
        command, env = self.command(*arguments), self.environment
        if self.warm is not None and command[0] in {sys.executable, INSIDE[0]}:
            return self.warm.start(command, env)
        nothing, pipe, out = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, env=env, stdin=nothing, stdout=pipe, stderr=out, text=True)

    def init(self, *arguments: str) -> str:
        """Start a fleet; its token."""
        return token_in(self.run("init", "--name", self.name, *arguments))

    def up(self, *arguments: str) -> Up:
        """Start a node, and wait until it serves."""
        started = Up(self, ("up", "--port", "0", *self.options, *arguments))
        self.running.append(started)
        started.wait_ready()
        return started

    @property
    def node(self) -> Up:
        """The node that was started last."""
        return self.running[-1]

    @property
    def is_up(self) -> bool:
        return bool(self.running) and self.node.process.poll() is None

    def sight(self) -> Sight:
        """What its running node sees."""
        return asyncio.run(look(FleetFolder(Home(self.home).fleet))).sight

    def sees(self) -> set[str]:
        return set(self.sight().view.ids)

    def card_of(self, name: str) -> NodeCard | None:
        live = self.sight().view.get(NodeId(name))
        return None if live is None else live.card

    def status(self) -> dict[str, Any]:
        """The same, by the command a person types."""
        return json.loads(self.run("status", "--json"))


class Up:
    """A `paceline up` that runs."""

    def __init__(self, machine: Machine, arguments: tuple[str, ...]) -> None:
        self.process = machine.start(*arguments)
        self.url = ""
        self.address = ""
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.said.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, words: str) -> None:
        """Until it printed them."""
        while words not in self._line():
            pass

    def wait_ready(self) -> None:
        """Until it printed where it serves."""
        while True:
            line = self._line()
            if found := re.search(r"Ready at (http://\S+)/v1", line):
                self.url = found[1]
                return

    def _line(self) -> str:
        line = self._lines.get(timeout=3 * BOUND_S)
        if line is None:
            pytest.fail(f"ended before its time: {''.join(self.said)}")
        if node := re.search(r"^Node \S+ at (\S+?),?( |$)", line):
            self.address = node[1]
        return line

    def stop(self) -> None:
        """Ctrl-C, and its orderly end."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(BOUND_S) == 0, "".join(self.said)
        self._reader.join(BOUND_S)
        said = "".join(self.said)
        assert "Traceback" not in said, said

    def kill(self) -> None:
        """As a power cut does."""
        self.process.kill()
        self.process.wait(BOUND_S)
        self._reader.join(BOUND_S)


@contextmanager
def machines(root: Path, kernels: Path, *names: str, **settings: Any) -> Iterator[list[Machine]]:
    """Homes for machines, whose nodes are forked where that can be; whatever still runs in the end is killed."""
    made: list[Machine] = []
    warm = Warm()
    if sys.platform == "linux":
        settings = {"warm": warm, **settings}
    for name in names:
        home = root / name
        (home / "cache").mkdir(parents=True)
        (home / "cache" / "kernels").symlink_to(kernels)
        made.append(Machine(name, home, **settings))
    try:
        yield made
    finally:
        for machine in made:
            for up in machine.running:
                up.kill()
        warm.close()


def have_shallow(*those: Machine) -> None:
    """Have machines know the bundled model's first layers by name."""
    for machine in those:
        folder = Home(machine.home).models / SHALLOW
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(json.dumps({"path": str(shallow_model())}))


def free_port() -> int:
    return find_port("127.0.0.1")


def token_in(text: str) -> str:
    """The join token in what a command printed."""
    found = re.search(r"paceline2\.\S+", text)
    assert found is not None, text
    return found[0]


def meet(*met: Machine) -> None:
    """Wait until each sees the others' nodes that run now, and not those that ran before."""

    def seen(one: Machine, other: Machine) -> bool:
        card = one.card_of(other.name)
        return card is not None and other.node.address in card.addresses

    until(lambda: all(seen(one, other) for one in met for other in met if one is not other))


def until(condition: Callable[[], bool], *, every_s: float = 0.05) -> None:
    """Wait for something that other processes bring about. What takes long is looked at more seldom: looking is work, for a node too."""
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(every_s)
        every_s = min(1.1 * every_s, MOST_BETWEEN_LOOKS_S)


def until_nothing(rest: Callable[[], list[str]]) -> None:
    """Wait for other processes to bring about that nothing is left; fails with what was."""
    end = time.monotonic() + BOUND_S
    while left := rest():
        assert time.monotonic() < end, left
        time.sleep(0.2)
