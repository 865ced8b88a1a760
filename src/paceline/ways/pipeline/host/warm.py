"""The shards of one host: which are in memory, which are on their way, and which have to go.

Law: what is claimed is never evicted, what is full is refused at once, and loads come one after the other, so that memory measured is memory
there. A load outlives its callers, and is kept like any other shard once it is done; but while no caller waits for it, it makes way for one that
a caller waits for, and leaves nothing behind. All of this happens on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from paceline.backends.holding import kv_group, part_bytes, working_bytes
from paceline.backends.memory import human
from paceline.backends.options import DeviceKind, LoadOptions
from paceline.backends.table import Kernels
from paceline.core.background import TaskSet, came_within, end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import BadPipelineRequest, PacelineError, PipelineError, ShardUnavailable
from paceline.core.model import BLOCK_TOKENS, ModelSpec
from paceline.core.weights import WeightSource
from paceline.fleet.plan import LEAST_ROWS
from paceline.machine.devices import LocalDevice, running
from paceline.machine.sizing import model_shape, weights_bytes
from paceline.ways.pipeline.executor.route import PipelineFault, StageRequest
from paceline.ways.pipeline.host.loading import (
    FailedLoads,
    FindsWeights,
    FoundWeights,
    LoadMeter,
    LoadsLayers,
    free_runners,
    in_pipelines_terms,
    kernels_for,
    load_in_thread,
)
from paceline.ways.pipeline.host.session import HostLimits
from paceline.ways.pipeline.host.shard import KvName, Leases, LoadedLayers, Shard, ShardClaim
from paceline.ways.pipeline.meter import ShardMeter

logger = logging.getLogger(__name__)

SHARDS_FREE_SHARE = 0.8
"""Of the memory that is free, how much shards may take where no bound is set. Raising it leaves less to everything else."""
SHARD_KV_SHARE = 0.5
"""Of what weights leave of that, how much one shard's KV may take beyond what was asked for by whom it is loaded."""
ENDING_S = 2.0
"""How long a stream that is about to become free is waited for. One in use is not waited for at all."""


