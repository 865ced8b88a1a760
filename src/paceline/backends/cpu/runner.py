"""Layers of a model in compiled kernels: weights packed, KV paged, one path for prompt and generated rows.

Weights stay in their format for prompts too: unpacking a record costs little compared with the products of even four rows. So the weights need not be
copied to bf16, and prompt and generated positions run the same kernels (`one_path`).
If the model is a share of each layer, the ranks with the other shares run the same batches at the same time (`exchange`).
Activations between calls are bf16 bits, uint16 [T, D]. Shapes: T rows, D hidden, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import places, sync
from paceline.backends.cpu.exchange import Exchange, padded
from paceline.backends.cpu.experts import N_COUNT, N_PART
from paceline.backends.cpu.forms import GROUP_BYTES, LAYOUT, Form
from paceline.backends.cpu.pages import KvPages
from paceline.backends.cpu.products import bounds_of, product
from paceline.backends.cpu.rows import GATES, embed_rows, reader
from paceline.backends.cpu.shares import LANES, segment_bounds
from paceline.backends.cpu.sizes import BLOCK, N_PIECE, NEIGHBOURS, PART, aligned, record_bytes
from paceline.backends.cpu.tasks import task_function, task_places
from paceline.backends.cpu.team import Team, control_words
from paceline.backends.cpu.weights import PackedModel
from paceline.backends.holding import cutter_of, product_bytes, thread_bytes
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange, ModelSpec, MoeSpec, Norms, rotary_dims
from paceline.core.weights import GROUP, rope_tables
from paceline.engine.local import Int32, RowPlan

Bf16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Everything the kernels reach by address, kept alive here."""

    x_bf16: Bf16
    tables: Int32
    row_position: Int32
    row_table: Int32
    row_left: Int32
    pieces: Int32
    unfinished: npt.NDArray[np.uint8]
    head_rows: Int32
    rest: tuple[npt.NDArray[np.generic], ...]


