"""Batches on tensor streams: the sink and the source that stages and executors use.

To them activations are bf16 bits (uint16). fp16 and fp32 are ways to write them on the wire, for those who asked; fp16 loses what it can't hold.

Before activations goes their `StageBatch`, in numbers of 8 bytes, little-endian: how many sequences, blocks and released sequences, the batch's id,
then the columns one after the other: sequences, rows, first positions, paths, counts of blocks; blocks; released sequences; and, of a batch that only
fills KV, the layer that it fills to. It is not a message of
the schema, because each token waits for this to be written and read twice a stage, with nothing of it in any cache: protobuf took four times as long.
"""

from __future__ import annotations

import sys
from array import array
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from paceline.core.errors import StreamCorrupt
from paceline.core.ids import BatchId, NodeId, SequenceId
from paceline.core.model import ActivationDtype
from paceline.engine.local import WireBits
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.incoming import Array, TensorMessage
from paceline.ways.pipeline.executor.sessions import Rehearse
from paceline.ways.pipeline.executor.stage import StageBatch

_BIG_ENDIAN = sys.byteorder == "big"


def write_batch(batch: StageBatch) -> bytes:
    numbers = array("Q", (len(batch.sequences), len(batch.blocks), len(batch.released), batch.batch_id))
    for column in (
        batch.sequences, batch.row_counts, batch.first_positions, batch.paths, batch.block_counts, batch.blocks, batch.released,
    ):  # fmt: skip
        numbers.extend(column)
    if batch.fills_to:
        numbers.append(batch.fills_to)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def read_batch(data: bytes) -> StageBatch:
    """What `write_batch` wrote. Whether the numbers make sense is for those who run the batch to say.

    Raises:
        StreamCorrupt: it is something else.
    """
    numbers = array("Q")
    if len(data) < 32 or len(data) % 8:
        raise StreamCorrupt(f"{len(data)} bytes before activations are no batch")
    numbers.frombytes(data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    n, n_blocks, n_released, batch_id, *rest = numbers.tolist()
    columns = 5 * n + n_blocks + n_released
    fills_to = rest.pop() if len(rest) == columns + 1 and rest[-1] else 0
    if columns != len(rest):
        raise StreamCorrupt(
            f"Batch {batch_id} says {n} sequences, {n_blocks} blocks and {n_released} released, and has {len(rest)} numbers"
        )
    blocks, released = rest[5 * n : 5 * n + n_blocks], rest[5 * n + n_blocks :]
    sequences, counts, positions, paths, gained = (rest[n * column : n * (column + 1)] for column in range(5))
    return StageBatch(
        BatchId(batch_id), cast("list[SequenceId]", sequences), counts, positions, paths, gained, blocks,
        cast("list[SequenceId]", released), fills_to,
    )  # fmt: skip


WIRE: Final[dict[ActivationDtype, np.dtype[np.generic]]] = {
    ActivationDtype.BF16: np.dtype(np.uint16),
    ActivationDtype.FP16: np.dtype(np.float16),
    ActivationDtype.FP32: np.dtype(np.float32),
}

LOOK_S = 0.004


def from_bf16(x: WireBits) -> npt.NDArray[np.float32]:
    """Exact."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: npt.NDArray[np.float32]) -> WireBits:
    """Rounded to the nearest, halves to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def written(x_TD: WireBits, dtype: ActivationDtype) -> Array:
    """Activations as they go over the wire."""
    if dtype is ActivationDtype.BF16:
        return x_TD
    with np.errstate(over="ignore"):  # what fp16 can't hold becomes infinite, and is found by the check for that
        return from_bf16(x_TD).astype(WIRE[dtype], copy=False)


def read(x_TD: Array) -> WireBits:
    """What `written` wrote."""
    return x_TD.view(np.uint16) if x_TD.dtype == np.uint16 else to_bf16(x_TD.astype(np.float32, copy=False))


class StreamSink:
    """`ways.pipeline.executor.sessions.ActivationSink` over a tensor stream.

    Args:
        sender: the stream; closed with this.
        dtype: how activations are written.
    """

    def __init__(self, sender: TensorSender, dtype: ActivationDtype = ActivationDtype.BF16) -> None:
        self._sender = sender
        self._dtype = dtype
        self._prepared: StageBatch | None = None

    def prepare(self, batch: StageBatch, width: int) -> None:
        self._sender.prepare(write_batch(batch), WIRE[self._dtype], (batch.n_rows, width))
        self._prepared = batch

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        array = written(x_TD, self._dtype)
        if batch is not self._prepared or not self._sender.send_prepared(array, deadline):
            self._sender.send(write_batch(batch), array, deadline)
        self._prepared = None

    def close(self) -> None:
        self._sender.close()


class StreamSource:
    """`ways.pipeline.executor.sessions.ActivationSource` over a tensor stream.

    Args:
        receiver: the stream; closed with this.
        dtype: how activations are written there.
        width: of a row; None: not checked.
    """

    def __init__(self, receiver: TensorReceiver, dtype: ActivationDtype = ActivationDtype.BF16, width: int | None = None) -> None:
        receiver.look(LOOK_S)
        self._receiver, self._width = receiver, width
        self._dtype = dtype

    @property
    def peer(self) -> NodeId:
        """Who sends."""
        return self._receiver.peer

    def receive(self, deadline: float, rehearse: Rehearse | None = None) -> tuple[StageBatch, WireBits]:
        again = None if rehearse is None else lambda message: rehearse(*self._batch(message))
        return self._batch(self._receiver.receive(deadline, again))

    def _batch(self, message: TensorMessage) -> tuple[StageBatch, WireBits]:
        x_TD = message.array
        if x_TD.dtype != WIRE[self._dtype] or x_TD.ndim != 2 or (self._width is not None and x_TD.shape[1] != self._width):
            raise self._receiver.refuse(StreamCorrupt(f"{self._receiver.peer} sent {x_TD.dtype} of shape {x_TD.shape} as activations"))
        try:
            batch = read_batch(message.header)
        except StreamCorrupt as error:
            raise self._receiver.refuse(error) from error
        return batch, read(x_TD)

    def close(self) -> None:
        self._receiver.close()
