"""The other ranks of a tensor group on this host, each a process: started, watched, ended, and started again.

Law: a rank that is gone, or that computes nothing for `STALL_S` while another waits for it, is lost, and with it what all ranks were at. They are whole
again once a process has its share; nobody waits for one that is not there.
"""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final

from paceline.core.errors import ConfigError, ExecutorLost, ExecutorUnavailable
from paceline.ways.tensor import rank as protocol
from paceline.ways.tensor.memory import GroupMemory
from paceline.ways.tensor.rank import RankOrder

logger = logging.getLogger(__name__)

STALL_S: Final = 2.0
"""For which a rank may be at one half of a layer while others wait for it. Raising it: one that is stopped is noticed later."""
LOOK_S: Final = 0.1
"""Between two looks at the ranks."""
MOST_STARTS: Final = 3
"""Times that ranks are started again, within `STARTS_S`, before requests are told that there are none."""
STARTS_S: Final = 600.0
AGAIN_S: Final = 1.0
"""From one such start to the next, and twice as long each time. Raising it: ranks that are lost one soon after the other are missed for longer."""
ENDING_S: Final = 4.0
"""For a rank to end when it is told to; then it is killed."""
ASKED_S: Final = 10.0
"""For a rank to give out or take in a block; then it is killed. It does so beside what it computes."""
SILENT_S: Final = 600.0
"""For a rank to say how far its first load is; then it is killed. It may wait for others that compile kernels."""
SILENT_AGAIN_S: Final = 60.0
"""Likewise, of one that is started again: kernels are there, and answers wait."""


@dataclass(slots=True)
class _Process:
    """One rank."""

    order: RankOrder
    popen: subprocess.Popen[bytes]
    connection: Connection
    heard_s: float
    """When it said something while it loaded."""
    patience_s: float
    """With its silence, then."""
    is_ready: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)
    """Held for a question and its answer."""
    sending: threading.Lock = field(default_factory=threading.Lock)
    """Held for one message: several threads send."""

    def send(self, message: bytes) -> None:
        """Raises OSError where it is gone."""
        with self.sending:
            self.connection.send_bytes(message)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


