"""Cuts a batch's attention into pieces: tiles of rows that read keys together, and long tiles again by segments of their keys.

The cut changes no byte of the result (`attention.py`), but the number of tasks, how even they are, and how often keys are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.sizes import (
    N_PIECE,
    PIECE_OF,
    PIECE_RECORDS,
    PIECE_ROW,
    PIECE_ROWS,
    PIECE_START,
    PIECE_STOP,
    PIECE_TILE,
    SEGMENT,
)

Int32 = npt.NDArray[np.int32]

MOST_QUERIES = 128
"""Most rows times query heads of a KV head in a piece, so that keys read from memory serve many. Raising it: they no longer fit the second-level cache."""

FEWEST_QUERIES = 8
"""Rows times query heads that products take at once. Tiles with no more are not cut further."""

TASKS_A_THREAD = 4
"""Tasks for each thread that attention is cut into at least, if it can be, because some tasks take longer than others."""

SPLIT_ROWS = 8
"""Rows of the longest context that may be split by segments at the same time. Raising it: more memory for their records."""


_ONE_ROW = np.zeros(N_PIECE, np.int32)
_ONE_ROW[[PIECE_ROWS, PIECE_STOP, PIECE_OF]] = 1
"""The piece of one row that sees one segment."""


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts the attention of one model's batches for a number of threads."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    threads: int
    most_segments: int
    """Segments of the longest context."""

    @property
    def most_queries(self) -> int:
        """Most rows times query heads of a KV head in a piece."""
        return max(MOST_QUERIES, self.group)

    @property
    def split_records(self) -> int:
        """Number of records, for each query head, that all split tiles together may use."""
        return SPLIT_ROWS * self.most_segments if self.threads > 1 else 0

    def cut(self, starts: Int32, counts: Int32, firsts: Int32, out: Int32) -> int:
        """Write a batch's pieces, those with the most work last, and return their number.

        Args:
            starts: first row of each sequence in the batch. `counts`: number of its rows. `firsts`: position of its first row.
            out: receives the pieces, [pieces, N_PIECE].
        """
        n = len(starts)
        if int(counts.max()) == 1:
            if int(firsts.max()) < SEGMENT:  # decode with short contexts has short steps, so it gets a short cut here
                out[:n] = _ONE_ROW
                out[:n, PIECE_ROW] = starts
                return n
        else:
            starts, counts, firsts = self._tiles(starts, counts, firsts)
            n = len(starts)
        segments = (firsts + counts - 1) // SEGMENT + 1
        work = counts * segments
        if n > 1:
            order = np.argsort(work, kind="stable")
            starts, counts, segments, work = starts[order], counts[order], segments[order], work[order]
        out[:n, PIECE_ROW], out[:n, PIECE_ROWS], out[:n, PIECE_START], out[:n, PIECE_STOP], out[:n, PIECE_OF] = (
            starts,
            counts,
            0,
            segments,
            1,
        )
        if self.threads > 1 and n * self.kv_heads < TASKS_A_THREAD * self.threads * 8 and segments[-1] > 1:
            return self._split(work, out, n)
        return n

    def _tiles(self, starts: Int32, counts: Int32, firsts: Int32) -> tuple[Int32, Int32, Int32]:
        """Cut sequences into tiles of rows. Returns starts, counts and first positions of the tiles."""
        most = int(counts.max())
        rows = max(1, self.most_queries // self.group)
        while (
            rows > 1
            and rows * self.group > FEWEST_QUERIES
            and int((-(-counts // rows)).sum()) * self.kv_heads < TASKS_A_THREAD * self.threads
        ):
            rows = -(-rows // 2)
        if most <= rows:
            return starts, counts, firsts
        tiles = -(-counts // rows)
        within = (np.arange(int(tiles.sum()), dtype=np.int32) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * rows
        taken = np.minimum(rows, np.repeat(counts, tiles) - within)
        return (
            (np.repeat(starts, tiles) + within).astype(np.int32),
            taken.astype(np.int32),
            (np.repeat(firsts, tiles) + within).astype(np.int32),
        )

    def _split(self, work: Int32, out: Int32, n: int) -> int:
        """Cut tiles of the first `n` by their segments if one would take a thread longer than the others have work. Returns the number of pieces."""
        fair = max(1, int(work.sum()) * self.kv_heads // (TASKS_A_THREAD * self.threads))
        whole = out[:n].copy()
        at = used = split = 0
        for tile, units in zip(whole, work.tolist(), strict=True):
            segments, needed = int(tile[PIECE_STOP]), units
            pieces = min(segments, -(-units // fair))
            if pieces == 1 or used + needed > self.split_records:
                out[at] = tile
                at += 1
                continue
            length = -(-segments // pieces)
            for start in range(0, segments, length):
                out[at] = tile
                out[at, [PIECE_START, PIECE_STOP, PIECE_OF]] = start, min(segments, start + length), -(-segments // length)
                out[at, [PIECE_RECORDS, PIECE_TILE]] = used, split
                at += 1
            used, split = used + needed, split + 1
        return at
