"""Who is on a port's connections, and which of them are hung up: strangers, the silent, the idle, the revoked, and those beyond a share.

gRPC refuses a handshake inside its core, and tells Python neither that it did nor whom; it holds a connection for as long as the far end
likes. What Python does learn is that a handshake begins, which connections a port has at that
moment (they are file descriptors of this process), and whose calls arrive. A member calls as soon as it is connected: a connection that ends
without a call was refused, or left by itself, and its address goes into the log; one that stays without a call is hung up.

This process's connections, seen past gRPC, which keeps them to itself: they are file descriptors like any other.

Who was refused, in the log. A party that keeps knocking gets a few lines a minute, so that a flood fills no disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from paceline.core.background import tell_loop
from paceline.core.clock import Clock, SystemClock
from paceline.core.ids import NodeId
from paceline.core.text import printable
from paceline.net.trust.certificates import Member

Remote = tuple[str, int]
"""The far end of a connection: host and port."""
_CLOSE_WAIT = 8
"""The state in Linux's struct tcp_info of a connection whose far end sends no more."""
_MIN_RTT, _UNKNOWN = 148, (1 << 32) - 1
"""Where Linux's struct tcp_info has the shortest round trip of the last five minutes, in microseconds; and what stands there where there was none."""


def remote_of(peer: str) -> Remote:
    """The far end that gRPC calls ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdigit() else 0


def connections(port: int) -> dict[Remote, bool]:
    """The far ends of the connections to a port that this process serves, and which of them have hung up, as far as the system says it."""
    found: dict[Remote, bool] = {}
    for end in _sockets():
        try:
            if end.getsockname()[1] == port:
                host, remote = end.getpeername()[:2]
                found[_plain(host), remote] = _has_hung_up(end)
        except OSError:
            continue  # listening, or closed meanwhile
    return found


def _has_hung_up(end: socket.socket) -> bool:
    return sys.platform == "linux" and end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT


def hang_up(remotes: Collection[Remote]) -> None:
    """End the connections from `remotes`, whatever is still on its way."""
    if not remotes:
        return
    for end in _sockets():
        try:
            host, port = end.getpeername()[:2]
            if (_plain(host), port) in remotes:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # listening, or closed meanwhile


def round_trip_s(address: str) -> float | None:
    """The shortest that the network took of late, on connections of this process to host:port: that of the network alone. None: the system does not say.

    Linux remembers it for five minutes (`tcp_min_rtt_wlen`): a network that became slower counts for as long as it was before.
    """
    host, _, port = address.rpartition(":")
    found = list[int]()
    for end in _sockets() if sys.platform == "linux" else ():
        try:
            far, its_port = end.getpeername()[:2]
            if (_plain(far), its_port) == (host.strip("[]"), int(port)):
                found += struct.unpack_from("I", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4), _MIN_RTT)
        except (OSError, struct.error):
            continue  # closed meanwhile, or an old system
    known = [us for us in found if us < _UNKNOWN]
    return min(known) / 1e6 if known else None


def _sockets() -> Generator[socket.socket]:
    """Every internet socket of this process, each for the time of one step only. A copy, so that a number given to another file can't mislead."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            end = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket
            continue
        with end:
            if end.family in {socket.AF_INET, socket.AF_INET6}:
                yield end


def _plain(host: str) -> str:
    return host.partition("%")[0].removeprefix("::ffff:")


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lines:
    """What a party was granted in its current minute."""

    since: float
    count: int = 0


class Refusals:
    """The log of refused parties of one process. For any thread."""

    EVERY_S = 60.0
    LINES = 8
    MOST_LINES = 256
    """For all parties together: a stranger may have as many addresses as it likes."""
    REMEMBERED = 256

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, _Lines] = OrderedDict()
        self.total = 0
        """Refusals since the start, logged or not."""
        self._all = _Lines(0.0)

    def note(self, who: str, why: str, *, at: str = "") -> None:
        """Say that a caller was refused, and why. Nothing here may hold a secret.

        Args:
            who: a node id that was proved, or an address's host: by this the lines are counted.
            why: what was wrong.
            at: more of where, such as a port.
        """
        with self._lock:
            self.total += 1
            now = self._clock.monotonic()
            lines = self._lines.get(who)
            if lines is None or now - lines.since >= self.EVERY_S:
                lines = self._lines[who] = _Lines(now)
                if len(self._lines) > self.REMEMBERED:
                    self._lines.popitem(last=False)
            self._lines.move_to_end(who)
            lines.count += 1
            if now - self._all.since >= self.EVERY_S:
                self._all = _Lines(now)
            is_told = lines.count <= self.LINES and self._all.count < self.MOST_LINES
            self._all.count += is_told
            is_last = lines.count == self.LINES or self._all.count == self.MOST_LINES
        if is_told:
            last = " (no more of this for a minute)" if is_last else ""
            logger.warning("refused %s: %s%s", printable(f"{who} ({at})" if at else who), printable(why), last)


SILENT_S = 10.0
"""Without a first call. Raising it: what a stranger, or a certificate that was revoked, makes a node hold without a call."""
IDLE_S = 600.0
"""Without a call. gRPC takes leave of the orderly ones sooner."""
MAX_SILENT = 256
"""Of all strangers together; half of them stay where there are more. A member is among them until its first call."""
MAX_OF_NODE = 64
"""Connections of one member: each purpose and address has one."""
LOOKS_A_SECOND = 50
"""Of a flood of connections, not each is looked at,"""
ARRIVALS = 64
"""but one of so many is."""
IDLE_LOOK_S = 60.0


