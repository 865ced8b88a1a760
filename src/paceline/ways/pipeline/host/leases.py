"""The KV blocks of one runner, leased to its sessions: each has a run of its own, and gives all of it back at once.

How much of this machine its shards may take.

Whose turn it is to use a runner: first come, first served, so that no session starves another.

A plain lock may go again and again to the thread that just gave it back, as it is the one that runs.

How much memory a shard takes, and how many KV blocks it gets: arithmetic on numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.backends.choice import part_bytes
from paceline.backends.memory import human
from paceline.backends.table import Kernels
from paceline.backends.working import working_bytes
from paceline.core.errors import BadPipelineRequest, PipelineStalled, ShardUnavailable
from paceline.core.model import ModelSpec
from paceline.core.weights import WeightSource
from paceline.fleet.plan import LEAST_ROWS
from paceline.machine.sizing import weights_bytes
from paceline.ways.pipeline.executor.sessions import StageRequest

SHARDS_FREE_SHARE = 0.8
"""Of the memory that is free, how much shards may take where no bound is set. Raising it leaves less to everything else."""
SHARD_KV_SHARE = 0.5
"""Of what weights leave of that, how much one shard's KV may take beyond what was asked for by whom it is loaded."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bounds of one host."""

    max_streams: int = 4
    """Sessions of one shard. Strict: the next one is refused at once."""
    max_shards: int = 16
    """Ranges of layers in memory at once."""
    memory_bytes: int | None = None
    """For all shards, weights and KV; None: a share of what is free."""
    idle_s: float = 600.0
    """A shard that no session has used for so long is evicted."""
    kept_s: float = 120.0
    """How long KV outlives its session, where the caller may go on with it, unless another needs the room. Raising it: more of an answer outlives a route
    that takes long to mend."""
    stall_s: float = 5.0
    """How long a stage waits for a receiver that takes nothing, or a batch that began to come."""
    turn_s: float = 60.0
    """How long a session waits for others on the same layers."""
    connect_s: float = 5.0
    """For reaching the next stage."""


KEPT_BACK = 16
"""Blocks, of 16 tokens, for a session that comes later, where the first would take all: a short answer, or the prompt rows of a spot check. Raising it shortens the
context of a session that is alone."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks [base, base + n_blocks) of a runner's pool."""

    base: int
    n_blocks: int


class Leases:
    """Which lease has which blocks of a pool.

    Args:
        n_blocks: of the pool.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._held: list[Lease] = []

    @property
    def free(self) -> int:
        return self.n_blocks - sum(lease.n_blocks for lease in self._held)

    def take(self, wanted: int, least: int, kept_back: int) -> Lease | None:
        """Lease adjacent blocks: as many as are wanted, or what is free; sessions that come later get the rest.

        Args:
            wanted: no more.
            least: no fewer.
            kept_back: for sessions that may still come, if they leave this one half.

        Returns:
            None where there are not as many as `least` together.
        """
        base, room = self._widest_gap()
        if room < least:
            return None
        lease = Lease(base, min(room, wanted, max(least, self.free - kept_back, self.free // 2)))
        self._held.append(lease)
        self._held.sort(key=lambda held: held.base)
        return lease

    def give_back(self, lease: Lease) -> None:
        """No session uses these any more."""
        self._held.remove(lease)

    def _widest_gap(self) -> tuple[int, int]:
        """First block and size of the widest run that is free."""
        gaps: list[tuple[int, int]] = []
        at = 0
        for lease in self._held:
            gaps.append((at, lease.base - at))
            at = lease.base + lease.n_blocks
        gaps.append((at, self.n_blocks - at))
        return max(gaps, key=lambda gap: gap[1])


class Turns:
    """A lock that hands itself to the thread that waited longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextmanager
    def take(self, bound_s: float) -> Generator[None]:
        """Have the turn for as long as the block runs.

        Raises:
            PipelineStalled: it did not come within the bound.
        """
        self._wait(bound_s)
        try:
            yield
        finally:
            self._pass_on()

    @contextmanager
    def take_free(self) -> Generator[bool]:
        """Have the turn for as long as the block runs, if no thread has it now. Says whether."""
        with self._lock:
            mine = not self._taken
            self._taken = True
        try:
            yield mine
        finally:
            if mine:
                self._pass_on()

    def _wait(self, bound_s: float) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        if mine.acquire(timeout=bound_s):
            return
        with self._lock:
            if mine in self._queue:
                self._queue.remove(mine)
                raise PipelineStalled(f"These layers were busy for {bound_s:g} s")
        # It came just now.

    def _pass_on(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False


def fixed_bytes(source: WeightSource, request: StageRequest, kernels: Kernels, threads: int, streams: int) -> int:
    """Weights, and working memory for rows.

    Args:
        source: of the model.
        request: by whom it is loaded.
        kernels: that run it here.
        threads: that share a step.
        streams: that are to share it.

    Raises:
        BadPipelineRequest: the model has no such layers.
    """
    spec = source.spec
    if request.layers.stop > spec.n_layers:
        raise BadPipelineRequest(f"{request.model_id} has {spec.n_layers} layers, and up to {request.layers.stop} were asked for")
    held = weights_bytes(spec, request.weights, source.type_of, kernels)
    # `blocks_for` gives no more blocks than these.
    working = working_bytes(kernels, spec, max_rows=rows_for(request), threads=threads, n_blocks=request.n_blocks * streams)
    return part_bytes(held, request.layers, edges=False) + working


def rows_for(request: StageRequest) -> int:
    """What a shard loaded for this request takes in a batch."""
    return max(LEAST_ROWS, request.max_rows)


def block_bytes(spec: ModelSpec, request: StageRequest, block_size: int) -> int:
    return block_size * spec.kv_bytes_per_token(request.layers)


def blocks_for(request: StageRequest, streams: int, left_bytes: int, fixed: int, a_block: int, group: int) -> int:
    """The size of the pool: as many as all streams could want like this one, if there is room.

    Args:
        request: who wants it.
        streams: that are to share it.
        left_bytes: what may be taken.
        fixed: what goes to other things.
        a_block: bytes of one.
        group: blocks whose memory comes together.

    Raises:
        ShardUnavailable: not even the least would fit.
    """
    affordable = (left_bytes - fixed) // a_block // group * group
    if affordable < request.least_blocks:
        least = -(-request.least_blocks // group) * group
        raise ShardUnavailable(
            f"{len(request.layers)} layers of {request.model_id} need {human(fixed + least * a_block)}, "
            f"and {human(max(0, left_bytes))} may be taken here"
        )
    shared = int(affordable * SHARD_KV_SHARE)
    return min(request.n_blocks * streams, max(min(request.n_blocks, affordable), shared))
