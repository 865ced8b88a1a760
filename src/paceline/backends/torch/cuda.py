"""A range of layers on an NVIDIA GPU: bf16, paged flash attention, CUDA graphs for decode.

Matrix libraries choose kernels by the number of rows there, so identity is not promised but measured at load: `holds_identity` says
what was seen. Blocks are 256 tokens, whatever was asked for: as many as hold the tokens asked for, and one of the runner's own.

Attention is torch's variable-length flash attention, which reads keys through block tables. Its kernel wants pages of 256 tokens (FlashAttention 2's limit),
int32 tables whose last dimension is contiguous, bf16 heads of at most 256. `num_splits=1` keeps each row's keys in one reduction: the order of its sums does
not depend on the batch. Rows are aligned with the last keys of their sequence (bottom-right causal mask), so a chunk in the middle of a prompt needs no mask.

Decode steps are CUDA graphs, one launch for a whole step, at a few padded batch sizes. A graph replays fixed addresses, so it has its own inputs, and a batch
is copied into them. Padding rows are sequences of one token whose table names a block that no sequence owns. Graphs are recorded when a size is first met;
they share one memory pool.

Shapes: T rows, S sequences, D hidden (or a head's width), R rows with logits, V vocabulary, H query heads, N KV heads, B pages of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from paceline.backends.memory import check_kv
from paceline.backends.numerics import ROWS, Numerics, SeededWeights, measure, small
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.torch.attention import Rope, row_blocks, row_positions
from paceline.backends.torch.families import Layer
from paceline.backends.torch.loading import cuts_agree, load_model, seeded_rows, tensor_bytes
from paceline.backends.torch.runner import PooledRunner, TorchModel, edges_of, from_bits, run_watched
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import LayerRange, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.executor import Path
from paceline.engine.local import Int32, LayerRunner, RowPlan, StepWatch, WireBits

PAGE = 256
"""Tokens of a block on CUDA."""


class CudaPool:
    """Keys and values of a range of layers, bf16 [layers, 2, blocks, PAGE, N, D]."""

    def __init__(self, n_layers: int, n_blocks: int, n_kv: int, head_dim: int, device: torch.device) -> None:
        self.n_blocks, self.device = n_blocks, device
        pool = torch.zeros(n_layers, 2, n_blocks, PAGE, n_kv, head_dim, dtype=torch.bfloat16, device=device)
        self.pages = [(layer[0], layer[1]) for layer in pool]

    def block(self, block: int, layers: slice = slice(None)) -> list[Tensor]:
        """A block's keys and values in each layer, or in some, [PAGE, N, D]."""
        return [pages[block] for layer in self.pages[layers] for pages in layer]


@dataclass(frozen=True, slots=True)
class Tables:
    """A batch as the kernel sees it, on the device."""

    positions_T: Tensor
    slots_T: Tensor
    """Where each row's key lies: block * PAGE + offset."""
    query_starts: Tensor
    """int32 [S + 1]."""
    key_starts: Tensor
    """int32 [S + 1]: running sums of the lengths; the kernel finds keys by table, and lengths in `lengths_S`."""
    lengths_S: Tensor
    tables_SB: Tensor
    max_rows: int
    max_keys: int


def host_tables(plan: RowPlan) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of `Tables`, still on the host."""
    positions = row_positions(plan)
    lengths = (plan.first_position_S + plan.n_rows_S).astype(np.int32)
    return {
        "positions_T": positions,
        "slots_T": row_blocks(plan, positions, PAGE) * PAGE + positions % PAGE,
        "query_starts": np.concatenate([[0], np.cumsum(plan.n_rows_S)]).astype(np.int32),
        "key_starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "lengths_S": lengths,
        "tables_SB": np.ascontiguousarray(np.maximum(plan.tables_SB[:, : -(-int(lengths.max()) // PAGE)], 0), np.int32),
    }


def to_device(plan: RowPlan, device: torch.device) -> Tables:
    """The plan of any batch."""
    arrays = {name: torch.from_numpy(array).to(device) for name, array in host_tables(plan).items()}
    longest = int((plan.first_position_S + plan.n_rows_S).max())
    return Tables(**arrays, max_rows=int(plan.n_rows_S.max()), max_keys=longest)


class CudaStep:
    """One batch on a CUDA device."""

    def __init__(self, tables: Tables, pool: CudaPool, rope: Rope, scale: float) -> None:
        self._tables, self._pool, self._rope, self._scale = tables, pool, rope, scale
        self._turn = rope.at(tables.positions_T)

    def rotate(self, x_THD: Tensor) -> Tensor:
        return self._rope.rotate(x_THD, self._turn)

    def attend(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, window: int = 0) -> Tensor:
        at, (keys, values) = self._tables, self._pool.pages[layer]
        for pages, rows in ((keys, k_THD), (values, v_THD)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, at.slots_T, rows)
        out_THD = varlen_attn(
            q_THD.contiguous(),
            keys,
            values,
            at.query_starts,
            at.key_starts,
            at.max_rows,
            at.max_keys,
            scale=self._scale,
            window_size=(window - 1, 0),
            enable_gqa=True,
            seqused_k=at.lengths_S,
            block_table=at.tables_SB,
            num_splits=1,
        )
        assert isinstance(out_THD, Tensor)
        return out_THD.flatten(1)


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
        hidden: D.
        context: the longest sequence; tables have room for it.
        spare: the block that padding rows write to.
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
        n_blocks: KV blocks of 256 tokens.
        numerics: what these kernels were measured to compute.
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
        return edges.head(edges.norm(x_TD[self._index(rows_R)])).float().cpu().numpy()

    def close(self) -> None:
        """Free weights, KV and graphs. Idempotent."""
        spec = self._model.spec
        self._graphs, self._model = None, TorchModel(spec, LayerRange(0, 0), (), None)
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
        return CudaRunner(load_model(source, small, None, device), source.spec.n_layers, blocks, Numerics("", holds_identity=False), device)

    label = f"torch-cuda {torch.__version__} {torch.cuda.get_device_name(device)} {options.weights}"
    found = measure(make, SeededWeights(small(model.spec)), {options.threads}, tensor_bytes, label)
    holds = found.holds_identity
    if holds and model.layers:
        rows = min(_LONG, model.spec.max_context)
        # Real sizes, and rows enough for the kernels of long prompts.
        first = CudaRunner(
            TorchModel(model.spec, LayerRange(0, 1), model.layers[:1], None),
            1,
            -(-_LONG // PAGE),
            Numerics("", holds_identity=False),
            device,
        )
        x_TD = seeded_rows(rows, model.spec.hidden).to(device)
        holds = cuts_agree(first, x_TD, ((rows,), (rows // 2, rows - rows // 2), (*[1] * 8, rows - 8)))
        first.close()
    return Numerics(found.id, holds)
