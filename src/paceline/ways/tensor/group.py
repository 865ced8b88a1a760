"""A tensor group: a `LayerRunner` made of ranks, this process the first of them, and the executor that drives it.

All ranks run the same batches, each on its share of heads, inner activations and outputs; a group's KV is that of its ranks, each with its own heads.
Shapes: L layers, H heads, B bytes of a head's block; others as `engine.local`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from paceline.backends import cpu
from paceline.backends.cpu.exchange import Exchange
from paceline.backends.cpu.padding import padded
from paceline.backends.cpu.runner import Bf16, CpuRunner
from paceline.backends.cpu.shares import deal
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.errors import ExecutorLost
from paceline.core.generation import Notice
from paceline.core.ids import BlockId
from paceline.core.model import BLOCK_TOKENS, LayerRange
from paceline.core.weights import WeightSource
from paceline.engine.executor import HeldSequence, StepBatch, StepOutput
from paceline.engine.local import Int32, LocalExecutor, RowPlan
from paceline.machine.devices import usable_cores
from paceline.machine.settings import NodeSettings
from paceline.ways.tensor import rank as protocol
from paceline.ways.tensor.memory import GroupMemory, make_memory
from paceline.ways.tensor.process import Rank
from paceline.ways.tensor.rank import RankOrder, block_request
from paceline.ways.tensor.ranks import RankProcesses
from paceline.ways.tensor.sizes import GroupSizes


class TensorGroup:
    """A `LayerRunner` made of ranks that share each layer. Loads all of them at once.

    Args:
        source: of weights.
        settings: of the model, for all ranks: its path, format and kernels are decided; and the ranks' speeds.
        options: of this process's share, with the threads of all ranks that run here.
        logits_rows: of a batch, at most; 0: a stage of a pipeline has no head.
        progress: called with bytes read and bytes to read, of this process's share.
        away: has ranks run on other machines.

    Raises:
        UserError: a rank can't be loaded.
    """

    block_size, one_path, holds_identity = CpuRunner.block_size, CpuRunner.one_path, CpuRunner.holds_identity
    kv_layout = CpuRunner.kv_layout

    def __init__(
        self,
        source: WeightSource,
        settings: NodeSettings,
        options: LoadOptions,
        logits_rows: int,
        progress: LoadProgress | None = None,
        away: Mapping[int, Callable[[GroupMemory, RankOrder, float], Rank]] = MappingProxyType({}),
    ) -> None:
        assert settings.device is not None, "decided for all ranks"
        spec, speeds, n_blocks = padded(source.spec), settings.tensor, options.n_blocks
        here = sum(speed for rank, speed in enumerate(speeds) if rank not in away)
        threads = [max(1, round(options.threads * min(1.0, speed / here))) for speed in speeds]
        max_blocks = -(-min(spec.max_context, n_blocks * BLOCK_TOKENS) // BLOCK_TOKENS)
        self._sizes = GroupSizes(spec, deal(spec, speeds), options.max_rows, max_blocks, logits_rows)
        self._memory_fd = make_memory(self._sizes)
        self._memory = GroupMemory(self._memory_fd, self._sizes)
        self._memory.say_crowded(bool(away) and usable_cores() <= sum(each for rank, each in enumerate(threads) if rank not in away))
        orders = [
            RankOrder(rank, settings, self._sizes, options.layers, n_blocks, threads[rank], edges=options.edges)
            for rank in range(1, len(speeds))
        ]
        exchange = Exchange(spec, self._sizes.shares, 0, self._memory.exchange, options.max_rows)
        with ExitStack() as undo:
            undo.callback(os.close, self._memory_fd)
            starts = {rank: partial(start, self._memory) for rank, start in away.items()}
            self._ranks = RankProcesses(self._memory, self._memory_fd, orders, starts)
            undo.callback(self._ranks.close)
            own = replace(options, threads=threads[0])
            self._runner = cpu.load(source, own, progress, lowering=settings.device.lowering, exchange=exchange)
            undo.callback(self._runner.close)
            self._ranks.check_numerics(self._runner.numerics_id)
            self._ranks.await_loads()
            undo.pop_all()
        self._heard, self._closed = 0, False

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the ranks, this one's first."""
        return os.getpid(), *self._ranks.ids

    @property
    def lacks(self) -> str | None:
        """See `RankProcesses.lacks`."""
        return self._ranks.lacks

    @property
    def away(self) -> tuple[int, ...]:
        """Ranks that other machines run: fewer where one was lost there."""
        return self._ranks.away

    def notices(self) -> Sequence[Notice]:
        """What clients have not been told of ranks that were lost, and of where they run since."""
        return [self._ranks.notices.popleft() for _ in range(len(self._ranks.notices))]

    @property
    def losses(self) -> int:
        """Of ranks, so far. With each, all KV is void, whenever ranks are whole again."""
        return self._ranks.losses

    def begin_anew(self, losses: int) -> None:
        """Whoever uses the KV has heard of so many losses, and what it names from now on was written since."""
        self._heard = losses

    def _check_kv(self) -> None:
        """Raises ExecutorLost where KV that is asked for may have been written before a loss."""
        if self._ranks.losses != self._heard:
            raise ExecutorLost("the tensor group lost a rank, and its KV", ())

    @property
    def layers(self) -> LayerRange:
        return self._runner.layers

    @property
    def n_blocks(self) -> int:
        return self._runner.n_blocks

    @property
    def numerics_id(self) -> str:
        return self._runner.numerics_id

    def embed(self, token_ids_T: Int32) -> Bf16:
        return self._runner.embed(token_ids_T)

    def run_layers(self, x_TD: Bf16, plan: RowPlan, part: LayerRange | None = None) -> Bf16:
        """As `LayerRunner` has it.

        Raises:
            ExecutorLost: a rank is lost; what was run, and all KV, is void.
        """
        part = self.layers if part is None else part
        self._runner.check_batch(len(x_TD), part)  # before any rank begins: one that refuses it would end
        if len(plan.tables_SB) == 0 or not part:
            return x_TD
        self._memory.give_layers(x_TD, plan, part, self._runner.exchange_number)
        self._ranks.wake()
        out_TD = self._runner.run_layers(x_TD, plan, part)
        if plan.watch is not None and plan.watch.gives_up:
            self._ranks.call_off()
            self._go_on()
        self._ranks.check()
        return out_TD

    def logits(self, x_TD: Bf16, rows_R: Int32) -> npt.NDArray[np.float32]:
        """As `LayerRunner` has it. Raises as `run_layers` does."""
        if len(rows_R) == 0:
            return self._runner.logits(x_TD, rows_R)
        x_RD = x_TD[rows_R]
        self._memory.give_head(x_RD, self._runner.exchange_number)
        self._ranks.wake()
        logits_RV = self._runner.logits(x_RD, np.arange(len(rows_R), dtype=np.int32))
        self._ranks.check()
        return logits_RV

    def make_whole(self) -> bool:
        """Have all ranks again, after a loss. Returns whether they are there; waits a moment where not. Raises as `RankProcesses.make_whole` does."""
        if self._ranks.lost is not None and self._ranks.make_whole():
            self._go_on()
        return self._ranks.lost is None

    def _go_on(self) -> None:
        """Let the ranks meet again, after a batch that ended before its end: at exchanges that none has reached."""
        if self._ranks.lost is None:
            self._runner.exchange_number = max(self._memory.arrived)
            self._memory.withdraw()

    def to_wire(self, x_TD: Bf16) -> Bf16:
        return x_TD

    def from_wire(self, x_TD: Bf16) -> Bf16:
        return x_TD

    @property
    def block_bytes(self) -> int:
        return self._sizes.spec.kv_bytes_per_token(self.layers) * self.block_size

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        self._check_kv()
        whole_LHB, layers = self._by_head(np.frombuffer(into, np.uint8), part), part or self.layers
        for rank, heads in self._with_heads():
            share_LHB = np.empty_like(whole_LHB[:, heads])
            if rank == 0:
                self._runner.export_block(block, share_LHB.data.cast("B"), layers)
            else:
                data = self._ranks.ask(rank, block_request(protocol.EXPORT, block, layers))
                if len(data) != share_LHB.nbytes:
                    raise ExecutorLost(f"rank {rank} of the tensor group gave {len(data)} bytes of a block, not {share_LHB.nbytes}", ())
                share_LHB = np.frombuffer(data, np.uint8).reshape(share_LHB.shape)
            whole_LHB[:, heads] = share_LHB
        self._check_kv()

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        self._check_kv()
        whole_LHB, layers = self._by_head(np.frombuffer(data, np.uint8), part), part or self.layers
        for rank, heads in self._with_heads():
            share_LHB = np.ascontiguousarray(whole_LHB[:, heads])
            if rank == 0:
                self._runner.import_block(block, share_LHB.data.cast("B"), layers)
            else:
                self._ranks.ask(rank, block_request(protocol.IMPORT, block, layers) + share_LHB.tobytes())

    def _by_head(self, data: npt.NDArray[np.uint8], part: LayerRange | None) -> npt.NDArray[np.uint8]:
        return data.reshape(len(part or self.layers), self._sizes.spec.n_kv_heads, -1)

    def _with_heads(self) -> Iterator[tuple[int, slice]]:
        """Ranks that have any, and which."""
        for rank, share in enumerate(self._sizes.shares):
            if share.kv_heads:
                yield rank, slice(share.kv_heads.start, share.kv_heads.stop)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        if not self._closed:
            self._closed = True
            self._ranks.close()
            self._runner.close()
            os.close(self._memory_fd)


class GroupExecutor(LocalExecutor[Bf16]):
    """Runs whole batches on a tensor group; after a loss, as soon as all ranks are there again."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        self._group = group
        self._told = 0
        """Losses that the engine was told of: each voids what it knows of KV, though ranks may be whole again before it asks for a batch."""

    @property
    def lacks(self) -> str | None:
        return self._group.lacks

    @property
    def away(self) -> tuple[int, ...]:
        return self._group.away

    def ready(self) -> bool:
        return self._group.make_whole()

    def notices(self) -> Sequence[Notice]:
        return self._group.notices()

    def restore(self, held: Sequence[HeldSequence]) -> tuple[()]:
        self._group.begin_anew(self._told)
        return super().restore(held)

    def submit(self, batch: StepBatch) -> None:
        if self._told != self._group.losses:
            self._tell()
            raise ExecutorLost("the tensor group lost a rank since its last batch", ())
        super().submit(batch)

    def collect(self, deadline: float) -> StepOutput | None:
        try:
            return super().collect(deadline)
        except ExecutorLost:
            self._tell()
            raise

    def _tell(self) -> None:
        self._told = self._group.losses
        self.reset()  # of what was lost
