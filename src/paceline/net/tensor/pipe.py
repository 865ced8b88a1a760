"""A TLS socket with bounded waits. A deadline counts only while no byte moves: each byte that moves restarts the whole time, so a slow link does
not count as stalled. One thread reads and writes the socket, inside `with`. Any thread may close it, which wakes that thread.

The socket never blocks: a read or a write is tried first, and the thread waits only if it can't be done yet. So a message costs no system call
beyond its own.

A thread that sleeps until data arrives wakes late, on a core that has gone cold. So a reader may poll for a while first, which cuts the delay of a
small message by half or more. It polls only on a core that no other thread wants: a thread that is interrupted while it polls stops polling for a
second.
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
"""Seconds that `close` waits for the thread it woke. Raising it: closing takes longer when that thread hangs; lowering it: the descriptor is more often
left to the garbage collector."""
KEEPALIVE_S = 5
GIVE_UP_S = 20

NOTICEABLE_S = 200e-6
"""Seconds of polling below which an interruption is indistinguishable from noise."""
NOT_WANTED_S = 1.0
"""Seconds without polling after another thread wanted the core. Raising it: small messages arrive later on a core that is free again; lowering it:
polling disturbs the other thread more often."""

RECORD_BYTES = 16 << 10
"""Largest content of a TLS record (bytes). After a full record the next one has probably arrived, too."""

LEAST_BYTES_PER_S = 64 << 10
"""Slowest rate (bytes/s) at which a steady transfer still counts as moving. Raising it: slower links count as stalled, and a peer that sends a byte now
and then is found sooner."""

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
    """Set the options of a socket: send small messages at once, and notice a peer that lost its power."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def cut(sock: socket.socket) -> None:
    """Shut down a connection while another thread reads it. Only the system's side is touched, since TLS belongs to that thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)
"""Give up the core to another thread: the other side may be waiting for data of exactly that thread."""

_NOT_YET = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


def _ready(sock: socket.socket, seconds: float, *, writing: bool) -> bool:
    """Return whether a socket is ready within `seconds`. Systems without `poll` have a `select` that takes any descriptor."""
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
    """Deadline that restarts with each byte that moves.

    Args:
        deadline: on the monotonic clock; each move sets it as far ahead as it was at first.
        n_bytes: bytes that are to move, at `LEAST_BYTES_PER_S` or faster; 0: not known yet.
    """

    __slots__ = ("_end", "_now", "_seconds", "deadline")

    def __init__(self, deadline: float, now: Callable[[], float], n_bytes: int = 0) -> None:
        self.deadline, self._now, self._seconds = deadline, now, deadline - now()
        self._end = deadline + n_bytes / LEAST_BYTES_PER_S if n_bytes else math.inf

    def moved(self, n_bytes: int = 0) -> None:
        """Restart the deadline because bytes moved.

        Args:
            n_bytes: bytes that are to move in all, where that is known by now.
        """
        self.deadline = self._now() + self._seconds
        if n_bytes and self._end == math.inf:
            self._end = self.deadline + n_bytes / LEAST_BYTES_PER_S
        self.deadline = min(self.deadline, self._end)


class Pipe:
    """One connection, after its handshake.

    Args:
        sock: becomes non-blocking.
        peer: the node at the other end.
    """

    def __init__(self, sock: ssl.SSLSocket, peer: NodeId) -> None:
        self.peer = peer
        self.now = time.perf_counter
        """Monotonic clock of all deadlines, in seconds."""
        sock.setblocking(False)
        self._sock, self._read = sock, _reader_of(sock)
        self._using = threading.Lock()
        self.look_s = 0.0
        """Seconds that a reader polls before it sleeps."""
        self._looks_from = 0.0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> None:
        """Keep the descriptor open while this thread reads or writes. Raises StreamClosed if the pipe is closed."""
        self._using.acquire()
        if self._closed:
            self._using.release()
            raise self._gone()

    def __exit__(self, *_: object) -> None:
        self._using.release()

    def send(self, data: memoryview | bytes, deadline: float | None) -> None:
        """Send all of the data.

        Args:
            deadline: on the monotonic clock; it moves on with each byte that is taken. None: `CLOSE_WAIT_S` from now.

        Raises:
            StreamStalled: the other side takes nothing, or too little.
            StreamClosed: the connection is gone.
        """
        at, n = self._write(data), len(data)
        if at == n:
            return
        silence = PipeSilence(self.now() + CLOSE_WAIT_S if deadline is None else deadline, self.now, n)
        view = memoryview(data)
        while at < n:
            # Record after record, as long as the system takes each one at once.
            began = at
            while at < n and (sent := self._write(view[at:])):
                at += sent
            if at > began:
                silence.moved()
            if at < n:
                self._wait(silence.deadline, "takes nothing", writing=True)

    def receive(self, into: memoryview, deadline: float) -> int:
        """Receive at least one byte: up to a record, or all whole records that have arrived. Returns: how many bytes.

        Args:
            into: where the bytes go.
            deadline: on the monotonic clock.

        Raises:
            StreamStalled: nothing arrived.
            StreamClosed: the connection is gone.
        """
        n = self._look(into, deadline) if self.look_s else self.receive_now(into)
        while not n:
            self._wait(deadline, "sends nothing", writing=False)
            n = self.receive_now(into)
        more = n
        while more == RECORD_BYTES and n < len(into):
            try:
                more = self.receive_now(into[n:])
            except StreamClosed:  # the next call raises it: the bytes before it count
                break
            n += more
        return n

    def receive_now(self, into: memoryview) -> int:
        """Receive the bytes that have arrived, without waiting. Returns: how many; 0: none.

        Raises:
            StreamClosed: the connection is gone.
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
        """Poll until something arrives, for `look_s` at most, unless another thread wants the core. Returns: bytes received."""
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
        """Wait until more can be sent, or there may be something to read."""
        # Look once even if the deadline has passed: this machine may have slept while the other side sent.
        if not _ready(self._sock, max(0.0, deadline - self.now()), writing=writing):
            raise StreamStalled(f"{self.peer} {what} on a tensor stream")

    def close(self, last_words: bytes = b"") -> None:
        """Close the connection. Idempotent, from any thread.

        Args:
            last_words: sent first, unless another thread is using the connection.
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