class CpuRunner:
    """A `LayerRunner` in compiled kernels.

    Args:
        model: packed weights of a range of layers.
        n_blocks: KV blocks of 16 tokens.
        threads: threads that share a step, the caller's included.
        width: numbers that a row has outside, where the model's hidden size was padded.
        exchange: with the other ranks of a tensor group, where the model is a share; all run the same batches. Their logits are read at the first.
    """

    block_size = BLOCK
    one_path = True
    holds_identity = True
    """Checked before a model is loaded (`probe.py`)."""

    def __init__(
        self,
        model: PackedModel,
        *,
        n_blocks: int,
        threads: int,
        numerics_id: str,
        max_rows: int,
        width: int | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        spec = model.share.of(model.spec)
        self._exchange = exchange
        self._model, self.n_blocks, self.numerics_id = model, n_blocks, numerics_id
        self.layers = model.layers
        self._max_context = min(spec.max_context, n_blocks * BLOCK)
        self._max_blocks = math.ceil(self._max_context / BLOCK)
        self._max_rows, self._width = max_rows, width or spec.hidden
        self._weights = model.arrays[0].view(np.uint8)
        self._logits = np.empty((0, padded(spec.vocab)), np.float32) if exchange is None else exchange.logits
        self._cutter = cutter_of(spec, threads, n_blocks)
        self._routed = np.zeros(1, np.int64)
        nodes = sync.nodes()
        self._sizes = self._lay_out_sizes(spec, threads, sync.groups_of(threads, len(nodes)))
        self._batch = np.zeros(places.N_BATCH, np.int64)
        self._places = _describe_weights(model)
        if model.embedding_form is not None:
            reader(model.embedding_form)  # now, beside the other kernels, and not in the first request
        self._arrays, self._buffers, control = self._allocate(spec, threads)
        self._team = Team(threads, control, (self._sizes, self._places, self._buffers, self._batch), nodes)
        self._closed = False

    def _lay_out_sizes(self, spec: ModelSpec, threads: int, groups: int) -> npt.NDArray[np.int64]:
        sizes = np.zeros(places.N_SIZES, np.int64)
        block = 2 * BLOCK * (spec.head_dim + spec.value_dim)
        kv_blocks = -(-self.n_blocks // NEIGHBOURS) * NEIGHBOURS
        for place, value in (
            (places.HIDDEN, spec.hidden),
            (places.Q_HEADS, spec.n_heads),
            (places.KV_HEADS, spec.n_kv_heads),
            (places.HEAD_DIM, spec.head_dim),
            (places.FFN, spec.ffn),
            (places.VOCAB, LANES * len(self._model.share.vocab)),
            (places.EPS, _bits(spec.rms_eps)),
            (places.SCALE, _bits((spec.head_dim**-0.5 if spec.scales.attention is None else spec.scales.attention) * math.log2(math.e))),
            (places.RESIDUAL_SCALE, _bits(spec.scales.residual)),
            (places.LOGITS_SCALE, 0 if spec.scales.logits == 1 else _bits(spec.scales.logits)),
            (places.WHOLE_NORM, spec.qk_norm_whole),
            (places.ACTIVATION, GATES[spec.activation]),
            (places.ROTARY, rotary_dims(spec.rope, spec.head_dim)),
            (places.N_LAYERS, len(self._model.layers)),
            *_sizes_of_experts(spec),
            *_sizes_of_heads(spec),
            (places.OUT_SEGMENTS, len(self._model.share.out)),
            (places.DOWN_SEGMENTS, len(self._model.share.down)),
            (places.OUT_INPUTS, len(self._model.attended)),
            (places.OUT_FROM, self._model.share.attended(self._model.spec).start - self._model.attended.start),
            (places.DOWN_INPUTS, len(self._model.inner)),
            (places.DOWN_FROM, self._model.share.inner(self._model.spec).start - self._model.inner.start),
            (places.LOGITS_STRIDE, 4 * padded(spec.vocab)),
            (places.RANK, 0 if self._exchange is None else self._exchange.rank),
            (places.RANKS, 1 if self._exchange is None else len(self._exchange.shares)),
            (places.TEAM, threads),
            (places.GROUPS, groups),
            (places.BLOCK_STRIDE, block),
            (places.HEAD_STRIDE, NEIGHBOURS * block),
            (places.LAYER_STRIDE, kv_blocks * spec.n_kv_heads * block),
            (places.SCRATCH_STRIDE, thread_bytes(self._model.spec, self._cutter)),
            (places.EXPANDED, product_bytes(spec)),
        ):
            sizes[place] = value
        return sizes

    def _bounds(self, *, down: bool) -> npt.NDArray[np.int64]:
        """Return the bounds of the share's segments of a sum, in groups, counted from the first input that is held."""
        model, spec = self._model, self._model.spec
        if down:
            owned, held, bounds = model.share.down, model.inner, bounds_of(spec.ffn // GROUP, 1)
        else:
            group = spec.n_heads // spec.n_kv_heads * spec.value_dim // GROUP
            owned, held, bounds = model.share.out, model.attended, bounds_of(spec.n_kv_heads, group)
        return bounds[owned.start : owned.stop + 1] - held.start // GROUP

    def _exchanged(self, down: bool, bounds: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
        """Return the arrays by place that a sum over ranks needs in addition to its bounds; none for a machine alone."""
        if self._exchange is None:
            return {}
        parts, joins = (places.DOWN_PARTS, places.DOWN_JOINS) if down else (places.OUT_PARTS, places.OUT_JOINS)
        return {parts: self._exchange.parts(down, bounds), joins: self._exchange.joins(down)}

    def _allocate(self, spec: ModelSpec, threads: int) -> tuple[_Arrays, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rows, hidden = self._max_rows, spec.hidden
        n_att = spec.n_heads * spec.head_dim
        x_bf16 = aligned(2 * rows * hidden).view(np.uint16).reshape(rows, hidden)
        int32 = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
        tables = int32(rows, self._max_blocks)
        row_position, row_table, row_left, head_rows = (int32(rows) for _ in range(4))
        split = self._cutter.split_records
        pieces = int32(rows + split, N_PIECE)
        ropes = {rope: rope_tables(rope, spec.head_dim, self._max_context) for rope in set(map(spec.rope_of, range(spec.n_layers)))}
        for slot, layer in enumerate(range(self.layers.start, self.layers.stop)):
            for place, table in zip((places.COS, places.SIN), ropes[spec.rope_of(layer)], strict=True):
                self._places[slot, place, places.AT] = table.ctypes.data
        control = aligned(8 * control_words(threads, int(self._sizes[places.GROUPS]))).view(np.int64)
        unfinished = aligned(8 * split * spec.n_heads)
        layer_bytes = int(self._sizes[places.LAYER_STRIDE])
        kv = aligned(len(self._model.layers) * layer_bytes)
        self._kv = KvPages(kv, layer_bytes, int(self._sizes[places.HEAD_STRIDE]) * spec.n_kv_heads, self.n_blocks, spec.n_kv_heads)
        held = {
            places.X: aligned(4 * rows * hidden),
            places.X_BF16: x_bf16,
            **self._activations(
                places.H,
                (places.Q, places.K, places.V, places.Q_LOW, places.KV_LOW, places.GATE, places.UP, places.ROUTER, places.HEAD),
                rows * hidden,
            ),
            **self._activations(places.ATT, (places.OUT,), rows * len(self._model.attended)),
            **(
                self._activations(places.ACT, (places.DOWN,), rows * len(self._model.inner))
                if spec.moe is None
                else self._experts(spec.moe)
            ),
            places.Q_BF16: aligned(2 * rows * n_att),
            places.KV: kv,
            places.TABLES: tables,
            places.ROW_POSITION: row_position,
            places.ROW_TABLE: row_table,
            places.ROW_LEFT: row_left,
            places.PIECES: pieces,
            places.RECORDS: aligned(split * spec.n_heads * record_bytes(spec.value_dim)),
            places.UNFINISHED: unfinished,
            places.HEAD_ROWS: head_rows,
            places.SCRATCH: aligned(threads * int(self._sizes[places.SCRATCH_STRIDE])),
            places.ZEROS: aligned(2 * spec.head_dim),
            **({} if spec.norms is Norms.BEFORE else {places.ADDED: aligned(4 * rows * hidden)}),
            **({places.TO_NORM: aligned(4 * rows * (n_att + spec.n_kv_heads * spec.head_dim))} if spec.qk_norm_whole else {}),
            **self._low(rows),
            places.WHOLE_BOUNDS: np.array([0, hidden // GROUP], np.int64),
            places.Q_BOUNDS: np.array([0, self._sizes[places.Q_INPUTS] // GROUP], np.int64),
            places.KV_BOUNDS: np.array([0, self._sizes[places.KV_INPUTS] // GROUP], np.int64),
            places.OUT_BOUNDS: (out_bounds := self._bounds(down=False)),
            places.DOWN_BOUNDS: (down_bounds := self._bounds(down=True)),
            places.CONTROL: control,
            **self._exchanged(False, out_bounds),
            **self._exchanged(True, down_bounds),
        }
        buffers = np.zeros(places.N_BUFFERS, np.int64)
        for place, array in held.items():
            buffers[place] = array.ctypes.data
        for place in task_places(mixture=spec.moe is not None):
            buffers[place] = task_function(place)
        if self._exchange is not None:
            buffers[places.ARRIVED] = self._exchange.arrived
            buffers[places.LOGITS] = self._logits.ctypes.data + 4 * LANES * self._model.share.vocab.start
        arrays = _Arrays(x_bf16, tables, row_position, row_table, row_left, pieces, unfinished, head_rows,
                         (*held.values(), *(table for tables in ropes.values() for table in tables)))  # fmt: skip
        return arrays, buffers, control

    def _low(self, rows: int) -> dict[int, npt.NDArray[np.generic]]:
        """Return the arrays by place that the low-rank products for queries, keys and values need; none for other models."""
        low = self._model.spec.low
        if low is None:
            return {}
        return {
            places.TO_NORM: aligned(4 * rows * int(self._sizes[places.LOW])),
            **self._activations(places.Q_HELD, (places.Q,), rows * low.queries),
            **self._activations(places.KV_HELD, (places.K,), rows * low.keys),
        }

    def _experts(self, moe: MoeSpec) -> dict[int, npt.NDArray[np.generic]]:
        """Return the arrays by place that the feed-forward of a mixture needs, in place of a dense one's."""
        n, hidden = self._max_rows * moe.top_k, self._model.spec.hidden
        segment_of = np.zeros(moe.n_experts, np.int32)
        for segment, (start, stop) in enumerate(pairwise(segment_bounds(moe.n_experts))):
            segment_of[start:stop] = segment
        return {
            **self._activations(places.EXPERT_ROWS, (places.GATE, places.UP), n * hidden),
            **self._activations(places.ACT, (places.DOWN,), n * moe.ffn),
            places.EXPERT_OUT: aligned(4 * n * hidden),
            places.EXPERT_BOUNDS: np.array([0, moe.ffn // GROUP], np.int64),
            places.EXPERT_SEGMENT: segment_of,
            places.EXPERT_PARTS: np.zeros((min(n, moe.n_experts) + n // PART, N_PART), np.int32),
            places.COUNTS: np.zeros((moe.n_experts, N_COUNT), np.int32),
            places.CHOICES: np.zeros(n, np.int32),
            places.SHARES: np.zeros(n, np.float32),
            places.PLACED: np.zeros(n, np.int32),
            places.ROUTED: self._routed,
        }

    def _activations(self, first: int, readers: tuple[int, ...], count: int) -> dict[int, npt.NDArray[np.uint8]]:
        """Room for `count` activations at the places from `first` on, in every kind that a matrix at `readers` takes."""
        kinds = {LAYOUT[Form(form)].inputs for form in self._model.forms[:, readers].ravel().tolist() if form >= 0}
        return {first + kind: aligned(count // GROUP * GROUP_BYTES[kind]) for kind in kinds}

    def embed(self, token_ids_T: Int32) -> Bf16:
        spec = self._model.spec
        out = np.empty((len(token_ids_T), spec.hidden), np.uint16)
        if self._model.embedding_form is None:
            raise ValueError("this runner has no embedding")
        embed_rows(self._model.embedding_form, self._model.embedding, token_ids_T, out, spec.scales.embedding)
        return self._without_padding(out)

    def _put_rows(self, x_TD: Bf16) -> None:
        rows = self._arrays.x_bf16[: len(x_TD)]
        rows[:, : self._width], rows[:, self._width :] = x_TD, 0  # zeros again: a row that overflowed may have changed them

    def _without_padding(self, x: Bf16) -> Bf16:
        return np.ascontiguousarray(x[:, : self._width])  # the array itself where nothing is padded

    def check_batch(self, rows: int, part: LayerRange) -> None:
        """Raise ValueError for what `run_layers` does not run."""
        if part.start < self.layers.start or part.stop > self.layers.stop:
            raise ValueError(f"layers {part}; this runner holds {self.layers}")
        if rows > self._max_rows:
            raise ValueError(f"a batch of {rows} rows; this runner takes {self._max_rows}")

    def run_layers(self, x_TD: Bf16, plan: RowPlan, part: LayerRange | None = None) -> Bf16:
        rows = len(x_TD)
        part = self.layers if part is None else part
        self.check_batch(rows, part)
        if len(plan.tables_SB) == 0 or not part:
            return x_TD
        self._describe(x_TD, plan, part.start, part.stop)
        self._batch[places.WATCH] = 0 if plan.watch is None else plan.watch.address
        self._team.run_layers()
        self._batch[places.WATCH] = 0
        if plan.watch is not None and plan.watch.gives_up:
            self._arrays.unfinished[:] = self._routed[:] = 0  # of tiles, and panels of rows, that some threads had begun
        return self._without_padding(self._arrays.x_bf16[:rows])

    def compile_layers(self, x_TD: Bf16, plan: RowPlan) -> None:
        """Compile what `run_layers` runs, by a step of no layers. Everything that the step writes is written again by the next one."""
        self._describe(x_TD, plan, self.layers.start, self.layers.start)
        self._team.run_layers()

    def _describe(self, x_TD: Bf16, plan: RowPlan, first_layer: int, stop_layer: int) -> None:
        """Put a batch where the kernels read it."""
        arrays, batch, rows = self._arrays, self._batch, len(x_TD)
        n_sequences, width = plan.tables_SB.shape
        arrays.tables[:n_sequences, :width] = self._kv.places_of(plan.tables_SB)
        if rows == n_sequences:
            arrays.row_position[:rows] = plan.first_position_S
            arrays.row_table[:rows] = np.arange(rows, dtype=np.int32)
            arrays.row_left[:rows] = 1
        else:
            for s, (start, count, first) in enumerate(
                zip(plan.row_start_S.tolist(), plan.n_rows_S.tolist(), plan.first_position_S.tolist(), strict=True)
            ):
                arrays.row_position[start : start + count] = np.arange(first, first + count, dtype=np.int32)
                arrays.row_table[start : start + count] = s
                arrays.row_left[start : start + count] = np.arange(count, 0, -1, dtype=np.int32)
        pieces = self._cutter.cut(plan.row_start_S, plan.n_rows_S, plan.first_position_S, arrays.pieces)
        self._put_rows(x_TD)
        batch[places.ROWS], batch[places.N_PIECES], batch[places.TABLE_STRIDE] = rows, pieces, arrays.tables.strides[0]
        batch[places.FIRST_LAYER], batch[places.STOP_LAYER] = first_layer - self.layers.start, stop_layer - self.layers.start

    @property
    def exchange_number(self) -> int:
        """Number of exchanges that this rank has counted. All ranks must have the same number before a batch."""
        return int(self._batch[places.EXCHANGE])

    @exchange_number.setter
    def exchange_number(self, number: int) -> None:
        self._batch[places.EXCHANGE] = number

    def logits(self, x_TD: Bf16, rows_R: Int32) -> npt.NDArray[np.float32]:
        arrays, n = self._arrays, len(rows_R)
        if n == 0:
            return self._logits[:0, : self._model.spec.vocab]
        if n > self._max_rows:
            raise ValueError(f"logits of {n} rows; this runner takes {self._max_rows}")
        if n > len(self._logits):
            if self._exchange is not None:
                raise ValueError(f"logits of {n} rows; this group takes {len(self._logits)}")
            vocab = self._logits.shape[1]
            self._logits = self._logits[:0].copy()  # so that never two are held
            self._logits = aligned(4 * n * vocab).view(np.float32).reshape(n, vocab)
            self._buffers[places.LOGITS] = self._logits.ctypes.data
        if x_TD.ctypes.data != arrays.x_bf16.ctypes.data:
            self._put_rows(x_TD)
        arrays.head_rows[:n] = rows_R
        self._batch[places.LOGIT_ROWS] = n
        self._team.run_head()
        return self._logits[:n, : self._model.spec.vocab]

    def to_wire(self, x_TD: Bf16) -> Bf16:
        return x_TD

    def from_wire(self, x_TD: Bf16) -> Bf16:
        return x_TD

    kv_layout = "pairs of 16"
    """See `pages`."""

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        source = self._kv.block(block)[(part or self.layers).within(self.layers)]
        np.copyto(np.frombuffer(into, np.uint8).reshape(source.shape), source)

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        target = self._kv.block(block)[(part or self.layers).within(self.layers)]
        np.copyto(target, np.frombuffer(data, np.uint8).reshape(target.shape))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._team.close()
            self._kv.close()


def _sizes_of_heads(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return the sizes of heads, and the places and sizes of the inputs of queries, keys and values, as (place, value)."""
    sizes = [(places.OWN_DIMS, spec.own_dims), (places.VALUE_DIM, spec.value_dim)]
    if spec.low is None:
        x = [(places.Q_X, places.H), (places.Q_INPUTS, spec.hidden), (places.KV_X, places.H), (places.KV_INPUTS, spec.hidden)]
        return [*sizes, *x, (places.KV_STEP, spec.head_dim)]
    low, shared = spec.low, spec.head_dim - spec.own_dims
    return [
        *sizes, (places.Q_X, places.Q_HELD), (places.Q_INPUTS, low.queries), (places.KV_X, places.KV_HELD), (places.KV_INPUTS, low.keys),
        (places.KV_STEP, spec.own_dims + low.value_dim), (places.LOW, low.queries + low.keys + shared), (places.LOW_EPS, _bits(low.eps)),
    ]  # fmt: skip


def _sizes_of_experts(spec: ModelSpec) -> list[tuple[int, int]]:
    moe = spec.moe
    if moe is None:
        return []
    return [
        (places.EXPERTS, moe.n_experts), (places.TOP_K, moe.top_k), (places.EXPERT_WIDTH, moe.ffn), (places.NORMED_SHARES, moe.norm_topk),
    ]  # fmt: skip


def _bits(value: float) -> int:
    """Return the bits of a number as fp32, as an int32."""
    return int(np.float32(value).view(np.int32))


def _describe_weights(model: PackedModel) -> npt.NDArray[np.int64]:
    """[layer, place, part] as `places` names them. Compiles the products that are missing."""
    described = np.zeros((*model.addresses.shape, places.N_PARTS), np.int64)
    described[:, :, places.AT] = model.addresses
    described[:-1, places.WINDOW, places.AT] = [model.spec.window_of(layer) for layer in range(model.layers.start, model.layers.stop)]
    for row, place in np.argwhere(model.forms >= 0):
        form = Form(model.forms[row, place])
        layout = LAYOUT[form]
        described[row, place, places.PRODUCT :] = product(form), layout.bytes_of_eight_groups, layout.inputs
    if (low := model.spec.low) is not None:  # values are in the matrix of keys, of each head behind them
        key, value = described[:-1, places.K], described[:-1, places.V]
        value[:] = key
        value[:, places.AT] += model.spec.own_dims // LANES * (low.keys // GROUP * key[:, places.EIGHT_GROUPS] // 8)
    return described
