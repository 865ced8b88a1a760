"""A rank of a tensor group as whoever has it run sees it, and the one that is a process of this host."""

from __future__ import annotations

import json
import pickle
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from paceline.core.errors import ConfigError, ExecutorLost
from paceline.core.processes import python_command
from paceline.ways.tensor import rank as protocol
from paceline.ways.tensor.memory import GroupMemory
from paceline.ways.tensor.rank import RankOrder

Lend = Callable[[str, int, int, int, int], Future[bytes]]
"""Bytes of a file of the model, by its name, as `core.manifest.ByteRuns` has them, once they are there. Cancelled where nothing waits for them any more."""


class Rank(Protocol):
    """One of a group's ranks but the first. Its commands, and how far it is, are in the group's memory."""

    order: RankOrder
    where: str
    """The machine it runs on, for people."""
    is_ready: bool
    """Its share is loaded."""
    numerics_id: str
    """Of its kernels, once it is ready; empty where they are this machine's."""

    @property
    def pid(self) -> int:
        """Of its process; 0 where that is another machine's."""
        ...

    @property
    def gone(self) -> str | None:
        """Why it runs no more; None while it does."""
        ...

    def wake(self) -> None:
        """Have it look for a command, if it sleeps."""
        ...

    def hear(self, wait_s: float) -> None:
        """Learn what it says of its load; waits for so long where it says nothing.

        Raises:
            ConfigError: it can't be loaded.
        """
        ...

    @property
    def is_silent(self) -> bool:
        """It loads, and has said nothing for longer than there is patience with it."""
        ...

    def ask(self, message: bytes, within_s: float) -> bytes:
        """Have it give out or take in a block; one that does not is ended.

        Raises:
            ExecutorLost: it is gone.
        """
        ...

    def kill(self) -> None:
        """End it at once. Idempotent."""
        ...

    def close(self, wait_s: float) -> None:
        """Let it end by itself, as it was told to, within so long, and free what it took here. Idempotent."""
        ...


class RankProcess:
    """A `Rank` that is a process of this host.

    Args:
        memory: of the group, or of this rank alone and what stands for the others; and its file descriptor.
        patience_s: with its silence while it loads.
        lend: gives the bytes that it asks for, where its order says so. Called where its load is heard of.

    Raises:
        ConfigError: the system starts no process.
    """

    numerics_id, where = "", "this machine"

    def __init__(self, order: RankOrder, memory: GroupMemory, memory_fd: int, patience_s: float, lend: Lend | None = None) -> None:
        self.order, self.is_ready, self._lend = order, False, lend
        self._lent: Future[bytes] | None = None
        """What it waits for."""
        self.progress = 0, 0
        """Bytes loaded, of bytes to load."""
        self._heard_s, self._patience_s = time.monotonic(), patience_s
        self._asking, self._sending = threading.Lock(), threading.Lock()
        try:
            self.connection, theirs = Pipe()
            with theirs:
                fds = (theirs.fileno(), memory_fd)
                memory.say_done(order.rank, memory.number)
                command = python_command("-m", protocol.__name__, *map(str, fds))
                self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)  # noqa: S603 - this program itself
        except OSError as error:
            why = f"A tensor rank can't be started: {error.strerror or error}"
            raise ConfigError(why, "Ask for fewer, or leave --tensor out.") from error
        with suppress(OSError):  # it has ended already, which who looks sees
            self.connection.send_bytes(pickle.dumps(order))

    connection: Connection

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def gone(self) -> str | None:
        status = self.popen.poll()
        return None if status is None else f"ended, with {status}"

    def send(self, message: bytes) -> None:
        """Raises OSError where it is gone. Several threads send."""
        with self._sending:
            self.connection.send_bytes(message)

    def wake(self) -> None:
        with suppress(OSError):  # it is gone, which who watches it sees
            self.send(protocol.WAKE)

    def hear(self, wait_s: float) -> None:
        with suppress(EOFError, OSError):  # it is gone, which who asks sees
            while not self.is_ready:
                if self._lent is not None:
                    if not wait([self._lent], wait_s).done:
                        return
                    self._lent, lent = None, self._lent
                    self.send(lent.result())
                if not self.connection.poll(wait_s):
                    return
                message = self.connection.recv_bytes()
                self._heard_s = time.monotonic()
                if message[:1] == protocol.LEND and self._lend is not None:
                    self._lent = self._lend(*json.loads(message[1:]))
                    continue
                if message[:1] == protocol.FAILED:
                    why, hint = json.loads(message[1:])
                    raise ConfigError(f"Rank {self.order.rank} of the tensor group can't be loaded: {why}", hint)
                if message[:1] == protocol.PROGRESS:
                    self.progress = int.from_bytes(message[1:9], "little"), int.from_bytes(message[9:17], "little")
                    return
                self.numerics_id = message[1:].decode()
                self.is_ready = message[:1] == protocol.READY

    def note_lent(self) -> None:
        """Bytes that it waits for come: it is not silent."""
        self._heard_s = time.monotonic()

    @property
    def is_silent(self) -> bool:
        return not self.is_ready and time.monotonic() - self._heard_s > self._patience_s

    def ask(self, message: bytes, within_s: float) -> bytes:
        with self._asking:
            try:
                self.send(message)
                if not self.connection.poll(within_s):
                    self.kill()
                return self.connection.recv_bytes()[1:]
            except (EOFError, OSError) as error:
                raise ExecutorLost(f"rank {self.order.rank} of the tensor group is gone", ()) from error

    def kill(self) -> None:
        if self._lent is not None:
            self._lent.cancel()
        self.popen.kill()
        self.popen.wait()

    def close(self, wait_s: float) -> None:
        try:
            self.popen.wait(wait_s if self.is_ready else 0)
        except subprocess.TimeoutExpired:
            self.kill()
        with self._asking:
            self.connection.close()
