"""A range of layers on an NVIDIA GPU: bf16, paged flash attention, CUDA graphs for decode.

On a GPU, matrix libraries choose kernels by the number of rows. The order of sums is still the same if no sum is split between blocks of the GPU
(cuBLASLt has a setting for it), and if there are never few rows (`LEAST_ROWS`; grouped products of experts come from another library). On an H200, no
product of 1 to 2048 rows gave a row other bytes than another did. No library promises this, so it is measured at load (`holds_identity`). Blocks always
have 256 tokens, whatever the options say: as many blocks as hold the requested tokens, and one for the runner's own use.

A batch of few rows is one launch of a CUDA graph of `GRAPH_ROWS` rows. A graph replays fixed addresses, so it has its own inputs, and each batch
is copied into them. To the graph, each row is a separate sequence with the keys up to that row. Padding rows are sequences of one token in a block that
no real sequence owns. There is a graph for each power of two of segments of keys. It is recorded when it is first needed, while answers wait. All graphs
share one memory pool.

Shapes: T rows, D hidden, R rows with logits, V vocabulary.
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
from paceline.backends.table import cuda_refuses
from paceline.backends.torch.attention import Rope
from paceline.backends.torch.cuda_attention import (
    PAGE,
    SEGMENT,
    Arrays,
    Batch,
    CudaPool,
    CudaStep,
    OnDevice,
    batch_of,
    rows_apart,
    segments_before,
)
from paceline.backends.torch.families import Layer, groups_products
from paceline.backends.torch.loading import cuts_agree, load_model, seeded_rows, tensor_bytes
from paceline.backends.torch.runner import PooledRunner, TorchModel, edges_of, from_bits, run_watched
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import Int32, LayerRunner, RowPlan, StepWatch, WireBits

GRAPH_ROWS = 64
"""Rows of a graph. Lowering it: no step is faster, because products are padded to this number of rows anyway."""

MOST_EARLIER = 512
"""Most segments before a row's own in a graph. Raising it: the attention kernel takes at most 65,535 pieces."""