class RankProcesses:
    """All ranks but the first, which is this process.

    Args:
        memory: of the group, and its file descriptor.
        orders: of those ranks.
    """

    def __init__(self, memory: GroupMemory, memory_fd: int, orders: Sequence[RankOrder]) -> None:
        self._memory, self._memory_fd = memory, memory_fd
        self._starts: list[float] = []
        """When ranks were started again."""
        self.lost: str | None = None
        """Why they can't run, until they are whole again."""
        self.losses = 0
        """So far; with each, all KV is void."""
        self._lost_s = 0.0
        self._closed = False
        self._replacing = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="paceline-tensor-watcher", daemon=True)
        self._processes = list[_Process]()
        try:
            for order in orders:
                self._processes.append(self._start(order, SILENT_S))
        except ConfigError:
            self.close()
            raise

    @property
    def ids(self) -> tuple[int, ...]:
        """Process ids."""
        return tuple(process.popen.pid for process in self._processes)

    def await_loads(self) -> None:
        """Wait until all are loaded, and watch them from then on.

        Raises:
            ConfigError: one can't be.
        """
        for process in self._processes:
            while not self._is_ready(process, wait_s=1.0):
                if process.popen.poll() is not None:
                    name, status = process.order.rank, process.popen.returncode
                    raise ConfigError(f"Rank {name} of the tensor group ended while it loaded, with {status}", "What it printed says why.")
                self._give_up_silent(process)
        self._watcher.start()

    def wake(self) -> None:
        """Let those that sleep see the command that was given."""
        for process in self._processes:
            if self._memory.sleeps(process.order.rank):
                with suppress(OSError):  # it is gone, which the watcher sees
                    process.send(protocol.WAKE)

    def ask(self, rank: int, message: bytes) -> bytes:
        """Have a rank give out or take in a block.

        Raises:
            ExecutorLost: it is gone, or its KV is void.
        """
        process = self._processes[rank - 1]
        with process.asking:
            try:
                self.check()
                process.send(message)
                if not process.connection.poll(ASKED_S):
                    process.kill()
                answer = process.connection.recv_bytes()[1:]
            except (EOFError, OSError) as error:
                raise ExecutorLost(f"rank {rank} of the tensor group is gone", ()) from error
        if process is not self._processes[rank - 1]:
            raise ExecutorLost(f"rank {rank} of the tensor group was started again", ())
        self.check()
        return answer

    @property
    def are_done(self) -> bool:
        """Whether all are done with the command that was given last."""
        return all(self._memory.done(process.order.rank) == self._memory.number for process in self._processes)

    def call_off(self) -> None:
        """End what they are at, and wait until it is over: one that does not end is lost."""
        self._memory.give_up()
        until = time.monotonic() + STALL_S
        while self.lost is None and not self.are_done:
            if time.monotonic() > until:
                self._lose(f"a batch that was given up did not end for {STALL_S:g} s")
            time.sleep(0.001)

    def check(self) -> None:
        """Raises ExecutorLost where what was just run is void."""
        if self.lost is not None:
            raise ExecutorLost(f"the tensor group: {self.lost}", ())

    @property
    def lacks(self) -> str | None:
        """Why they could not run now; None where all are loaded."""
        whole = all(process.is_ready and process.popen.returncode is None for process in self._processes)
        return None if whole else self.lost

    def make_whole(self) -> bool:
        """Have processes in place of those that are lost. Returns whether all are loaded; waits a moment where not.

        Raises:
            ExecutorUnavailable: ranks were started too often of late.
        """
        with self._replacing:
            if self._replaced() and self.are_done:
                self.lost = None
                logger.warning("the tensor group is whole again")
        return self.lost is None

    def _replaced(self) -> bool:
        """See `make_whole`: as far as it is no matter who asks."""
        now = time.monotonic()
        for process in self._processes:
            if process.is_ready and now - self._lost_s > STALL_S and self._memory.done(process.order.rank) != self._memory.number:
                process.kill()  # stopped, too
            self._give_up_silent(process)
        gone = [i for i, process in enumerate(self._processes) if process.popen.poll() is not None]
        self._starts = [at for at in self._starts if now - at < STARTS_S]
        if gone and len(self._starts) >= MOST_STARTS:
            hint = "What its ranks printed may say why they end; or start without --tensor."
            raise ExecutorUnavailable(f"The tensor group is not whole: {self.lost}", hint, code="tensor_unavailable")
        if gone and self._starts and now - self._starts[-1] < AGAIN_S * 2 ** (len(self._starts) - 1):
            time.sleep(LOOK_S)
            return False
        self._starts += [now] * bool(gone)
        try:
            for i in gone:
                with self._processes[i].asking:
                    self._processes[i].connection.close()
                self._processes[i] = self._start(self._processes[i].order, SILENT_AGAIN_S)
            return all(self._is_ready(process, LOOK_S) for process in self._processes)
        except ConfigError as error:
            self.lost = error.message
            logger.warning("the tensor group: %s", error)
            raise ExecutorUnavailable(error.message, error.hint, code="tensor_unavailable") from error

    def close(self) -> None:
        """End them all."""
        self._closed = True
        if self._watcher.is_alive():
            self._watcher.join()
        self._memory.give_up()
        self._memory.give_end()
        self.wake()
        for process in self._processes:
            try:
                process.popen.wait(ENDING_S if process.is_ready else 0)
            except subprocess.TimeoutExpired:
                process.kill()
            with process.asking:
                process.connection.close()

    def _start(self, order: RankOrder, patience_s: float) -> _Process:
        """Raises ConfigError where the system allows for no further process."""
        try:
            ours, theirs = Pipe()
            with theirs:
                fds = (theirs.fileno(), self._memory_fd)
                self._memory.say_done(order.rank, self._memory.number)
                command = [sys.executable, "-m", protocol.__name__, *map(str, fds)]
                popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)  # noqa: S603 - this program itself
        except OSError as error:
            why = f"A tensor rank can't be started: {error.strerror or error}"
            raise ConfigError(why, "Ask for fewer, or leave --tensor out.") from error
        with suppress(OSError):  # it has ended already, which who looks sees
            ours.send_bytes(pickle.dumps(order))
        return _Process(order, popen, ours, time.monotonic(), patience_s)

    def _give_up_silent(self, process: _Process) -> None:
        """End one whose load says nothing any more."""
        if not process.is_ready and time.monotonic() - process.heard_s > process.patience_s:
            process.kill()

    def _is_ready(self, process: _Process, wait_s: float) -> bool:
        """Whether a rank is loaded; waits a moment.

        Raises:
            ConfigError: it can't be.
        """
        with suppress(EOFError, OSError):  # it is gone, which who asks sees
            while not process.is_ready and process.connection.poll(wait_s):
                message = process.connection.recv_bytes()
                process.heard_s = time.monotonic()
                if message[:1] == protocol.FAILED:
                    why, hint = json.loads(message[1:])
                    raise ConfigError(f"Rank {process.order.rank} of the tensor group can't be loaded: {why}", hint)
                process.is_ready = message[:1] == protocol.READY
        return process.is_ready

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.losses += 1
            self.lost, self._lost_s = why, time.monotonic()
            logger.warning("the tensor group: %s; it is started again, and answers go on", why)
            self._memory.give_up()

    def _watch(self) -> None:
        """See that the ranks live, and get on while others wait for them; and have others load in the place of the lost, whether or not a batch waits."""
        since, before = time.monotonic(), self._memory.arrived
        while not self._closed:
            time.sleep(LOOK_S)
            now, arrived = time.monotonic(), self._memory.arrived
            for process in self._processes:
                if process.is_ready and process.popen.poll() is not None:
                    self._lose(f"rank {process.order.rank} ended, with {process.popen.returncode}")
            waits = len(set(arrived)) > 1 and self.lost is None
            if not waits or arrived != before or now - since > STALL_S + 1:  # in the last case this process slept
                since, before = now, arrived
            elif now - since > STALL_S and (slowest := min(range(len(arrived)), key=arrived.__getitem__)):
                self._processes[slowest - 1].kill()
                self._lose(f"rank {slowest} computed nothing for {STALL_S:g} s")
            if self._replacing.acquire(blocking=False):
                try:
                    with suppress(ExecutorUnavailable):  # who has a batch to run is told, by what `lost` says
                        if self.lost is not None:
                            self._replaced()
                finally:
                    self._replacing.release()
