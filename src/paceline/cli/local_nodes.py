"""A fleet of several nodes on one machine, in processes of their own: for trying, and for showing.

Law: it leaves nothing behind: the nodes end with this process, however it ends, and their folder goes with them. Models and compiled kernels
are this user's own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.store.home import Home

HOST = "127.0.0.1"
PRESET = "desk,exchange_s=0.5,restamp_s=2,ttl_s=10"
"""Quick to notice: these nodes come and go."""
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
"""Removes the folder once this process is gone, in whatever way."""


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """What this process must be to be the first of the nodes."""

    port: int
    threads: int
    names: tuple[str, ...]
    """Of all nodes."""
    host: str = HOST
    preset: str = PRESET


def start_local_fleet(count: int, threads: int | None) -> LocalFleet:
    """Start all nodes but the first, which is this process: its home is another one from now on.

    Args:
        count: nodes in all.
        threads: of each; None: the machine's, shared.
    """
    from paceline.node.cores import usable_cores

    each = threads or max(1, usable_cores() // count)
    root = Path(tempfile.mkdtemp(prefix="paceline-local-"))
    _tied([sys.executable, "-c", _JANITOR, str(root)], None)
    homes = _found_fleet(root, Home.from_environment(), count)
    with socket.create_server((HOST, 0)) as probe:
        port = int(probe.getsockname()[1])
    os.environ["PACELINE_HOME"] = str(homes[0])
    for home in homes[1:]:
        _start(home, port, each)
    return LocalFleet(port, each, tuple(home.name for home in homes))


def _found_fleet(root: Path, own: Home, count: int) -> list[Path]:
    """Homes with an identity each, of one new fleet, and this user's models and caches."""
    from paceline.transport.trust.authority import Authority
    from paceline.transport.trust.certificates import make_key
    from paceline.transport.trust.folder import FleetFolder
    from paceline.transport.trust.identity import Identity
    from paceline.transport.trust.requests import make_request

    now = SystemClock().wall()
    authority = Authority.create(now)
    homes: list[Path] = []
    for number in range(1, count + 1):
        home = Home(root / f"local-{number}")
        home.root.mkdir()
        for shared in ("models", "partial", "cache"):
            (own.root / shared).mkdir(parents=True, exist_ok=True)
            (home.root / shared).symlink_to(own.root / shared, target_is_directory=True)
        if (own.root / "config.toml").exists():
            shutil.copy(own.root / "config.toml", home.root)
        key, name = make_key(), NodeId(f"local-{number}")
        identity = Identity.assemble(key, authority.issue(make_request(key, name), name, now), authority.root, now)
        folder = FleetFolder(home.fleet)
        folder.write_secret(folder.identity_file, identity.to_pem())
        homes.append(home.root)
    return homes


def _start(home: Path, port: int, threads: int) -> None:
    command = [sys.executable, "-m", "paceline", "up", "--no-model", "--serve-shards", "--port", "0", "--threads", str(threads)]
    command += ["--fleet-host", HOST, "--fleet-port", "0", "--no-mdns", "--peer", f"{HOST}:{port}", "--fleet-preset", PRESET, "--tied"]
    _tied(command, home)


def _tied(command: list[str], home: Path | None) -> None:
    """Start a process that ends when its standard input does: with this one."""
    environment = os.environ if home is None else {**os.environ, "PACELINE_HOME": str(home)}
    with (Path(os.devnull) if home is None else home / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  our own program
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    _TIED.append(process)


_TIED: Final[list[subprocess.Popen[bytes]]] = []
"""Held, so that their input stays open as long as this process lives."""
