"""A range of layers on an NVIDIA GPU: bf16, paged flash attention, CUDA graphs for decode.

Matrix libraries choose kernels by the number of rows there, so identity is not promised but measured at load: `holds_identity` says
what was seen. Blocks are 256 tokens, whatever was asked for: as many as hold the tokens asked for, and one of the runner's own.

Shapes: T rows, D hidden, R rows with logits, V vocabulary.

Decode steps as CUDA graphs: one launch for a whole step, at a few padded batch sizes.

A graph replays fixed addresses, so it has its own inputs, and a batch is copied into them. Padding rows are sequences of one token whose
table names a block that no sequence owns. Graphs are recorded when a size is first met; they share one memory pool.

Shapes: T rows = S sequences (one row each), D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.backends.memory import check_kv
from paceline.backends.numerics import ROWS, Numerics, SeededWeights, measure, small
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.torch.loading import cuts_agree, load_model, seeded_rows, tensor_bytes
from paceline.backends.torch.paged import PAGE, CudaPool, CudaStep, Tables, host_tables, to_device
from paceline.backends.torch.runner import Layer, PooledRunner, TorchModel, edges_of, from_bits, run_watched
from paceline.backends.torch.step import Rope
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import LayerRange, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.executor import Path
from paceline.engine.local import Int32, LayerRunner, RowPlan, StepWatch, WireBits

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows a graph is recorded for. More sizes waste fewer padding rows and take more memory and time to record."""

Forward = Callable[[Tensor, Tables], Tensor]
"""Runs the layers: bf16 [T, D] to bf16 [T, D]."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    x_TD: Tensor
    tables: Tables
    out_TD: Tensor


class DecodeGraphs:
    """Graphs by size.

    Args:
        forward: what to record.
        hidden: D.
        context: the longest sequence; tables have room for it.
        spare: the block that padding rows write to.
        device: where.
    """

    def __init__(self, forward: Forward, *, hidden: int, context: int, spare: int, device: torch.device) -> None:
        self._forward, self._hidden, self._context, self._spare, self._device = forward, hidden, context, spare, device
        self._recorded: dict[int, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def takes(self, plan: RowPlan) -> bool:
        """Whether a batch is one row for each of at most `SIZES[-1]` sequences."""
        return bool((plan.n_rows_S == 1).all()) and len(plan.n_rows_S) <= SIZES[-1]

    def run(self, x_TD: Tensor, plan: RowPlan) -> Tensor:
        """Run a batch that `takes` takes. The result is valid until the next one."""
        rows = len(x_TD)
        size = next(size for size in SIZES if size >= rows)
        padded = self._padded(plan, size)
        recorded = self._recorded.get(size) or self._record(size, padded)
        recorded.x_TD[:rows].copy_(x_TD)
        self._fill(recorded.tables, padded)
        recorded.graph.replay()
        return recorded.out_TD[:rows]

    def _padded(self, plan: RowPlan, size: int) -> RowPlan:
        sequences = len(plan.n_rows_S)
        tables = np.full((size, -(-self._context // PAGE)), self._spare, np.int32)
        width = min(tables.shape[1], plan.tables_SB.shape[1])
        tables[:sequences, :width] = np.maximum(plan.tables_SB[:, :width], 0)
        first = np.zeros(size, np.int32)
        first[:sequences] = plan.first_position_S
        ones = np.ones(size, np.int32)
        return RowPlan(np.arange(size, dtype=np.int32), ones, first, np.full(size, Path.PROMPT, np.int32), tables)

    def _record(self, size: int, plan: RowPlan) -> _Recorded:
        x_TD = torch.zeros(size, self._hidden, dtype=torch.bfloat16, device=self._device)
        arrays = {name: torch.from_numpy(array).to(self._device) for name, array in host_tables(plan).items()}
        arrays["tables_SB"] = torch.from_numpy(plan.tables_SB).to(self._device)
        tables = Tables(**arrays, max_rows=1, max_keys=self._context)
        # A first run outside the graph lets libraries choose kernels and allocate workspaces.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(x_TD, tables)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out_TD = self._forward(x_TD, tables)
        self._recorded[size] = _Recorded(graph, x_TD, tables, out_TD)
        return self._recorded[size]

    def _fill(self, tables: Tables, plan: RowPlan) -> None:
        arrays = host_tables(plan)
        arrays["tables_SB"] = plan.tables_SB
        for name, array in arrays.items():
            getattr(tables, name).copy_(torch.from_numpy(array))


MAX_HEAD_DIM = 256
"""FlashAttention's limit."""

_LONG = 1000
"""Rows of the longest prompt piece whose bytes are compared."""