Forward = Callable[[Tensor, Batch], Tensor]
"""Function that runs the layers: bf16 [T, D] to bf16 [T, D]."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    x_TD: Tensor
    arrays: OnDevice
    out_TD: Tensor


class StepGraphs:
    """CUDA graphs that run all layers over few rows.

    Args:
        forward: runs the layers; recorded into the graphs.
        spare: the block that padding rows write to.
    """

    def __init__(self, forward: Forward, spec: ModelSpec, *, spare: int, device: torch.device) -> None:
        self._forward, self._hidden, self._spare, self._device = forward, spec.hidden, spare, device
        self._per_kv, self._whole = spec.n_heads // spec.n_kv_heads, spec.window is not None
        self._recorded: dict[int, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, x_TD: Tensor, plan: RowPlan) -> Tensor:
        """Run a batch of at most `GRAPH_ROWS` rows. The result is valid until the next batch."""
        earlier = segments_before(plan)
        n_earlier = 1 << (earlier - 1).bit_length() if earlier else 0
        arrays = rows_apart(plan, GRAPH_ROWS, n_earlier, self._per_kv, self._spare, whole=self._whole)
        recorded = self._recorded.get(n_earlier) or self._record(n_earlier, arrays)
        recorded.x_TD[: len(x_TD)].copy_(x_TD)
        recorded.x_TD[len(x_TD) :].zero_()  # equal rows, so that a mixture reads few experts for them
        recorded.arrays.fill(arrays)
        recorded.graph.replay()
        return recorded.out_TD[: len(x_TD)]

    def _record(self, n_earlier: int, arrays: Arrays) -> _Recorded:
        x_TD = torch.zeros(GRAPH_ROWS, self._hidden, dtype=torch.bfloat16, device=self._device)
        there = OnDevice.of(arrays, self._device)
        batch = Batch(there.apart, self._per_kv, (n_earlier + 1) * SEGMENT, packed=True)
        # A first run outside the graph lets libraries choose kernels and allocate workspaces.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(x_TD, batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local errors: other threads may load models or record graphs at the same time.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            out_TD = self._forward(x_TD, batch)
        self._recorded[n_earlier] = _Recorded(graph, x_TD, there, out_TD)
        return self._recorded[n_earlier]


_LONG = 1000
"""Rows of the longest prompt piece in the measurement of identity."""
_BEHIND = 7 * SEGMENT + SEGMENT // 2
"""Keys before these rows in the second of two runs."""
_HEAD = 256
"""Rows in the measurement of the head."""
_PIECES = ((500,), (1, 1, 1, 2, 3, 16, 33, 64), (65, 128, 129, 256))
"""Rows of each piece, for each cut. The remaining rows form the last piece."""


class CudaRunner(PooledRunner[CudaPool]):
    """A `LayerRunner` with bf16 tensors on the device as activations.

    Args:
        n_blocks: number of KV blocks of 256 tokens.
        numerics: the measured numerics of these kernels.
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
        # Experts that are not grouped read each row's choice on the host, which a graph can't.
        graphed = spec.moe is None or groups_products(device)
        self._graphs = StepGraphs(self._forward, spec, spare=n_blocks, device=device) if graphed else None

    @torch.inference_mode()
    def embed(self, token_ids_T: Int32) -> Tensor:
        return edges_of(self._model).embedding.rows(self._index(token_ids_T))

    @torch.inference_mode()
    def run_layers(self, x_TD: Tensor, plan: RowPlan, part: LayerRange | None = None) -> Tensor:
        """Run the layers, writing K and V of the rows into their blocks. Returns the residual, bf16 [T, D].

        Graphs always run all layers, so they are used only if `part` is all of them.
        """
        if not len(x_TD):
            return x_TD
        if self._graphs is not None and part in {None, self.layers} and len(x_TD) <= GRAPH_ROWS and segments_before(plan) <= MOST_EARLIER:
            out_TD = self._graphs.run(x_TD, plan).clone()
            if plan.watch is not None:
                for _ in range(len(self.layers)):
                    plan.watch.layer_done()
            return out_TD
        return self._run(self._model.part(part), x_TD, batch_of(plan, self._device, whole=self._model.spec.window is not None), plan.watch)

    @torch.inference_mode()
    def logits(self, x_TD: Tensor, rows_R: Int32) -> npt.NDArray[np.float32]:
        """Apply final norm and head to rows `rows_R`. Returns float32 [R, V] on the host."""
        edges = edges_of(self._model)
        if not len(rows_R):
            return np.zeros((0, self._model.spec.vocab), np.float32)
        logits_RV = edges.head(edges.norm(x_TD[self._index(rows_R)])).float()
        if len(rows_R) > GRAPH_ROWS:
            return logits_RV.cpu().numpy()
        # The device writes directly into pinned memory, several times as fast; torch keeps that memory for the next step.
        return torch.empty(logits_RV.shape, pin_memory=True).copy_(logits_RV).numpy()

    def close(self) -> None:
        """Free weights, KV and graphs. Idempotent."""
        spec = self._model.spec
        self._graphs, self._model = None, TorchModel(spec, LayerRange(0, 0), (), None)
        self._pool = CudaPool(0, 0, spec.n_kv_heads, spec.head_dim, self._device)
        torch.cuda.empty_cache()

    def from_wire(self, x_TD: WireBits) -> Tensor:
        return from_bits(x_TD).to(self._device)

    def _forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        return self._run(self._model.layers, x_TD, batch)

    def _run(self, layers: Sequence[Layer], x_TD: Tensor, batch: Batch, watch: StepWatch | None = None) -> Tensor:
        step = CudaStep(batch, self._pool, self._rope, self._model.spec.head_dim**-0.5)
        return run_watched(layers, x_TD, step, watch)

    def _index(self, numbers: Int32) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)


