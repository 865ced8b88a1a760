"""StageBatch and its bytes: what goes before activations on a tensor stream.

Numbers of 8 bytes, little-endian: how many sequences, blocks and released sequences, the batch's id, then the columns one after the other:
sequences, rows, first positions, paths, counts of blocks; blocks; released sequences. Not a message of the schema, because each token waits for
this to be written and read twice a stage, with nothing of it in any cache: protobuf took four times as long.
"""

from __future__ import annotations

import sys
from array import array
from typing import cast

from paceline.core.errors import StreamCorrupt
from paceline.core.ids import BatchId, SequenceId
from paceline.parallel.stage_batch import StageBatch

_BIG_ENDIAN = sys.byteorder == "big"


def write_batch(batch: StageBatch) -> bytes:
    numbers = array("Q", (len(batch.sequences), len(batch.blocks), len(batch.released), batch.batch_id))
    for column in (
        batch.sequences, batch.row_counts, batch.first_positions, batch.paths, batch.block_counts, batch.blocks, batch.released,
    ):  # fmt: skip
        numbers.extend(column)
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
    if 5 * n + n_blocks + n_released != len(rest):
        raise StreamCorrupt(
            f"Batch {batch_id} says {n} sequences, {n_blocks} blocks and {n_released} released, and has {len(rest)} numbers"
        )
    blocks, released = rest[5 * n : 5 * n + n_blocks], rest[5 * n + n_blocks :]
    sequences, counts, positions, paths, gained = (rest[n * column : n * (column + 1)] for column in range(5))
    return StageBatch(
        BatchId(batch_id), cast("list[SequenceId]", sequences), counts, positions, paths, gained, blocks, cast("list[SequenceId]", released)
    )
