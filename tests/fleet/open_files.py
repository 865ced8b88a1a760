"""What processes of a fleet have open, and what of it nothing explains.

How many connections there are is luck: it depends on which nodes a route ran over, and on what gossip has measured so far. Which there may be
is not: both ends are open, and two nodes have at most one each way for every purpose, and one for activations.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from paceline.net.channels import Purpose

if TYPE_CHECKING:
    from tests.fleet.machines import Machine

CHANNELS = len(Purpose)
ACTIVATIONS = 1


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Of one process, at one moment."""

    pid: int
    listening: frozenset[int]
    """Ports."""
    connections: tuple[tuple[int, int], ...]
    """This end's port, and the other's."""
    others: Counter[str]
    """All files but these, by kind; none where the system has no /proc."""

    def connected_to(self, port: int) -> int:
        """Return the number of connections whose end here is `port`."""
        return sum(own == port for own, _ in self.connections)


def open_files(pid: int) -> OpenFiles:
    sockets = psutil.Process(pid).net_connections("tcp")
    internet, others = {one.fd for one in sockets}, Counter[str]()
    folder = Path(f"/proc/{pid}/fd")
    for entry in folder.iterdir() if folder.is_dir() else ():
        if int(entry.name) not in internet:
            try:
                others[re.sub(r"[0-9]+", "N", str(entry.readlink()))] += 1
            except FileNotFoundError:
                continue  # closed meanwhile
    listening = frozenset(one.laddr.port for one in sockets if not one.raddr)
    return OpenFiles(pid, listening, tuple((one.laddr.port, one.raddr.port) for one in sockets if one.raddr), others)


def unexplained(machine: Machine, processes: Iterable[int], before: OpenFiles) -> list[str]:
    """What `before`'s process has open that it should not.

    Args:
        machine: whose view names the fleet's ports.
        processes: of all nodes.
        before: what the process had open once.
    """
    fleet = {int(address.rpartition(":")[2]) for card in machine.sight().view.cards for address in card.addresses}
    seen = {pid: open_files(pid) for pid in {*processes, before.pid}}
    owners = {connection: pid for pid, opened in seen.items() for connection in opened.connections}
    now = seen[before.pid]
    return [f"{count} x {kind}" for kind, count in (now.others - before.others).items()] + [
        *_unexplained_connections(now, seen, owners, fleet)
    ]


def _unexplained_connections(
    now: OpenFiles, seen: dict[int, OpenFiles], owners: dict[tuple[int, int], int], fleet: set[int]
) -> Iterator[str]:
    counts: Counter[tuple[int, int, int]] = Counter()
    tests = set(open_files(os.getpid()).connections)
    for own, remote in now.connections:
        if (remote, own) in tests:
            continue  # a client of the API
        other = owners.get((remote, own))
        if other is None:
            yield f"a connection from port {own} to port {remote}, which no node has open"
        elif own in now.listening:
            counts[other, now.pid, own] += 1
        elif other != now.pid:  # else its other end is counted
            counts[now.pid, other, remote] += 1
    for (client, server, port), count in counts.items():
        nodes = len(seen[client].listening & fleet)
        most = nodes * (CHANNELS if port in fleet else ACTIVATIONS)
        if count > most:
            yield f"{count} connections of process {client} to port {port} of process {server}, where there may be {most}"
