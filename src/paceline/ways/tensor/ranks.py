"""The other ranks of a tensor group, each a process of this host or of another: started, watched, ended, and started again.

Law: a rank that is gone, or that computes nothing for `STALL_S` while another waits for it, is lost, and with it what all ranks were at. They are whole
again once a process has its share; nobody waits for one that is not there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from paceline.core.backoff import Recent
from paceline.core.clock import PREPARE_S
from paceline.core.errors import SERVER_STOPPING, ConfigError, ExecutorLost, ExecutorUnavailable, NodeStopping
from paceline.core.following import is_same_arithmetic
from paceline.core.generation import Notice
from paceline.ways.tensor.memory import GroupMemory
from paceline.ways.tensor.process import Rank, RankProcess
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
SILENT_AGAIN_S: Final = 60.0
"""Seconds for a rank that is started again to load a further byte; then it is killed. Its kernels are there, and answers wait for it."""


StartsRank = Callable[[RankOrder, float], Rank]
"""Has a rank loaded on another machine; how long it may be silent while it loads. Does not wait."""


class RankProcesses:
    """All ranks but the first, which is this process.

    Args:
        memory: of the group, and its file descriptor.
        orders: of those ranks.
        away: ranks that run on other machines. One that is lost is asked for there once more; where that fails it runs here.
    """

    def __init__(
        self, memory: GroupMemory, memory_fd: int, orders: Sequence[RankOrder], away: Mapping[int, StartsRank] = MappingProxyType({})
    ) -> None:
        self._memory, self._memory_fd, self._away = memory, memory_fd, dict(away)
        self._starts = Recent(MOST_STARTS, STARTS_S)
        """Of ranks, after the first."""
        self.lost: str | None = None
        """Why they can't run, until they are whole again."""
        self.losses = 0
        """So far; with each, all KV is void."""
        self.notices = deque[Notice]()
        """What clients may want to know. Whoever tells them takes it."""
        self._lost_s = 0.0
        self._closed, self._numerics_id = False, ""
        self._replacing = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="paceline-tensor-watcher", daemon=True)
        self._processes = list[Rank]()
        try:
            for order in orders:
                self._processes.append(self._start(order, PREPARE_S))
        except (ConfigError, NodeStopping):
            self.close()
            raise

    @property
    def ids(self) -> tuple[int, ...]:
        """Process ids; 0 for those of other machines."""
        return tuple(process.pid for process in self._processes)

    @property
    def away(self) -> tuple[int, ...]:
        """Those that run, or are to run, on other machines."""
        return tuple(sorted(self._away))

    def await_loads(self) -> None:
        """Wait until all are loaded, and watch them from then on.

        Raises:
            ConfigError: one can't be.
        """
        for process in self._processes:
            while not self._is_ready(process, wait_s=1.0):
                if (gone := process.gone) is not None:
                    why = f"Rank {process.order.rank} of the tensor group was lost while it loaded: it {gone}"
                    raise ConfigError(why, "What it printed says why.")
                self._give_up_silent(process)
        self._watcher.start()

    def check_numerics(self, numerics_id: str) -> None:
        """Have those of other machines held, whenever they are loaded, to this machine's kernels."""
        self._numerics_id = numerics_id

    def wake(self) -> None:
        """Let those that sleep see the command that was given."""
        for process in self._processes:
            if self._memory.sleeps(process.order.rank):
                process.wake()

    def ask(self, rank: int, message: bytes) -> bytes:
        """Have a rank give out or take in a block.

        Raises:
            ExecutorLost: it is gone, or its KV is void.
        """
        process = self._processes[rank - 1]
        self.check()
        answer = process.ask(message, ASKED_S)
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
        whole = self.are_done and all(process.is_ready and process.gone is None for process in self._processes)
        return None if whole else self.lost

    def make_whole(self) -> bool:
        """Have processes in place of those that are lost. Returns whether all are loaded; waits a moment where not.

        Raises:
            ExecutorUnavailable: ranks were started too often of late.
        """
        with self._replacing:
            if self._replaced() and self.are_done:
                self.lost, lost = None, self.lost or ""
                route = ", ".join(f"rank {process.order.rank} on {process.where}" for process in self._processes)
                logger.warning("the tensor group is whole again: %s", route)
                self.notices.append(Notice("shard_failover", {"lost": lost, "route": route}))
        return self.lost is None

    def _replaced(self) -> bool:
        """See `make_whole`: as far as it is no matter who asks."""
        now = time.monotonic()
        for process in self._processes:
            if process.is_ready and now - self._lost_s > STALL_S and self._memory.done(process.order.rank) != self._memory.number:
                process.kill()  # stopped, too
            self._give_up_silent(process)
        gone = [i for i, process in enumerate(self._processes) if process.gone is not None]
        started = self._starts.ago(now)
        if gone and len(started) == MOST_STARTS:
            hint = "What its ranks printed may say why they end; or start without --tensor."
            raise ExecutorUnavailable(f"The tensor group is not whole: {self.lost}", hint, code="tensor_unavailable")
        if gone and started and started[-1] < AGAIN_S * 2 ** (len(started) - 1):
            time.sleep(LOOK_S)
            return False
        if gone:
            self._starts.add(now)
        try:
            for i in gone:
                lost = self._processes[i]
                if not lost.is_ready:
                    self._take_over(lost, lost.gone)
                lost.close(0)
                self._processes[i] = self._start(lost.order, SILENT_AGAIN_S)
            return all(self._is_ready(process, LOOK_S) for process in self._processes)
        except (ConfigError, NodeStopping) as error:
            self.lost = error.message
            logger.warning("the tensor group: %s", error)
            code = SERVER_STOPPING if isinstance(error, NodeStopping) else "tensor_unavailable"
            raise ExecutorUnavailable(error.message, error.hint, code=code) from error

    def close(self) -> None:
        """End them all."""
        self._closed = True
        if self._watcher.is_alive():
            self._watcher.join()
        self._memory.give_up()
        self._memory.give_end()
        self.wake()
        for process in self._processes:
            process.close(ENDING_S)

    def _start(self, order: RankOrder, patience_s: float) -> Rank:
        """Raises ConfigError where the system allows for no further process, NodeStopping where this node is."""
        if (away := self._away.get(order.rank)) is not None:
            self._memory.say_done(order.rank, self._memory.number)
            return away(order, patience_s)
        return RankProcess(order, self._memory, self._memory_fd, patience_s)

    def _take_over(self, process: Rank, why: str | None) -> bool:
        """Start it here from now on. Returns whether it ran on another machine."""
        was_away = self._away.pop(process.order.rank, None) is not None
        if was_away:
            logger.warning("the tensor group: rank %d %s; it runs on this machine from now on", process.order.rank, why)
        return was_away

    def _give_up_silent(self, process: Rank) -> None:
        """End one whose load says nothing any more."""
        if process.is_silent:
            process.kill()

    def _is_ready(self, process: Rank, wait_s: float) -> bool:
        """Return whether a rank is loaded; waits a moment. Ranks must compute the same bytes even where a request is not exact: each sum is made of parts of
        all ranks, so unlike ones would compute what no machine does. An empty id is of a rank that was not probed: it runs the same kernels on this machine.

        Raises:
            ConfigError: it can't be.
        """
        process.hear(wait_s)
        if (
            process.is_ready
            and self._numerics_id
            and process.numerics_id
            and not is_same_arithmetic(self._numerics_id, process.numerics_id)
        ):
            if self.lost is not None and self._take_over(process, "computes other bytes there"):  # its machine was changed meanwhile
                process.kill()
                return False
            raise ConfigError(
                f"Rank {process.order.rank} of the tensor group computes other bytes: {process.numerics_id}, and {self._numerics_id} here",
                "Have machines share layers that run the same version of Paceline.",
            )
        return process.is_ready

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.losses += 1
            self.lost, self._lost_s = why, time.monotonic()
            self.notices.append(Notice("shard_status", {"status": "degraded", "code": "rank_lost", "reason": why}))
            logger.warning("the tensor group: %s; it is started again, and answers go on", why)
            self._memory.give_up()

    def _watch(self) -> None:
        """See that the ranks live, and get on while others wait for them; and have others load in the place of the lost, whether or not a batch waits."""
        since, before = time.monotonic(), self._memory.arrived
        while not self._closed:
            time.sleep(LOOK_S)
            now, arrived = time.monotonic(), self._memory.arrived
            for process in self._processes:
                if process.is_ready and (gone := process.gone) is not None:
                    self._lose(f"rank {process.order.rank} {gone}")
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
