"""Fleets for benchmarks, trials, demonstrations and fault tests: a node inside this process, and several nodes on one machine in processes of their own.

Benchmarks step the engine of the node inside this process themselves; it has no server.

Laws: the node's event loop has its own thread, as it does next to an engine that serves; `close` ends the loop and everything on it. A local fleet
leaves nothing behind: its nodes end with this process, however it ends, and their folder is removed. Models and compiled kernels are this user's own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.backends.table import Kernels
from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import ConfigError, ExecutorUnavailable, PipelineError, PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.core.ports import find_port
from paceline.core.processes import python_command
from paceline.fleet.card import NodeCard
from paceline.fleet.presets import FleetSettings
from paceline.machine.config_file import PipelineSettings
from paceline.machine.engine_thread import SWITCH_INTERVAL_S
from paceline.machine.settings import NodeSettings
from paceline.node.serving import FleetServing
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.pipeline.client import open_stage
from paceline.ways.pipeline.executor.route import SESSION_ID_BYTES, StageRequest
from paceline.ways.pipeline.host.ends import tensor_ends
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes.build import BuiltPipeline, build_engine_over
from paceline.ways.pipeline.routes.fleet_access import NodeFleetAccess
from paceline.ways.tensor.hosting import RankPlace

Answer = TypeVar("Answer")


class LoopThread:
    """Runs from the start; close it when nothing is left on it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do it there, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Stop. Not from its own thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


SEEN_S = 60.0
"""How long machines may take to come into view."""
LINKS_S = 20.0
"""How long the ways between them may take to be measured."""


class BenchNode:
    """A member that orchestrates.

    Args:
        beside: models that lie elsewhere than in the home.

    Raises:
        UserError: it can't be one.
    """

    def __init__(self, settings: FleetSettings, home: Home, clock: Clock, beside: Sequence[ModelLocation] = ()) -> None:
        self._clock, self._beside = clock, beside
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = LoopThread("paceline-node")
        self._whole: FleetServing | None = None
        try:
            self._whole, self._access = self._loop.run(self._start(settings, home))
        except BaseException:
            self._loop.close()
            raise

    @property
    def cards(self) -> Sequence[NodeCard]:
        """The live ones."""
        return self._access.cards()

    @property
    def node_id(self) -> NodeId:
        return self._access.node_id

    @property
    def trust(self) -> dict[NodeId, Trust]:
        """Trust of each node, as its certificate states it."""
        return self._access.trust()

    def wait_for_links(self, stages: Sequence[NodeId]) -> bool:
        """Wait until the links of a pipeline from here through these nodes are measured. Returns False after `LINKS_S`."""
        way = [self.node_id, *stages, self.node_id]
        until = self._clock.monotonic() + LINKS_S
        while self._clock.monotonic() < until:
            known = {(card.node_id, link.to) for card in self.cards for link in card.links}
            if all(pair in known or pair[::-1] in known for pair in pairwise(way)):
                return True
            self._access.wait_for_change(0.2)
        return False

    def wait_for(self, names: Iterable[str], beside: Iterable[bytes] = ()) -> None:
        """Wait until machines with these names are in view and run layers for others.

        Args:
            beside: instances that are known to be gone.

        Raises:
            PlacementError: a machine did not appear within `SEEN_S`.
        """
        missing, gone = set(names), set(beside)
        until = self._clock.monotonic() + SEEN_S
        while missing:
            missing -= {str(card.node_id) for card in self.cards if card.serves_shards and card.instance not in gone}
            if missing and self._clock.monotonic() >= until:
                raise PlacementError(f"{', '.join(sorted(missing))} did not come into view", "Their logs may say why.")
            if missing:
                self._access.wait_for_change(0.2)

    def build(self, settings: NodeSettings, order: PipelineOrder) -> BuiltPipeline:
        """Build an engine over the fleet. Close its executor before this node.

        Raises:
            UserError: the pipeline can't be built; the message says why.
        """
        assert self._whole is not None, "a closed node builds nothing"
        try:
            return build_engine_over(settings, order, self._access, tensor_ends(self._whole.fleet), self._loop.loop, self._clock)
        except (ExecutorUnavailable, PipelineError) as error:
            raise PlacementError(error.message, error.hint) from error

    def rank_place(self, name: str) -> RankPlace:
        """Return the place of a tensor rank of a group that this node belongs to."""
        assert self._whole is not None, "a closed node has no groups"
        return RankPlace(NodeId(name), self._whole.fleet, self._loop.loop)

    def warm(self, node_id: NodeId, like: StageRequest) -> None:
        """Have a machine load layers, as for a session that then is not used.

        Raises:
            FleetError: it refuses.
        """

        async def open_and_close() -> None:
            request = replace(like, session_id=os.urandom(SESSION_ID_BYTES))
            await (await open_stage(self._access.channel(node_id), node_id, request)).close()

        self._loop.run(open_and_close())

    def close(self) -> None:
        """Say goodbye and end. Idempotent."""
        whole, self._whole = self._whole, None
        if whole is not None:
            try:
                self._loop.run(whole.stop())
            finally:
                self._loop.close()

    async def _start(self, settings: FleetSettings, home: Home) -> tuple[FleetServing, NodeFleetAccess]:
        whole = FleetServing(None, settings, home, self._clock, beside=self._beside)
        await whole.start()
        return whole, NodeFleetAccess(whole.fleet, PipelineSettings().shard_age_s)