def load_cuda(source: WeightSource, options: LoadOptions, progress: LoadProgress | None) -> CudaRunner:
    """Load a runner on the current CUDA device.

    Raises:
        ModelFileError, UnsupportedModel: the source can't be read, or the GPU does not run the model.
        ConfigError: torch sees no CUDA device, or the weights format is not bf16.
        OutOfMemory: the weights or the KV pool do not fit the device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device", "Check the driver, or run on the CPU.")
    if options.weights is not WeightsFormat.BF16:
        raise ConfigError(f"--weights {options.weights} was asked for on CUDA, which holds bf16", "Ask for --weights bf16.")
    spec = source.spec
    if (reason := cuda_refuses(spec)) is not None:
        raise UnsupportedModel(f"the GPU does not run this model: {reason}", "Run on the CPU.")
    _add_in_one_order()
    device = torch.device("cuda", torch.cuda.current_device())
    n_blocks = -(-options.n_blocks * options.block_size // PAGE)
    with torch.inference_mode():
        model = load_model(source, options, progress, device)
        check_kv((n_blocks + 1) * PAGE, spec.kv_bytes_per_token(options.layers), torch.cuda.mem_get_info(device)[0])
        return CudaRunner(model, len(options.layers), n_blocks, _measured(model, options, device), device)


def _add_in_one_order() -> None:
    """Make products split no sum between blocks of the GPU. Only cuBLASLt has a setting for this."""
    if not str(torch.backends.cuda.preferred_blas_library()).endswith("Cublaslt"):  # torch was imported before `import_cuda`
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def _measured(model: TorchModel, options: LoadOptions, device: torch.device) -> Numerics:
    def make(source: WeightSource, threads: int) -> LayerRunner[Any]:
        small = LoadOptions(source.spec.all_layers, options.weights, 1, PAGE, threads)
        blocks = -(-ROWS // PAGE)
        return CudaRunner(load_model(source, small, None, device), source.spec.n_layers, blocks, Numerics("", holds_identity=False), device)

    label = f"torch-cuda {torch.__version__} {torch.cuda.get_device_name(device)} {options.weights}, segments of {SEGMENT} keys"
    found = measure(make, SeededWeights(small(model.spec)), {options.threads}, tensor_bytes, label)
    # The real layers run in their sizes, with enough rows for the kernels of long prompts and with few; first at the beginning, then behind
    # several segments of keys.
    rows = min(_LONG, model.spec.max_context)
    x_TD, cuts = seeded_rows(rows, model.spec.hidden).to(device), ((rows,), *(cut_up(rows, pieces) for pieces in _PIECES))
    holds = found.holds_identity and _head_holds(model, x_TD[:_HEAD])
    if holds and model.layers:
        behind = min(_BEHIND, (model.spec.max_context - rows) // PAGE * PAGE)
        n_blocks = max(2 * -(-rows // PAGE), -(-(behind + rows) // PAGE))
        # One layer for each window. KV is stored by the layer's number among all, so the pool needs room up to the highest.
        places = {model.spec.window_of(model.held.start + place): place for place in reversed(range(len(model.layers)))}
        few = TorchModel(model.spec, model.held, [model.layers[place] for place in sorted(places.values())], None)
        first = CudaRunner(few, max(places.values()) + 1, n_blocks, Numerics("", holds_identity=False), device)
        holds = all(cuts_agree(first, x_TD, cuts, at) for at in ((0, behind) if behind else (0,)))
        first.close()
    return Numerics(found.id, holds)


def cut_up(rows: int, pieces: Sequence[int]) -> list[int]:
    """Return the sizes of pieces that cut `rows` rows: those of `pieces` as far as the rows reach, then one with the rest."""
    cut = list[int]()
    for piece in (*pieces, rows):
        cut.append(min(piece, rows - sum(cut)))
    return [piece for piece in cut if piece]


def _head_holds(model: TorchModel, x_TD: Tensor) -> bool:
    """Return whether a row's logits are the same for any number of rows."""
    if model.edges is None:
        return True
    head = model.edges.head
    whole = head(x_TD)
    return all(torch.equal(head(x_TD[:count]), whole[:count]) for pieces in _PIECES for count in pieces)
