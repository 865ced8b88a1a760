"""StageBatch and its bytes: what goes before activations on a tensor stream."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from paceline.core.errors import StreamCorrupt
from paceline.core.ids import BatchId
from paceline.parallel.stage_batch import StageBatch
from paceline.transport.wire import shard_pb2 as wire


def write_batch(batch: StageBatch) -> bytes:
    return wire.StageBatch(
        batch_id=batch.batch_id,
        sequences=batch.sequences,
        row_counts=batch.row_counts,
        first_positions=batch.first_positions,
        paths=batch.paths,
        block_counts=batch.block_counts,
        blocks=batch.blocks,
        released=batch.released,
    ).SerializeToString()


def read_batch(data: bytes, n_rows: int) -> StageBatch:
    """What `write_batch` wrote for `n_rows` rows.

    Raises:
        StreamCorrupt: it is something else, or its columns don't fit one another or the rows.
    """
    try:
        said = wire.StageBatch.FromString(data)
    except DecodeError as error:
        raise StreamCorrupt("What came before activations is no StageBatch") from error
    batch = StageBatch(
        BatchId(said.batch_id),
        list(said.sequences),  # pyright: ignore[reportArgumentType] - ids are int to the wire
        list(said.row_counts),
        list(said.first_positions),
        list(said.paths),
        list(said.block_counts),
        list(said.blocks),
        list(said.released),  # pyright: ignore[reportArgumentType]
    )
    n = len(batch.sequences)
    if not n == len(batch.row_counts) == len(batch.first_positions) == len(batch.paths) == len(batch.block_counts):
        raise StreamCorrupt(f"Batch {batch.batch_id} has columns of different lengths")
    if sum(batch.row_counts) != n_rows or sum(batch.block_counts) != len(batch.blocks):
        raise StreamCorrupt(f"Batch {batch.batch_id} does not fit its {n_rows} rows or its {len(batch.blocks)} blocks")
    return batch