class WarmShards:
    """Shards by what they hold.

    Args:
        load_bytes: what the process itself takes, of a device's memory, while it loads.
        low_bytes: none of these are taken of a device's memory; with less free, idle shards there go.
        on_change: told when a shard comes or goes.
        beside: returns the bytes that processors here hold for other members next to shards, within the same bound, and how many of these the system
            still counts as free.
    """

    def __init__(
        self,
        weights: FindsWeights,
        load: LoadsLayers,
        limits: HostLimits,
        *,
        devices: Sequence[LocalDevice],
        load_bytes: Callable[[Kernels], int] = lambda _: 0,
        low_bytes: int = 0,
        threads: int,
        kernel_cache: Path | None,
        meter: ShardMeter,
        clock: Clock,
        on_change: Callable[[], None],
        beside: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._weights, self._load, self._limits = weights, load, limits
        self._load_bytes, self._low_bytes = load_bytes, low_bytes
        self._devices, self._threads, self._kernel_cache = devices, threads, kernel_cache
        self._meter, self._clock, self._on_change = meter, clock, on_change
        self._shards: list[Shard] = []
        self._one_load: Final = asyncio.Semaphore(1)
        self._queue: list[LoadMeter] = []
        """Of the load that has its turn, and those behind it."""
        self._leaving = TaskSet()
        """Loads that were given up, and evictions, whose memory is not free yet."""
        self._failed: Final = FailedLoads(clock)
        self.beside = beside
        self._closed = False

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(self._shards)

    @property
    def used_bytes(self) -> int:
        return sum(shard.memory_bytes for shard in self._shards)

    def left_bytes(self, device: LocalDevice) -> int:
        """What further shards may take of a device's memory."""
        beside, coming = self.beside()
        own = sum(shard.coming_bytes for shard in self._shards if shard.weights in device.weights)
        free = device.free_bytes() - own - (coming if device.kernels.device is DeviceKind.CPU else 0)
        bound = self._limits.memory_bytes
        most = int(free * SHARDS_FREE_SHARE) if bound is None else bound - self.used_bytes - beside
        return min(most, free - self._low_bytes - self._load_bytes(device.kernels))

    async def claim(self, request: StageRequest, kv: KvName | None = None) -> tuple[Shard, ShardClaim]:
        """A stream on a shard that has the layers, which may still be loading. Release it.

        Raises:
            ShardUnavailable: all its streams are in use, or there is no room for another shard.
        """
        # Nothing waits between finding a shard and claiming it, so no other caller can take it, and no claim is lost with its caller.
        while not self._closed:
            shard = self._holding(request)
            if shard is None:
                if len(self._shards) < self._limits.max_shards:
                    return (shard := self._added(request)), self._claimed(shard, kv)
                if not (self._give_up_unclaimed() or await self._evict_one()):
                    raise ShardUnavailable(f"{self._limits.max_shards} shards are loaded here, and all are in use")
            elif not shard.suits(request):
                if shard.claims:
                    raise ShardUnavailable(f"{shard.shard_id} is loaded with less room than is asked for, and in use")
                await self._evict(shard)
            elif not shard.is_full:
                return shard, self._claimed(shard, kv)
            elif not (shard.is_ending and await _changed(shard)):
                raise ShardUnavailable(f"All {shard.max_streams} streams of {shard.shard_id} are in use")
        raise ShardUnavailable("This machine is stopping")

    async def await_ending(self, shard: Shard) -> None:
        """Let sessions that are about to end leave their KV first: a caller that opens a new one after a loss wants what its old one had."""
        while shard.is_ending and await _changed(shard):
            pass

    def prepare(self, request: StageRequest) -> Shard:
        """A shard that a caller may come to claim: loaded, if it is not there, as far as memory is free. Asked again, it is kept.

        Raises:
            ShardUnavailable: memory, or the machine, is wanted for others, or the layers could not be loaded a moment ago.
        """
        shard = self._holding(request)
        if shard is not None and not shard.suits(request):
            raise ShardUnavailable(f"{shard.shard_id} is loaded with less room than is asked for")
        if shard is None:
            if self._closed:
                raise ShardUnavailable("This machine is stopping")
            if any(other.is_loading for other in self._shards):
                raise ShardUnavailable("Other layers are being loaded here")
            if len(self._shards) >= self._limits.max_shards:
                raise ShardUnavailable(f"{len(self._shards)} shards are loaded here already")
            self._failed.check(request)
            shard = self._added(request)
            self._on_change()
        shard.used_at = self._clock.monotonic()
        return shard

    def release(self, shard: Shard, claim: ShardClaim) -> None:
        shard.used_at = now = self._clock.monotonic()
        shard.end(claim, None if self._closed or shard.gone else now + self._limits.kept_s)
        if shard.gone and shard.is_idle:
            self._leaving.start(self._evict(shard))
        shard.change.set()
        self._on_change()

    def discard(self, shard: Shard) -> None:
        """Its layers run no more. Whoever asks for them has them loaded anew; its sessions end, and then its memory is free."""
        self._forget(shard)
        for claim in shard.claims:
            if claim.session is not None:
                claim.session.fail(PipelineFault(None, ShardUnavailable.code, f"{shard.shard_id} is loaded anew"))
                claim.session.stop()

    async def evict_idle(self) -> None:
        """Evict shards that have been idle for long; where the machine is short of memory, all idle ones."""
        for device in self._devices:
            while device.free_bytes() < self._low_bytes and await self._evict_one(device):
                pass
        now = self._clock.monotonic()
        for shard in self.shards:
            shard.drop_kept(now)
            # Looked at in its turn: while others go, it may be claimed.
            if shard.is_idle and now - shard.used_at >= self._limits.idle_s:
                await self._evict(shard)

    async def close(self) -> None:
        """Give up what loads and free what is loaded. Claims must be released before, or their shards stay."""
        self._closed = True
        await end_tasks(*(shard.loading for shard in self._shards))
        while self._leaving:
            await asyncio.wait(self._leaving)
        for shard in [shard for shard in self._shards if not shard.claims]:
            await self._evict(shard, count=False)

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _holding(self, request: StageRequest) -> Shard | None:
        """The shard that has the layers: one with a free stream first, then the smallest."""
        found = [shard for shard in self._shards if shard.holds(request.model, request.layers)]
        return min(found, key=lambda shard: (shard.is_full or not shard.suits(request), len(shard.layers)), default=None)

    def _claimed(self, shard: Shard, kv: KvName | None) -> ShardClaim:
        claim = ShardClaim(kv)
        shard.claims.add(claim)
        if shard.is_loading:
            self._give_up_unclaimed()
        self._on_change()
        return claim

    def _added(self, request: StageRequest) -> Shard:
        shard = Shard(request, self._limits.max_streams, self._clock.monotonic())
        self._shards.append(shard)
        shard.loading = asyncio.create_task(self._bring(shard, request), name=f"load-{shard.shard_id}")
        shard.loading.add_done_callback(_noted)
        return shard

    async def _bring(self, shard: Shard, request: StageRequest) -> None:
        meter = shard.meter
        try:
            found = await self._weights.find(request, meter)
            try:
                if not self._leaving:  # else it is known in its turn what is free
                    self._check_room(shard, found, request)
            except PacelineError:
                found.stop()  # before its layers come
                raise
            if self._queue:
                meter.wait_for(self._queue[-1])
            self._queue.append(meter)
            try:
                async with self._one_load:
                    shard.loaded = await self._into_memory(shard, found, request)
            except BaseException:
                found.stop()
                raise
            finally:
                self._queue.remove(meter)
            shard.leases = Leases(shard.loaded.runner.n_blocks)
            shard.used_at = self._clock.monotonic()
            self._failed.forget(request)
            self._meter.loads += 1
            logger.info(
                "layers %s of %s are loaded for others, with KV for %d tokens",
                *(shard.layers.words, shard.loaded.name, shard.leases.n_blocks * shard.loaded.runner.block_size),
            )
        except PacelineError as error:
            raise self._failed.note(request, in_pipelines_terms(error)) from error
        except Exception as error:
            logger.exception("%s can't be loaded", shard.shard_id)
            told = PipelineError(f"{shard.shard_id} can't be loaded: {type(error).__name__}")
            raise self._failed.note(request, told) from error
        finally:
            meter.end()
            if shard.loaded is None:
                self._forget(shard)
            self._on_change()

    def _check_room(self, shard: Shard, found: FoundWeights, request: StageRequest) -> None:
        """Refuse what would not fit if all made way that may, before it waits for other loads while its layers are fetched.

        Raises:
            ShardUnavailable: it does not fit.
            BadPipelineRequest: the model has no such layers.
        """
        spec = found.source.spec
        fixed = self._fixed_bytes(found, request)
        device = running(self._devices, request.weights)
        idle = sum(other.memory_bytes for other in self._shards if other.is_idle and other.weights in device.weights) if shard.claims else 0
        group = kv_group(kernels_for(spec, request.weights))
        blocks_for(
            request, self._limits.max_streams, self.left_bytes(device) + idle, fixed, block_bytes(spec, request, BLOCK_TOKENS), group
        )

    async def _into_memory(self, shard: Shard, found: FoundWeights, request: StageRequest) -> LoadedLayers:
        spec = found.source.spec
        fixed, a_block = self._fixed_bytes(found, request), block_bytes(spec, request, BLOCK_TOKENS)
        kernels = kernels_for(spec, request.weights)
        group = kv_group(kernels)
        wanted = fixed + -(-request.n_blocks // group) * group * a_block
        device = running(self._devices, request.weights)
        while self._leaving:
            await asyncio.wait(self._leaving)
        # Nothing makes way for a load that no caller waits for.
        while shard.claims and wanted > self.left_bytes(device) and await self._evict_one(device):
            pass
        n_blocks = blocks_for(request, self._limits.max_streams, self.left_bytes(device), fixed, a_block, group)
        options = LoadOptions(
            request.layers,
            request.weights,
            n_blocks,
            BLOCK_TOKENS,
            self._threads,
            max_rows=rows_for(request),
            edges=False,
            kernel_cache=self._kernel_cache,
        )
        shard.promised_bytes = held = fixed + -(-n_blocks // group) * group * a_block
        runner = await load_in_thread(self._load, found, options, shard.meter.packed.show)
        size = sum(found.source.nbytes(name) for name in found.source.names())
        shape = model_shape(spec, request.weights, found.source.type_of, kernels)
        return LoadedLayers(found.name, spec, shape, runner, options.max_rows, held, size)

    def _fixed_bytes(self, found: FoundWeights, request: StageRequest) -> int:
        kernels = kernels_for(found.source.spec, request.weights)
        return fixed_bytes(found.source, request, kernels, self._threads, self._limits.max_streams)

    async def _evict_one(self, device: LocalDevice | None = None) -> bool:
        """Free the shard, of a device or of any, that has been idle for longest. Returns False where all are in use."""
        idle = [shard for shard in self._shards if shard.is_idle and (device is None or shard.weights in device.weights)]
        oldest = min(idle, key=lambda shard: shard.used_at, default=None)
        if oldest is not None:
            await self._evict(oldest)
        return oldest is not None

    def _give_up_unclaimed(self) -> bool:
        """End loads that no caller waits for. Returns whether there were any."""
        unclaimed = [shard for shard in self._shards if shard.is_loading and not shard.claims]
        for shard in unclaimed:
            assert shard.loading is not None
            self._forget(shard)
            shard.loading.cancel()
            self._leaving.hold(shard.loading)
        return bool(unclaimed)

    async def _evict(self, shard: Shard, *, count: bool = True) -> None:
        """Free a shard without claims."""
        self._forget(shard)
        loaded, shard.loaded = shard.loaded, None
        if loaded is None:
            return
        self._meter.evictions += count
        logger.info("layers %s of %s are evicted: others need them no more, or the memory more", shard.layers.words, loaded.name)
        runners = [loaded.runner]
        del loaded
        await asyncio.shield(self._leaving.start(asyncio.to_thread(free_runners, runners)))
        self._on_change()

    def _forget(self, shard: Shard) -> None:
        shard.gone = True
        if shard in self._shards:
            self._shards.remove(shard)


async def _changed(shard: Shard) -> bool:
    """Wait for a stream that is about to become free. False where none did."""
    shard.change.clear()
    return await came_within(shard.change, ENDING_S)


def _noted(task: asyncio.Task[None]) -> None:
    """Callers that wait for a load learn why it failed; without one, asyncio need not warn of it."""
    if not task.cancelled():
        task.exception()


def fixed_bytes(source: WeightSource, request: StageRequest, kernels: Kernels, threads: int, streams: int) -> int:
    """Weights, and working memory for rows.

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
        fixed: what goes to other things.
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
