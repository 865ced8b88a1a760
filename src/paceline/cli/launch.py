"""`paceline launch`, which `mlx.launch` starts once for each rank: rank 0 serves, and the others' hosts run its ranks. And the files of hosts that both read.

Law: a launch is `paceline up` with what the file of hosts says: keys, plans and losses are those of the fleet, and no socket is opened beside its own.
One rank takes the same path. A process that was told to stop ends as one that was, by which the launcher ends the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

from paceline.cli.terminal import Terminal, print_lines
from paceline.core.background import run_interruptibly
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, PlacementError
from paceline.core.files import write_file
from paceline.core.ids import NodeId
from paceline.core.processes import python_command
from paceline.fleet.presets import FLEET_PORT
from paceline.machine.devices import RING_VARIABLES
from paceline.net.member.reach import reach
from paceline.net.trust.certificates import join_host
from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home

DRAIN_S: Final = "2"
"""Seconds that live answers get at a stop, unless `--drain-s` is given: everything ends within 5 s."""
MEET_S: Final = 120.0
"""Seconds that the other hosts' nodes get to answer. Raising it: a host that is off is reported later."""
_OF_ANY_NODE: Final = {
    "--port", "-p", "--host", "--fleet-port", "--fleet-host", "--fleet-preset", "--tensor-port", "--peer", "--no-mdns", "--threads", "-t", "--device",
    "-d", "--log-level", "--api-key", "--api-key-file", "--max-revocation-age", "--drain-s",
}  # fmt: skip
"""Options of `paceline up` that a host without a model of its own takes too."""
_BARE: Final = {"--no-mdns"}


@dataclass(frozen=True, slots=True)
class DistributedEnv:
    """Environment of a rank, as the launcher set it."""

    available: bool
    """It is one of several ranks."""
    rank: int = 0
    hosts: tuple[str, ...] = ("",)
    """Hosts of the ranks, in the order of rank."""

    @property
    def size(self) -> int:
        return len(self.hosts)


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Read the host of each rank from a file; none if the file is empty, as for a launch of one rank.

    The file is `[{"host": ..., "port": ...}]`, or what `mlx.launch` reads (`"ssh"`, `"ips"`), or what it gives each rank, `[["host:port", ...], ...]`.

    Raises:
        ConfigError: it can't be read, or has none of these forms.
    """
    wanted = 'Write it like [{"host": "mac-1.local"}, {"host": "mac-2.local"}], the first rank first: paceline hostfile does.'
    try:
        text = path.read_text()
        said: Any = json.loads(text) if text.strip() else []
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"The file of hosts {path} can't be read: {error}", wanted) from error
    if isinstance(said, dict):
        said = cast("dict[str, Any]", said).get("hosts")
    if not isinstance(said, list):
        raise ConfigError(f"The file of hosts {path} is no list of ranks", wanted)
    hosts: list[str] = []
    for each in cast("list[Any]", said):
        match each:
            case [str(address), *_] if all(address.rpartition(":")[::2]):
                hosts.append(address.rpartition(":")[0].strip("[]"))
            case {"ips": [str(host), *_]} | {"host": str(host)} | {"ssh": str(host)} if host:
                hosts.append(host)
            case _:
                raise ConfigError(f"The file of hosts {path} has a rank without a host", wanted)
    return tuple(hosts)


def create_hostfile(hosts: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write a file of hosts that `mlx.launch`, `mlx.distributed_config` and `paceline launch` read.

    Args:
        hosts: each with `host` and, where it is another, `ip`: by which ranks reach one another.

    Raises:
        ConfigError: it can't be written.
    """
    ranks = [
        {"host": each["host"], "port": each.get("port", 22), "ssh": each["host"], "ips": [each.get("ip", each["host"])]} for each in hosts
    ]
    try:
        write_file(path, json.dumps(ranks, indent=2).encode())
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", "Choose another place.") from error
    return path


