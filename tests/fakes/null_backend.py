"""A model without weights: its logits are a hash of what the KV blocks really hold.

`run_layers` writes each row's token and path into its block, then reads the whole history back through the block table. A wrong
table, a lost block, a shared block overwritten, a row on the wrong path or at the wrong position: each changes the answer.

Shapes: T rows, S sequences, B blocks of the longest table, R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.ids import BlockId
from paceline.core.model import LayerRange
from paceline.engine.local import Int32, RowPlan, WireBits

_EMPTY, _GARBAGE = -1, 999_999
UInt64 = npt.NDArray[np.uint64]


class NullRunner:
    """A `LayerRunner` whose activations are hashes: uint64 [T], of the token before the layers, of the history after them."""

    holds_identity = True
    layers = LayerRange(0, 1)

    def __init__(self, *, n_blocks: int, block_size: int = 4, vocab: int = 64, one_path: bool = False) -> None:
        self.n_blocks, self.block_size, self.one_path = n_blocks, block_size, one_path
        self.numerics_id = "null-one-path" if one_path else "null"
        self._columns_V = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._kv = np.full((n_blocks, block_size), _EMPTY, np.int64)
        self.rows_run = 0
        """Rows that went through the layers."""

    def embed(self, token_ids_T: Int32) -> UInt64:
        return token_ids_T.astype(np.uint64)

    def run_layers(self, x_TD: UInt64, plan: RowPlan, part: LayerRange | None = None) -> UInt64:
        out = np.empty_like(x_TD)
        for s in range(len(plan.n_rows_S)):
            first, n = int(plan.first_position_S[s]), int(plan.n_rows_S[s])
            start = int(plan.row_start_S[s])
            path = 0 if self.one_path else int(plan.path_S[s])
            positions = np.arange(first + n)
            table = plan.tables_SB[s][plan.tables_SB[s] >= 0]
            if len(table) * self.block_size < first + n:
                raise IndexError(f"sequence {s} of the batch has no block for position {len(table) * self.block_size}")
            blocks = table[positions // self.block_size]
            slots = positions % self.block_size
            if plan.watch is not None and plan.watch.gives_up:  # half way: what stands there then is no row's
                self._kv[blocks[first:], slots[first:]] = _GARBAGE
                continue
            self._kv[blocks[first:], slots[first:]] = x_TD[start : start + n].astype(np.int64) * 2 + path
            history = self._kv[blocks, slots]
            if history.min() < 0:
                raise ValueError(f"sequence {s} of the batch reads position {int(positions[history < 0][0])}, which no step wrote")
            out[start : start + n] = _running_hash(history)[first:]
            self.rows_run += n
        if plan.watch is not None:
            plan.watch.layer_done()
        return out

    def logits(self, x_TD: UInt64, rows_R: Int32) -> npt.NDArray[np.float32]:
        mixed_RV = x_TD[rows_R][:, None] ^ self._columns_V
        mixed_RV = (mixed_RV ^ (mixed_RV >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_RV ^= mixed_RV >> np.uint64(29)
        return (mixed_RV >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)

    def to_wire(self, x_TD: UInt64) -> WireBits:
        return x_TD.view(np.uint16).reshape(len(x_TD), 4)

    def from_wire(self, x_TD: WireBits) -> UInt64:
        return np.ascontiguousarray(x_TD).view(np.uint64).reshape(len(x_TD))

    kv_layout = "null"

    @property
    def block_bytes(self) -> int:
        return self.block_size * self._kv.itemsize

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        into[:] = self._kv[block].tobytes()

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        self._kv[block] = np.frombuffer(data, self._kv.dtype)

    def close(self) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Lose the KV, as a machine that went away does."""
        self._kv.fill(_EMPTY)


def _running_hash(history: npt.NDArray[np.int64]) -> UInt64:
    """Hash of each prefix, in order."""
    hashes = np.empty(len(history), np.uint64)
    h = 0xCBF29CE484222325
    for i, value in enumerate(history.tolist()):
        h = ((h ^ (value + 1)) * 0x100000001B3 + i) & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 29
        hashes[i] = h
    return hashes


class ByteVocabulary:
    """A `Vocabulary` of tokens that are bytes of their own, or strings of bytes given for them."""

    def __init__(self, size: int = 64, eos_ids: frozenset[int] = frozenset({0}), spellings: Sequence[bytes] = ()) -> None:
        """A vocabulary.

        Args:
            eos_ids: ends of an answer; without bytes.
            spellings: bytes of the first tokens; the rest spell one printable character each.
        """
        self.size, self.eos_ids = size, eos_ids
        self._spellings = tuple(spellings)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.eos_ids:
            return b""
        if token_id < len(self._spellings):
            return self._spellings[token_id]
        return bytes([33 + token_id % 94])
