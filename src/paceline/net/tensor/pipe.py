"""A TLS socket whose waits are bounded: a deadline holds for as long as nothing moves, and each byte that does gives the whole time anew, so that
a slow link is no stall. One thread reads and writes it, inside `with`; any thread may close it, which wakes that one.

The socket never blocks: a read or a write is tried, and only what can't be done yet is waited for, so that a message costs no system call
beyond its own.

A thread that sleeps until something comes wakes late, on a core that has gone cold. So a reader may look for a while first, which halves
the way of a small message and more; but only on a core that no other thread wants: a thread that is interrupted at it does without for a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from paceline.core.errors import StreamClosed, StreamStalled
from paceline.core.ids import NodeId

CLOSE_WAIT_S = 1.0
"""How long closing waits for the thread that was woken."""
KEEPALIVE_S = 5
GIVE_UP_S = 20

NOTICEABLE_S = 200e-6
"""Of shorter waits one can't tell whether they were interrupted."""
NOT_WANTED_S = 1.0
"""How long no thread looks where another wanted the core."""

RECORD_BYTES = 16 << 10
"""Of TLS, at most: where one is full, the next is likely to be there."""

LEAST_BYTES_PER_S = 64 << 10
"""Of what moves all the time. Raising it: links that are slower count as stalled, and a peer that sends a byte now and then is found sooner."""

_OPTIONS = (
    # Linux
    ("TCP_KEEPIDLE", KEEPALIVE_S),
    ("TCP_KEEPINTVL", KEEPALIVE_S),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", GIVE_UP_S * 1000),
    # macOS
    ("TCP_KEEPALIVE", KEEPALIVE_S),
)


def tune(sock: socket.socket) -> None:
    """Send at once, and notice a machine that lost its power."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def cut(sock: socket.socket) -> None:
    """End a connection under the thread that reads it: only the system's side of it, as TLS is another thread's."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)
"""Let another thread have the core: it may be the one whose data the other side waits for."""

_NOT_YET = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


def _ready(sock: socket.socket, seconds: float, *, writing: bool) -> bool:
    """Whether a socket gets ready within so long. A system without `poll` has `select` for any number of sockets."""
    if not hasattr(select, "poll"):
        return any(select.select(() if writing else (sock,), (sock,) if writing else (), (), seconds))
    poll = select.poll()
    poll.register(sock, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(math.ceil(1000 * seconds)))


def _reader_of(sock: ssl.SSLSocket) -> Callable[[int, memoryview], int]:
    """Return a function that reads up to one TLS record and raises as `recv_into` does.

    It goes past the socket's own layer where there is one: large tensors are read record by record.
    """
    held = getattr(sock, "_sslobj", None)
    return held.read if held is not None else lambda n, into: sock.recv_into(into, n)


class PipeSilence:
    """Until when something has to move: a deadline that each byte moves on, by as long as it was away at first.

    Args:
        deadline: on the monotonic clock.
        n_bytes: that are to move, at `LEAST_BYTES_PER_S` or faster; 0: not known yet.
    """

    __slots__ = ("_end", "_now", "_seconds", "deadline")

    def __init__(self, deadline: float, now: Callable[[], float], n_bytes: int = 0) -> None:
        self.deadline, self._now, self._seconds = deadline, now, deadline - now()
        self._end = deadline + n_bytes / LEAST_BYTES_PER_S if n_bytes else math.inf

    def moved(self, n_bytes: int = 0) -> None:
        """Something did.

        Args:
            n_bytes: that are to move, where that is known by now.
        """
        self.deadline = self._now() + self._seconds
        if n_bytes and self._end == math.inf:
            self._end = self.deadline + n_bytes / LEAST_BYTES_PER_S
        self.deadline = min(self.deadline, self._end)


