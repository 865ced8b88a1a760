"""A fleet of several nodes on one machine, in processes of their own: for trying, for showing, and for breaking.

Law: it leaves nothing behind: the nodes end with this process, however it ends, and their folder goes with them. Models and compiled kernels
are this user's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.core.ids import NodeId
from paceline.core.ports import find_port
from paceline.store.home import Home

HOST: Final = "127.0.0.1"
PRESET: Final = "desk,exchange_s=0.5,restamp_s=2,ttl_s=10"
"""Quick to notice: these nodes come and go."""
END_S: Final = 5.0
"""What nodes are given to end in order."""
_JANITOR = """
import shutil, sys, time
from pathlib import Path
sys.stdin.buffer.read()
for _ in range(50):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not Path(sys.argv[1]).exists():
        break
    time.sleep(0.2)
"""
"""Removes the folder once no process uses it any more, in whatever way they ended."""


class LocalFleet:
    """Homes of `count` nodes, and the processes of all but the first, whose home is the orchestrator's.

    Args:
        count: nodes in all.
        threads: of each; None: the machine's, shared.
        model: one that lies elsewhere than in this user's home, which all nodes may read.
    """

    host: Final = HOST
    preset: Final = PRESET

    def __init__(self, count: int, threads: int | None, model: Path | None = None) -> None:
        from paceline.machine.devices import usable_cores

        self.threads = threads or max(1, usable_cores() // count)
        self._options = () if model is None else ("--beside", str(model))
        root = Path(tempfile.mkdtemp(prefix="paceline-local-"))
        self._janitor, self._alive = start_janitor(root)
        names = [f"local-{number}" for number in range(1, count + 1)]
        self.homes = found_fleet(root, Home.from_environment(), names)
        self.port = find_port(HOST)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in self.names[1:]:
            self.start(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all nodes, the orchestrator's first."""
        return tuple(self.homes)

    @property
    def pids(self) -> dict[str, int]:
        """Of the nodes that run."""
        return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def start(self, name: str) -> None:
        """Start a node that does not run."""
        home = self.homes[name]
        command = [sys.executable, "-P", "-m", "paceline", "up", "--no-model", "--serve-shards", "--threads", str(self.threads)]
        command += ["--port", "0", "--fleet-host", HOST, "--fleet-port", "0", "--tensor-port", "0", "--no-mdns"]
        command += ["--peer", f"{HOST}:{self.port}", "--fleet-preset", PRESET]
        self._processes[name] = _tied([*command, "--tied", *self._options], home, self._alive)

    def kill(self, name: str) -> None:
        """As a power cut does: SIGKILL. Returns once the process is gone.

        Raises:
            ConfigError: it is no process of this fleet that runs.
        """
        if name not in self.pids:
            raise ConfigError(f"There is no node {name!r} to kill", f"There are: {', '.join(self.pids) or 'none'}.")
        self._processes[name].kill()
        _let_go(self._processes[name])

    def log(self, name: str) -> str:
        """What a node said since it was started last."""
        return (self.homes[name] / "log").read_text(errors="replace")

    def close(self) -> None:
        """End all nodes and remove their folder. Idempotent."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            _let_go(process)
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        _let_go(self._janitor)


def become_first(fleet: LocalFleet) -> None:
    """Make this process the first of the nodes: its home is that node's from now on, and its endpoint is found from this user's home too."""
    notes, home = Home.from_environment().running, fleet.homes[fleet.names[0]]
    notes.mkdir(exist_ok=True)
    (home / notes.name).symlink_to(notes, target_is_directory=True)
    os.environ["PACELINE_HOME"] = str(home)


def found_fleet(root: Path, own: Home, names: Sequence[str]) -> dict[str, Path]:
    """Homes with an identity each, of one new fleet, and this user's models and caches."""
    from paceline.net.trust.authority import Authority
    from paceline.net.trust.certificates import make_key, make_request
    from paceline.net.trust.folder import FleetFolder
    from paceline.net.trust.identity import Identity

    now = SystemClock().wall()
    authority = Authority.create(now)
    homes: dict[str, Path] = {}
    for each in names:
        home = Home(root / each)
        home.root.mkdir()
        for shared in ("models", "partial", "cache"):
            (own.root / shared).mkdir(parents=True, exist_ok=True)
            (home.root / shared).symlink_to(own.root / shared, target_is_directory=True)
        if (own.root / "config.toml").exists():
            shutil.copy(own.root / "config.toml", home.root)
        key, name = make_key(), NodeId(each)
        identity = Identity.assemble(key, authority.issue(make_request(key, name), name, now), authority.root, now)
        folder = FleetFolder(home.fleet)
        folder.write_secret(folder.identity_file, identity.to_pem())
        homes[each] = home.root
    return homes


def start_janitor(root: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process that removes a folder once this process is gone, and every other that was given the descriptor returned.

    One that was still starting when the folder went would make its home anew.
    """
    ended, alive = os.pipe()
    try:
        command = [sys.executable, "-P", "-c", _JANITOR, str(root)]
        quiet = subprocess.DEVNULL
        janitor = subprocess.Popen(command, stdin=ended, stdout=quiet, stderr=quiet, start_new_session=True)  # noqa: S603  our own program
    finally:
        os.close(ended)
    return janitor, alive


def _tied(command: list[str], home: Path, alive: int) -> subprocess.Popen[bytes]:
    """Start a process that ends when its standard input does: with this one, or once it is closed."""
    environment = {**os.environ, "PACELINE_HOME": str(home)}
    with (home / "log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603  our own program
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, pass_fds=(alive,)
        )


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was told to end; one that does not is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