@dataclass(slots=True)
class _Connection:
    since: float
    """The clock's time of its last call, or of when it was first seen."""
    member: Member | None = None
    calls: int = 0
    """Under way."""
    has_left: bool = False
    """Its far end had hung up before this process looked at it first, as callers do while this process is stopped or its machine asleep."""


class ConnectionWatch:
    """Watches one port. Made and used on the event loop; only `connection` comes from gRPC's threads.

    Args:
        look_s: how often connections without a call are looked at, while there are any.
        max_silent: how many of them may be.
        names_those_who_leave: whether a connection that ends without a call was refused. At a port that asks for no certificate it was not.
    """

    def __init__(
        self, refusals: Refusals, clock: Clock, look_s: float = 1.0, max_silent: int = MAX_SILENT, *, names_those_who_leave: bool = True
    ) -> None:
        self._refusals, self._clock, self._look_s, self._max_silent = refusals, clock, look_s, max_silent
        self._names_those_who_leave = names_those_who_leave
        self._loop = asyncio.get_running_loop()
        self._port: int | None = None
        self._open: dict[Remote, _Connection] = {}
        """As they came."""
        self._timer: asyncio.TimerHandle | None = None
        self._second, self._looks, self._arrivals = 0.0, 0, 0

    def watch(self, port: int) -> None:
        """Start, once the port is known."""
        self._port = port

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._port = None

    def connection(self) -> None:
        """A handshake begins. Called in a thread of gRPC's."""
        now = self._clock.monotonic()
        if now - self._second >= 1:
            self._second, self._looks = now, 0
        self._arrivals += 1
        if self._port is None or (self._looks >= LOOKS_A_SECOND and self._arrivals < ARRIVALS):
            return
        self._looks, self._arrivals = self._looks + 1, 0
        tell_loop(self._loop, self._arrived, connections(self._port))

    def began(self, peer: str, member: Member | None = None) -> None:
        """A call came from `peer` (ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5), by a member where certificates are asked for."""
        found = self._open.setdefault(remote_of(peer), _Connection(self._clock.monotonic()))
        found.calls += 1
        if found.member is None and member is not None:
            found.member = member
            self._share(member.node_id)
        self._look_later()

    def ended(self, peer: str) -> None:
        """That call is over."""
        found = self._open.get(remote_of(peer))
        if found is not None:
            found.calls -= 1
            found.since = self._clock.monotonic()

    def cut(self, node_id: NodeId, not_after: int) -> None:
        """Hang up a revoked node, whatever its connections carry, and all that have not said who they are: one may be its own."""
        hang_up(
            {
                remote
                for remote, one in self._open.items()
                if one.member is None or (one.member.node_id == node_id and one.member.issued_at <= not_after)
            }
        )

    def hang_up(self, peer: str) -> None:
        """Hang up one connection, of which is known why."""
        self._open.pop(remote_of(peer), None)
        hang_up([remote_of(peer)])

    # ------------------------------------------------------------------------------------------------------------------ inside

    def _arrived(self, remotes: Mapping[Remote, bool]) -> None:
        now = self._clock.monotonic()
        for remote in remotes.keys() - self._open.keys():
            self._open[remote] = _Connection(now, has_left=remotes[remote])
        silent = self._silent
        if len(silent) > self._max_silent:
            self._turn_away(_most_in_the_way(silent, len(silent) - self._max_silent // 2), "it was silent while others came")
        self._look_later()

    @property
    def _silent(self) -> list[Remote]:
        return [remote for remote, one in self._open.items() if one.member is None and not one.calls]

    def _share(self, node_id: NodeId) -> None:
        """Keep a node to its number of connections: the one goes that has been without a call for longest."""
        own = [(one.calls > 0, one.since, remote) for remote, one in self._open.items() if one.member and one.member.node_id == node_id]
        if len(own) > MAX_OF_NODE:
            self._refusals.note(node_id, f"it has more than {MAX_OF_NODE} connections")
            hang_up([min(own)[2]])

    def _look_later(self) -> None:
        wait_s = self._look_s if self._silent else IDLE_LOOK_S
        if self._port is None or not self._open or (self._timer is not None and self._timer.when() <= self._loop.time() + wait_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._port is None:
            return
        open_now = connections(self._port)
        for remote in [remote for remote in self._open if remote not in open_now]:
            one = self._open.pop(remote)
            if one.has_left:
                logger.debug("%s (port %d) hung up before this node answered", *remote)
            elif one.member is None and self._names_those_who_leave:
                self._note(remote, "it showed no certificate of this fleet, or left without a call (as a member does that is stopped)")
        now = self._clock.monotonic()
        late = [remote for remote in self._silent if now - self._open[remote].since >= SILENT_S]
        idle = [remote for remote, one in self._open.items() if one.member and not one.calls and now - one.since >= IDLE_S]
        self._turn_away(late, f"it was connected for {SILENT_S:.0f} s without a call")
        hang_up(idle)
        self._look_later()

    def _turn_away(self, remotes: Collection[Remote], why: str) -> None:
        for remote in remotes:
            self._note(remote, why)
            del self._open[remote]
        hang_up(remotes)

    def _note(self, remote: Remote, why: str) -> None:
        self._refusals.note(remote[0], why, at=f"port {remote[1]}")


def _most_in_the_way(silent: list[Remote], count: int) -> list[Remote]:
    """So many to hang up, of those that came first: each from the host that has the most then."""
    of_host: dict[str, list[Remote]] = {}
    for remote in silent:
        of_host.setdefault(remote[0], []).append(remote)
    left, chosen = Counter({host: len(ones) for host, ones in of_host.items()}), list[Remote]()
    for _ in range(count):
        ((host, number),) = left.most_common(1)
        chosen.append(of_host[host][len(of_host[host]) - number])
        left[host] -= 1
    return chosen