class Pipe:
    """One connection, its handshake done.

    Args:
        sock: becomes non-blocking.
    """

    def __init__(self, sock: ssl.SSLSocket, peer: NodeId) -> None:
        self.peer = peer
        self.now = time.perf_counter
        """The monotonic clock of all deadlines."""
        sock.setblocking(False)
        self._sock, self._read = sock, _reader_of(sock)
        self._using = threading.Lock()
        self.look_s = 0.0
        """How long a reader looks before it sleeps."""
        self._looks_from = 0.0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> None:
        """While a thread reads or writes, the descriptor stays open."""
        self._using.acquire()
        if self._closed:
            self._using.release()
            raise self._gone()

    def __exit__(self, *_: object) -> None:
        self._using.release()

    def send(self, data: memoryview | bytes, deadline: float | None) -> None:
        """All of it.

        Args:
            deadline: for as long as nothing is taken; None: soon.

        Raises:
            StreamStalled: the other side takes nothing, or too little.
            StreamClosed: it went away.
        """
        at, n = self._write(data), len(data)
        if at == n:
            return
        silence = PipeSilence(self.now() + CLOSE_WAIT_S if deadline is None else deadline, self.now, n)
        view = memoryview(data)
        while at < n:
            # Record after record, for as long as they are taken at once.
            began = at
            while at < n and (sent := self._write(view[at:])):
                at += sent
            if at > began:
                silence.moved()
            if at < n:
                self._wait(silence.deadline, "takes nothing", writing=True)

    def receive(self, into: memoryview, deadline: float) -> int:
        """At least a byte; up to a record, or as many whole ones as are there.

        Args:
            deadline: on the monotonic clock.

        Raises:
            StreamStalled: nothing came.
            StreamClosed: the other side went away.
        """
        n = self._look(into, deadline) if self.look_s else self.receive_now(into)
        while not n:
            self._wait(deadline, "sends nothing", writing=False)
            n = self.receive_now(into)
        more = n
        while more == RECORD_BYTES and n < len(into):
            try:
                more = self.receive_now(into[n:])
            except StreamClosed:  # said by the next call: what came before it counts
                break
            n += more
        return n

    def receive_now(self, into: memoryview) -> int:
        """What is there; 0: nothing.

        Raises:
            StreamClosed: the other side went away.
        """
        try:
            n = self._read(len(into), into)
        except _NOT_YET:
            return 0
        except (OSError, ValueError) as error:
            raise self._gone(error) from error
        if not n:
            raise self._gone()
        return n

    def _look(self, into: memoryview, deadline: float) -> int:
        """Read until something comes, for a while, if the core is this thread's."""
        n, now = self.receive_now(into), self.now()
        if n or now < self._looks_from:
            return n
        began, computed = now, time.thread_time()
        until = min(began + self.look_s, deadline)
        while not n and now < until:
            _give_way()
            n, now = self.receive_now(into), self.now()
        took = now - began
        if took > NOTICEABLE_S and time.thread_time() - computed < 0.7 * took:
            self._looks_from = now + NOT_WANTED_S
        return n

    def _write(self, data: memoryview | bytes) -> int:
        try:
            return self._sock.send(data)
        except _NOT_YET:
            return 0
        except (OSError, ValueError) as error:
            raise self._gone(error) from error

    def _wait(self, deadline: float, what: str, *, writing: bool) -> None:
        """Until more can be sent, or there may be something to read."""
        # Once even where the deadline has passed: this machine may have slept, and the other side not.
        if not _ready(self._sock, max(0.0, deadline - self.now()), writing=writing):
            raise StreamStalled(f"{self.peer} {what} on a tensor stream")

    def close(self, last_words: bytes = b"") -> None:
        """Idempotent, from any thread.

        Args:
            last_words: sent where no other thread is at it.
        """
        if self._closed:
            return
        free = self._using.acquire(blocking=False)
        self._closed = True
        if free and last_words:
            with contextlib.suppress(StreamClosed):
                self._write(last_words)
        cut(self._sock)
        if free or self._using.acquire(timeout=CLOSE_WAIT_S):
            self._sock.close()
            self._using.release()

    def _gone(self, error: Exception | None = None) -> StreamClosed:
        if self._closed:
            return StreamClosed(f"The tensor stream with {self.peer} was closed here")
        why = getattr(error, "strerror", None) or (str(error) if error else "")
        return StreamClosed(f"{self.peer} left a tensor stream" + (f": {why}" if why else ""))