class CudaRunner(PooledRunner[CudaPool]):
    """A `LayerRunner` whose activations are bf16 tensors on the device.

    Args:
        model: the weights.
        n_layers: of them.
        n_blocks: KV blocks of 256 tokens.
        numerics: what these kernels were measured to compute.
        device: where.
    """

    block_size = PAGE
    one_path = True
    kv_layout = "torch cuda"

    def __init__(self, model: TorchModel, n_layers: int, n_blocks: int, numerics: Numerics, device: torch.device) -> None:
        spec = model.spec
        self._model, self._device, self.n_blocks = model, device, n_blocks
        self.layers = model.held
        self.numerics_id, self.holds_identity = numerics.id, numerics.holds_identity
        context = min(spec.max_context, n_blocks * PAGE)
        self._rope = Rope(spec.rope, spec.head_dim, context, device)
        # The last block belongs to padding rows of graphs.
        self._pool = CudaPool(n_layers, n_blocks + 1, spec.n_kv_heads, spec.head_dim, device)
        # What a router picks is not known when a graph is recorded: mixtures of experts run without.
        graphed = spec.moe is None
        self._graphs = DecodeGraphs(self._forward, hidden=spec.hidden, context=context, spare=n_blocks, device=device) if graphed else None

    @torch.inference_mode()
    def embed(self, token_ids_T: Int32) -> Tensor:
        return edges_of(self._model).embedding.rows(self._index(token_ids_T))

    @torch.inference_mode()
    def run_layers(self, x_TD: Tensor, plan: RowPlan, part: LayerRange | None = None) -> Tensor:
        """Run the layers, writing K and V of the rows into their blocks. Returns the residual, bf16 [T, D]. Graphs hold all layers."""
        if not len(x_TD):
            return x_TD
        if self._graphs is not None and part in {None, self.layers} and self._graphs.takes(plan):
            return self._graphs.run(x_TD, plan).clone()
        return self._run(self._model.part(part), x_TD, to_device(plan, self._device), plan.watch)

    @torch.inference_mode()
    def logits(self, x_TD: Tensor, rows_R: Int32) -> npt.NDArray[np.float32]:
        """Final norm and head of the rows named, float32 [R, V] on the host."""
        edges = edges_of(self._model)
        if not len(rows_R):
            return np.zeros((0, self._model.spec.vocab), np.float32)
        return edges.head(edges.norm(x_TD[self._index(rows_R)]), Path.PROMPT).float().cpu().numpy()

    def close(self) -> None:
        """Free weights, KV and graphs. Idempotent."""
        spec = self._model.spec
        self._graphs, self._model = None, TorchModel(spec, LayerRange(0, 0), (), None, one_path=True)
        self._pool = CudaPool(0, 0, spec.n_kv_heads, spec.head_dim, self._device)
        torch.cuda.empty_cache()

    def from_wire(self, x_TD: WireBits) -> Tensor:
        return from_bits(x_TD).to(self._device)

    def _forward(self, x_TD: Tensor, tables: Tables) -> Tensor:
        return self._run(self._model.layers, x_TD, tables)

    def _run(self, layers: Sequence[Layer], x_TD: Tensor, tables: Tables, watch: StepWatch | None = None) -> Tensor:
        step = CudaStep(tables, self._pool, self._rope, self._model.spec.head_dim**-0.5)
        return run_watched(layers, x_TD, step, watch)

    def _index(self, numbers: Int32) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)


def load_cuda(source: WeightSource, options: LoadOptions, progress: LoadProgress | None) -> CudaRunner:
    """A runner on the current CUDA device.

    Raises:
        ModelFileError, UnsupportedModel: from the source, or heads too wide for the kernel.
        ConfigError: no CUDA device, or quantised weights.
        OutOfMemory: the weights or the KV pool do not fit the device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device", "Check the driver, or run on the CPU.")
    if options.weights is not WeightsFormat.BF16:
        raise ConfigError(f"--weights {options.weights} was asked for on CUDA, which holds bf16", "Ask for --weights bf16.")
    spec = source.spec
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        raise UnsupportedModel(
            f"CUDA attention takes heads of at most {MAX_HEAD_DIM}, in eights; this model's have {spec.head_dim}", "Run on the CPU."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    n_blocks = -(-options.n_blocks * options.block_size // PAGE)
    with torch.inference_mode():
        model = load_model(source, options, progress, device)
        check_kv((n_blocks + 1) * PAGE, spec.kv_bytes_per_token(options.layers), torch.cuda.mem_get_info(device)[0])
        return CudaRunner(model, len(options.layers), n_blocks, _measured(model, options, device), device)


def _measured(model: TorchModel, options: LoadOptions, device: torch.device) -> Numerics:
    def make(source: WeightSource, threads: int) -> LayerRunner[Any]:
        small = LoadOptions(source.spec.all_layers, options.weights, 1, PAGE, threads)
        blocks = -(-ROWS // PAGE)
        return CudaRunner(load_model(source, small, None, device), 1, blocks, Numerics("", holds_identity=False), device)

    label = f"torch-cuda {torch.__version__} {torch.cuda.get_device_name(device)} {options.weights}"
    found = measure(make, SeededWeights(small(model.spec)), {options.threads}, tensor_bytes, label)
    holds = found.holds_identity
    if holds and model.layers:
        rows = min(_LONG, model.spec.max_context)
        # Real sizes, and rows enough for the kernels of long prompts.
        first = CudaRunner(
            TorchModel(model.spec, LayerRange(0, 1), model.layers[:1], None, one_path=True),
            1,
            -(-_LONG // PAGE),
            Numerics("", holds_identity=False),
            device,
        )
        x_TD = seeded_rows(rows, model.spec.hidden).to(device)
        holds = cuts_agree(first, x_TD, ((rows,), (rows // 2, rows - rows // 2), (*[1] * 8, rows - 8)))
        first.close()
    return Numerics(found.id, holds)
