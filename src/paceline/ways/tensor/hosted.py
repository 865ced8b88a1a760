"""One rank of another machine's tensor group, on this one: the memory that it has with nobody, its process, and the streams to its group.

Importing this imports kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.backends.memory import own_bytes
from paceline.core.errors import ConfigError, PacelineError, ShardUnavailable, StreamClosed, WeightsError
from paceline.core.ids import NodeId
from paceline.machine.devices import usable_cores
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.ways.tensor.memory import GroupMemory, make_memory
from paceline.ways.tensor.process import Lend, RankProcess
from paceline.ways.tensor.pump import RankPump
from paceline.ways.tensor.rank import RankOrder


class HostedRank:
    """Made empty; `close` it in any case. What it does blocks.

    Args:
        lend: gives what of the model is not on this machine.
    """

    def __init__(self, order: RankOrder, lend: Lend | None = None) -> None:
        self._order, self._lend = order, lend
        self._memory_fd: int | None = None
        self._memory: GroupMemory | None = None
        self._process: RankProcess | None = None
        self._pump: RankPump | None = None

    def start(self, patience_s: float) -> None:
        """Begin to load.

        Raises:
            ShardUnavailable: this machine starts no process.
        """
        self._memory_fd = make_memory(self._order.sizes)
        self._memory = GroupMemory(self._memory_fd, self._order.sizes)
        self._memory.say_crowded(usable_cores() <= self._order.threads)
        try:
            self._process = RankProcess(self._order, self._memory, self._memory_fd, patience_s, self._lend)
        except ConfigError as error:
            raise ShardUnavailable(error.message) from error

    @property
    def process(self) -> RankProcess:
        assert self._process is not None, "it was started"
        return self._process

    def coming_bytes(self, needed: int) -> int:
        """Of those that it needs, what the system still calls free."""
        if self._process is None:
            return needed
        taken = own_bytes(self._process.pid)
        if taken is None:  # weights at least are there once it is loaded
            return 0 if self._process.is_ready else needed
        return max(0, needed - taken)

    @property
    def gone(self) -> str | None:
        """Why its process runs no more."""
        return self.process.gone

    def is_loaded(self, wait_s: float) -> bool:
        """Whether it is; waits for so long where it says nothing.

        Raises:
            ShardUnavailable: it can't be.
        """
        process = self.process
        try:
            process.hear(wait_s)
        except (ConfigError, WeightsError) as error:
            raise ShardUnavailable(error.message, error.hint) from error
        if process.is_silent:
            process.kill()
        if not process.is_ready and (gone := process.gone) is not None:
            raise ShardUnavailable(f"The process of a tensor rank {gone}", "What it printed says why.")
        return process.is_ready

    def connect(
        self,
        dial: Callable[[], TensorSender],
        accept: Callable[[], TensorReceiver],
        group: NodeId,
        on_end: Callable[[], object],
    ) -> None:
        """Open both streams, and take commands from then on.

        Args:
            group: the node whose rank this is: no other may bring the ticket.
            on_end: called when no more come.

        Raises:
            FleetError: they can't be opened.
        """
        assert self._memory is not None, "it was started"
        sender = dial()
        try:
            receiver = accept()
            if receiver.peer != group:
                receiver.close()
                raise StreamClosed(f"{receiver.peer} brought the ticket of {group}")
        except PacelineError:
            sender.close()
            raise
        order = self._order
        self._pump = RankPump(self.process, self._memory, order.layers, order.n_blocks, sender, receiver, lambda _: on_end())
        self._pump.start()

    def close(self) -> None:
        """End its process and its streams. Idempotent."""
        if self._pump is not None:
            self._pump.close()
        if self._process is not None:
            self._process.kill()
            self._process.close(0)
        self._memory = None
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None