HOST: Final = "127.0.0.1"
PRESET: Final = "desk,exchange_s=0.5,restamp_s=2,ttl_s=10"
"""Quick to notice: these nodes come and go."""
END_S: Final = 5.0
"""Seconds that nodes get to end in order."""
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
"""Removes the folder once no process uses it any more, however the processes ended."""


class LocalFleet:
    """Homes of `count` nodes, and the processes of all but the first; the first home is the orchestrator's.

    Args:
        count: nodes in all.
        threads: threads of each node; None: the machine's threads, shared equally.
        model: a model outside this user's home, which all nodes may read.
        device: processor kernels that all nodes run on; None, or another device: the fastest kernels.
    """

    host: Final = HOST
    preset: Final = PRESET

    def __init__(self, count: int, threads: int | None, model: Path | None = None, device: Kernels | None = None) -> None:
        from paceline.machine.devices import usable_cores

        self.threads = threads or max(1, usable_cores() // count)
        beside = () if model is None else ("--beside", str(model))
        self._options = (*beside, "--device", device) if device is not None and device.compiled else beside
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
        """Names of all nodes, the orchestrator's first."""
        return tuple(self.homes)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the nodes that run, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def start(self, name: str) -> None:
        """Start a node that does not run."""
        home = self.homes[name]
        command = python_command("-m", "paceline", "up", "--no-model", "--serve-shards", "--threads", str(self.threads))
        command += ["--port", "0", "--fleet-host", HOST, "--fleet-port", "0", "--tensor-port", "0", "--no-mdns"]
        command += ["--peer", f"{HOST}:{self.port}", "--fleet-preset", PRESET]
        self._processes[name] = _tied([*command, "--tied", *self._options], home, self._alive)

    def kill(self, name: str) -> None:
        """Kill a node with SIGKILL, as a power cut would. Returns once the process is gone.

        Raises:
            ConfigError: no running process of this fleet has that name.
        """
        if name not in self.pids:
            raise ConfigError(f"There is no node {name!r} to kill", f"There are: {', '.join(self.pids) or 'none'}.")
        self._processes[name].kill()
        _let_go(self._processes[name])

    def log(self, name: str) -> str:
        """Return the log of a node since its last start."""
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
    """Start a janitor, which removes a folder once this process and all others with the returned descriptor are gone.

    It waits for the others because a node that is still starting would create its home again after the removal.
    """
    ended, alive = os.pipe()
    try:
        command = python_command("-c", _JANITOR, str(root))
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
