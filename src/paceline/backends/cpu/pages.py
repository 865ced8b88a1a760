"""Where KV blocks lie, and their memory, made present a little before it is used.

The system gives a process memory when it is first written to, zeroed; of large pages that takes milliseconds each, and a step that is the first to
write some blocks pays for one or two a layer: more than a short prompt takes in all. So blocks lie in the order in which they are first used, whatever
their ids, and a thread asks for the pages of the next ones while others compute. What it has not got to yet, and all of it on systems that have no such
call, comes as the system gives it.

Blocks of keys and values: 16 tokens of one KV head, laid out as attention's products take them, and how a token is put into one.

A block holds 16 keys as [head_dim / 2][16 keys][2 dimensions] and 16 values as [head_dim / 16][8 key pairs][16 dimensions][2 keys],
all bf16: each line of 64 bytes is one vector of pairs. Strides and offsets are bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.simd import I32, Emit, Value
from paceline.backends.cpu.sizes import BLOCK, NEIGHBOURS
from paceline.core.ids import BlockId


@intrinsic
def write_key(_, block, slot, k, head_dim):
    """Put a token's bf16 key (address `k`) in place `slot` of a block: its pairs go to one lane of a line each."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        block, slot, k, head_dim = args
        lane = e.at(block, e.mul(slot, 4))
        with e.loop(e.b.lshr(head_dim, e.i64(1))) as pair:
            e.store(e.load(I32, k, e.mul(pair, 4), align=4), lane, e.mul(pair, 64), align=4)

    return lowered(body, types.void, *[types.int64] * 4)


@intrinsic
def _put_value(_, values, slot, v, head_dim):
    """Value of one token: 16 dimensions a line, every second half of it; the other halves (the next token's) are not touched."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        values, slot, v, head_dim = args
        b = e.b
        odd = b.and_(slot, e.i64(1))
        line = e.at(values, e.mul(b.lshr(slot, e.i64(1)), 64))
        with e.loop(b.lshr(head_dim, e.i64(4))) as slice_:
            dims = e.load(ir.VectorType(ir.IntType(16), 16), v, e.mul(slice_, 32))
            e.store_every_second(dims, e.at(line, e.mul(slice_, 512)), odd)

    return lowered(body, types.void, *[types.int64] * 4)


@inner
def write_value(values, slot, n_rows, v, head_dim, zeros):
    """Put a token's bf16 value (address `v`) in place `slot` of a block (address of its KV head's values).

    The first token of a block clears the values that no row of this batch will write (`n_rows` from this token on are its
    sequence's): a masked key weighs zero, and zero times a stale infinity would not be zero. Rows of a block may be written by
    several threads at once, so no row touches another's place. `zeros`: address of a head of zeros.
    """
    _put_value(values, slot, v, head_dim)
    if slot == 0:
        for stale in range(min(n_rows, BLOCK), BLOCK):
            _put_value(values, stale, zeros, head_dim)


AHEAD: Final = 4
"""Groups of every layer that are present before they are used: two chunks of a prompt. Raising it takes memory sooner, and hides longer steps."""
_POPULATE_WRITE: Final = 23
"""Number of the advice of `madvise` (since Linux 5.14) that makes pages present as if they were written to. Their content stays."""
_AT_ONCE: Final = 1 << 21
"""Bytes of each call. Raising it: other threads that change the process's memory map wait for longer."""

_NOWHERE: Final = -1
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Int32 = npt.NDArray[np.int32]


class KvPages:
    """Places of one array, given to blocks in the order in which they are first used. Owns a thread until `close`.

    Args:
        kv: memory of whole layers, each of which consists of groups.
        layer_bytes: bytes of a layer.
        group_bytes: bytes of a group: `NEIGHBOURS` blocks in all heads of a layer.
        n_blocks: number of blocks, with the ids 0 to n_blocks - 1.
        kv_heads: KV heads of a layer.
    """

    def __init__(self, kv: npt.NDArray[np.uint8], layer_bytes: int, group_bytes: int, n_blocks: int, kv_heads: int) -> None:
        self._kv, self._layer_bytes, self._group_bytes, self._kv_heads = kv, layer_bytes, group_bytes, kv_heads
        self._places = np.full(n_blocks + 1, _NOWHERE, np.int32)
        self._places[-1] = 0  # what pads a table is looked up as well, and never used
        self._used = 0
        """Blocks that have a place."""
        self._present = 0
        """Groups of each layer."""
        self._closed = False
        per_block = group_bytes // (NEIGHBOURS * kv_heads) if kv_heads else 0
        shape = (len(kv) // layer_bytes, layer_bytes // group_bytes, kv_heads, NEIGHBOURS, per_block) if kv_heads else (0,) * 5
        self._blocks = kv.reshape(shape)
        """[layers, groups, heads, neighbours, bytes]; there may be no layers, or no heads."""
        self._placing = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "paceline-kv-pages")
        self.brought = self._thread.submit(self._bring, AHEAD)
        """Done when what was asked for last is present."""

    def places_of(self, ids: Int32) -> Int32:
        """Where blocks lie in a layer, counted in blocks of one head, from those of the first head; -1 pads."""
        places = self._places[ids]
        if places.size and int(places.min()) < 0:
            self._give_places(np.array(sorted(set(ids[places < 0].tolist())), ids.dtype))  # np.unique imports numpy.ma
            places = self._places[ids]
        return places

    def close(self) -> None:
        """End the thread; what it is at is given up. Idempotent."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers and heads."""
        return self._blocks.shape[0] * self._blocks.shape[2] * self._blocks.shape[4]

    def block(self, block: BlockId) -> npt.NDArray[np.uint8]:
        """A block where it lies, [layers, heads, bytes]."""
        place = int(self.places_of(np.array([block], np.int32))[0])
        return self._blocks[:, place // (NEIGHBOURS * self._kv_heads), :, place % NEIGHBOURS]

    def _give_places(self, ids: Int32) -> None:
        with self._placing:  # another thread may fill a block
            self._place(ids[self._places[ids] < 0])

    def _place(self, ids: Int32) -> None:
        groups = -(-self._used // NEIGHBOURS)
        order = np.arange(self._used, self._used + len(ids), dtype=np.int32)
        self._places[ids] = order // NEIGHBOURS * (NEIGHBOURS * self._kv_heads) + order % NEIGHBOURS
        self._used += len(ids)
        if (wanted := -(-self._used // NEIGHBOURS)) > groups:
            self.brought = self._thread.submit(self._bring, wanted + AHEAD)

    def _bring(self, groups: int) -> None:
        """Make the first `groups` groups of each layer present."""
        if not self._layer_bytes:
            return
        start, stop = self._present * self._group_bytes, min(groups * self._group_bytes, self._layer_bytes)
        for layer in range(0, len(self._kv), self._layer_bytes):
            for at in range(layer + start, layer + stop, _AT_ONCE):
                if self._closed or not _populate(self._kv.ctypes.data + at, min(_AT_ONCE, layer + stop - at)):
                    return
        self._present = groups


def _populate(address: int, length: int) -> bool:
    """Make memory present. Returns whether this system can."""
    start = address - address % mmap.PAGESIZE
    return _madvise(start, address + length - start, _POPULATE_WRITE) == 0
