"""A TLS socket with deadlines. One thread reads and writes it, inside `with`; any thread may close it, which wakes that one.

Timeouts are the kernel's and Python's business: they are set only where the one in force is off by more than a tenth, so that a message
costs no system call beyond its own.

A thread that sleeps until something comes wakes late, on a core that has gone cold. So a reader may look for a while first, which halves
the way of a small message and more; but only on a core that nobody else wants: who is interrupted at it does without for a second.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

from paceline.core.errors import StreamClosed, StreamStalled
from paceline.core.ids import NodeId

CLOSE_WAIT_S = 1.0
"""How long closing waits for the thread that was woken."""
KEEPALIVE_S = 5
GIVE_UP_S = 20

NOTICEABLE_S = 200e-6
"""Of shorter waits one can't tell whether they were interrupted."""
NOT_WANTED_S = 1.0
"""How long nobody looks where somebody else wanted the core."""

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
    """End a connection under whoever reads it: only the system's side of it, as TLS is another thread's."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Pipe:
    """One connection, its handshake done.

    Args:
        sock: with a timeout or none; this sets its own.
        peer: who is at the far end.
    """

    def __init__(self, sock: ssl.SSLSocket, peer: NodeId) -> None:
        self.peer = peer
        self._sock = sock
        self._patience = -1.0
        self._using = threading.Lock()
        self.look_s = 0.0
        """How long a reader looks before it sleeps."""
        self._looks_from = 0.0
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(sock, select.POLLIN)
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
            data: what to send.
            deadline: None: as patient as the last wait was.

        Raises:
            StreamStalled: the other side takes nothing, or too little.
            StreamClosed: it went away.
        """
        if deadline is None:
            deadline = time.perf_counter() + (self._patience if self._patience > 0 else CLOSE_WAIT_S)
        self._wait_until(deadline)
        sock = self._sock
        try:
            at = sock.send(data)
            if at < len(data):
                view = memoryview(data)
                while at < len(view):
                    # What was taken of it so far is one record, so this looks at the clock every 16 KB.
                    self._wait_until(deadline)
                    at += sock.send(view[at:])
        except TimeoutError as error:
            raise self._stalled("takes nothing") from error
        except (OSError, ValueError) as error:
            raise self._gone(error) from error

    def receive(self, into: memoryview, deadline: float) -> int:
        """At least a byte; as many as there are, up to a record.

        Raises:
            StreamStalled: nothing came.
            StreamClosed: the other side went away.
        """
        self._wait_until(deadline)
        try:
            if self.look_s and not self._sock.pending():
                self._look(deadline)
            n = self._sock.recv_into(into)
        except TimeoutError as error:
            raise self._stalled("sends nothing") from error
        except (OSError, ValueError) as error:
            raise self._gone(error) from error
        if not n:
            raise self._gone()
        return n

    def _look(self, deadline: float) -> None:
        """Until something comes, for a while, if the core is this thread's."""
        began = time.perf_counter()
        if self._poll is None or began < self._looks_from:
            return
        until, computed = min(began + self.look_s, deadline), time.thread_time()
        now = began
        while not self._poll.poll(0) and now < until:
            now = time.perf_counter()
        took = time.perf_counter() - began
        if took > NOTICEABLE_S and time.thread_time() - computed < 0.7 * took:
            self._looks_from = began + took + NOT_WANTED_S

    def receive_now(self, into: memoryview) -> int:
        """What is there; 0: nothing.

        Raises:
            StreamClosed: the other side went away.
        """
        self._set(0.0)
        try:
            n = self._sock.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return 0
        except (OSError, ValueError) as error:
            raise self._gone(error) from error
        if not n:
            raise self._gone()
        return n

    def send_now(self, data: bytes) -> None:
        """Some last words, if they can be sent without waiting."""
        with contextlib.suppress(OSError, ValueError):
            self._set(0.0)
            self._sock.send(data)

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
            self.send_now(last_words)
        cut(self._sock)
        if free or self._using.acquire(timeout=CLOSE_WAIT_S):
            self._sock.close()
            self._using.release()

    def _wait_until(self, deadline: float) -> None:
        remaining = deadline - time.perf_counter()
        if abs(remaining - self._patience) > 0.1 * remaining:
            if remaining <= 0:
                raise self._stalled("has no time left")
            self._set(remaining)

    def _set(self, patience_s: float) -> None:
        if patience_s != self._patience:
            self._sock.settimeout(patience_s)
            self._patience = patience_s

    def _stalled(self, what: str) -> StreamStalled:
        return StreamStalled(f"{self.peer} {what} on a tensor stream")

    def _gone(self, error: Exception | None = None) -> StreamClosed:
        if self._closed:
            return StreamClosed(f"The tensor stream with {self.peer} was closed here")
        why = getattr(error, "strerror", None) or (str(error) if error else "")
        return StreamClosed(f"{self.peer} left a tensor stream" + (f": {why}" if why else ""))