def validate_distributed_env(environment: Mapping[str, str] | None = None, hostfile: Path | None = None) -> DistributedEnv:
    """Read from the launcher's variables which rank this process is.

    Args:
        environment: default: this process's variables.
        hostfile: in place of the launcher's.

    Raises:
        ConfigError: the variables contradict each other or the hostfile.
    """
    environment = os.environ if environment is None else environment
    of_rank, of_hosts = RING_VARIABLES
    rank, named = environment.get(of_rank, "0"), hostfile or environment.get(of_hosts, "")
    hosts = read_hostfile(Path(named)) if named else ()
    if not hosts and (rank != "0" or environment.get("MLX_WORLD_SIZE", "1") != "1"):
        raise ConfigError(f"{of_rank} is {rank[:20]!r}, and no file names the ranks' hosts", "Give it: paceline launch --hostfile FILE.")
    hosts = hosts or ("",)
    if not (rank.isascii() and rank.isdigit() and len(rank) < 7 and int(rank) < len(hosts)):
        raise ConfigError(f"{of_rank} is {rank[:20]!r}, and {named} names {len(hosts)} ranks", "Start as many as it names.")
    return DistributedEnv(len(hosts) > 1, int(rank), hosts)


def run_launch(asked: Sequence[str], hostfile: Path | None, port: int = FLEET_PORT) -> None:
    """Be the rank that the launcher says, until it or this process ends.

    Args:
        asked: options of `paceline up`, of rank 0.
        port: for the fleet, as they have it.

    Raises:
        ConfigError: the launch makes no sense.
        PlacementError: another host's node does not answer.
    """
    env = validate_distributed_env(hostfile=hostfile)
    drain = () if any(option.startswith("--drain-s") for option in asked) else ("--drain-s", DRAIN_S)
    host, first = env.hosts[env.rank], env.hosts[0]
    if env.hosts.index(host) < env.rank:
        print_lines(Terminal(), f"Rank {env.rank} is a process of what runs on {host} already")
        return
    others = tuple(dict.fromkeys(each for each in env.hosts if each != first))
    part = f"runs here for rank 0, on {first}" if env.rank else " and on ".join(("serves; ranks run here", *others))
    print_lines(Terminal(stderr=True), f"Rank {env.rank} of {env.size} {part}")
    if env.rank:
        peer = join_host(first, port)
        sys.exit(_run(["--no-model", "--serve-shards", "--peer", peer, *drain, *_of_any_node(asked)]))
    nodes = run_interruptibly(_meet(others, port)) if others else {}
    ranks = ":".join("1" if each == first else f"1@{nodes[each]}" for each in env.hosts) if others else str(env.size)
    peers = [word for each in others for word in ("--peer", join_host(each, port))]
    sys.exit(_run(["--tensor", ranks, *peers, *drain, *asked]))


def _of_any_node(asked: Sequence[str]) -> list[str]:
    """Keep only the options, with their values, that a host without a model takes."""
    kept, words = list[str](), list(asked)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        takes = not equals and name not in _BARE and bool(words) and not words[0].startswith("-")
        value = [words.pop(0)] if takes else []
        if name in _OF_ANY_NODE:
            kept += [word, *value]
    return kept


async def _meet(hosts: Sequence[str], port: int) -> dict[str, NodeId]:
    """Wait until the node on each host answers. Returns the node of each host."""
    home = Home.from_environment()
    identity, clock = FleetFolder(home.fleet).identity(), SystemClock()

    async def meet(host: str) -> NodeId:
        until = time.monotonic() + MEET_S
        while (found := await reach(join_host(host, port), identity, clock)).member is None:
            if time.monotonic() > until:
                raise PlacementError(
                    f"No node of this fleet answers at {found.address}, where a rank is to run: {found.why}",
                    "paceline join there, once; then paceline doctor says what keeps the two apart.",
                )
            await asyncio.sleep(0.2)
        return found.member.node_id

    return dict(zip(hosts, await asyncio.gather(*map(meet, hosts)), strict=True))


def _run(options: Sequence[str]) -> int:
    """Run `paceline up` as a child process, which gets the signals that this one gets. Returns its exit code, or that of the signal."""
    told = 0
    # Its standard input ends with this process: so does it, however this one ends.
    child = subprocess.Popen(python_command("-m", "paceline", "up", "--tied", *options), stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        nonlocal told
        told = number
        child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = child.wait()
    return code or (128 + told if told else 0)
