"""The KV of live sequences that stages lack after a loss, and the batches that give it to them: computed anew from their ids, on the paths that their
positions had. Nothing is drawn from them.

Laws:
- A stage that took part in the route before holds what it held; one that is new holds nothing. A block that several sequences share is computed once.
- A batch goes through every stage before the last that lacks rows, and is computed by all of them. One that is on its way when the route breaks was
  run by some stages and not by others: rows count as there once it is back.
- What went to the first stage comes from the journal, where that has it, in memory and within a budget of bytes: the block that was begun first is
  dropped first. Else this node computes its own layers anew.

Shapes: T rows of a batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np
import numpy.typing as npt

from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.core.model import LayerRange
from paceline.engine.executor import HeldSequence, Path, SequenceStep, StepBatch
from paceline.engine.local import BlockTables, WireBits, blocks_for
from paceline.ways.pipeline.executor.stage import StageBatch


@dataclass(frozen=True, slots=True)
class Restored:
    """A sequence whose first rows are there."""

    held: HeldSequence
    there: int
    """0: its table is not, either."""


def restoring_batches(lacking: Sequence[Restored], block_size: int, max_rows: int, next_id: Callable[[], BatchId]) -> Iterator[StepBatch]:
    """Batches of the rows that are not there, in the order of the sequences."""
    done: set[BlockId] = set()
    """Blocks that earlier batches fill."""
    now: set[BlockId] = set()
    """Blocks that this one does."""
    steps: list[SequenceStep] = []
    released: list[SequenceId] = []

    def batch() -> StepBatch:
        made = StepBatch(next_id(), tuple(steps), tuple(released))
        done.update(now)
        now.clear()
        steps.clear()
        released.clear()
        return made

    for one in lacking:
        held, at = one.held, one.there
        n = len(held.token_ids)
        if not now.isdisjoint(held.blocks):
            yield batch()
        done.update(held.blocks[: at // block_size])
        if not at:
            # Its last row at least is computed, so that there is a table.
            shared = next((place for place, block in enumerate(held.blocks) if block not in done), len(held.blocks))
            at = min(shared, (n - 1) // block_size) * block_size
        first = at
        while at < n:
            room = max_rows - sum(len(step.token_ids) for step in steps)
            if not room or (steps and steps[-1].sequence == held.sequence):
                yield batch()
                room = max_rows
            path = Path.PROMPT if at < held.n_prompt else Path.GENERATED
            stop = min(at + room, held.n_prompt if path is Path.PROMPT else n, n)
            begins = at == first and not one.there
            known = 0 if begins else blocks_for(at, block_size)
            step = SequenceStep(held.sequence, 0, held.token_ids[at:stop], at, path, held.blocks[known : blocks_for(stop, block_size)], ())
            steps.append(step)
            if begins:
                released.append(held.sequence)
            now.update(held.blocks[at // block_size : stop // block_size])
            at = stop
    if steps:
        yield batch()


class Journal:
    """By block, as KV is: sequences that begin alike share the rows as they share the blocks."""

    def __init__(self, most_bytes: int, block_size: int, width: int) -> None:
        self._size, self._width = block_size, width
        self._most = most_bytes // (2 * block_size * width)
        """Blocks."""
        self._tables = BlockTables()
        self._rows: dict[int, npt.NDArray[np.uint16]] = {}
        """Insertion order is the order of dropping."""
        self._filled: dict[int, int] = {}
        """Rows of each block that are there, from its first on."""

    @property
    def n_bytes(self) -> int:
        return 2 * self._size * self._width * len(self._rows)

    def note(self, batch: StepBatch, x_TD: WireBits) -> None:
        size, row = self._size, 0
        self._tables.update(batch, size)
        for step in batch.steps:
            table = self._tables.of([step.sequence])[0]
            at, stop = step.first_position, step.first_position + len(step.token_ids)
            while at < stop:
                block, offset = int(table[at // size]), at % size
                n = min(size - offset, stop - at)
                if self._begun(block, offset):
                    self._rows[block][offset : offset + n] = x_TD[row : row + n]
                    self._filled[block] = offset + n
                row, at = row + n, at + n

    def has(self, blocks: Sequence[BlockId], n_tokens: int) -> bool:
        """Whether all rows of a sequence's first tokens are there, which these blocks hold."""
        size = self._size
        return all(self._filled.get(block, 0) >= min(size, n_tokens - size * place) for place, block in enumerate(blocks))

    def rows(self, blocks: Sequence[BlockId], start: int, stop: int) -> WireBits:
        """Of positions [start, stop) of a sequence that holds these blocks. They must be there."""
        size, found = self._size, list[WireBits]()
        while start < stop:
            offset = start % size
            n = min(size - offset, stop - start)
            found.append(self._rows[blocks[start // size]][offset : offset + n])
            start += n
        return np.concatenate(found)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """What these hold now came otherwise than through the first stage."""
        for block in blocks:
            self._rows.pop(block, None)
            self._filled.pop(block, None)

    def _begun(self, block: int, offset: int) -> bool:
        """Whether a row belongs here: its block begins with it, or all rows before it are there."""
        if offset:
            return self._filled.get(block, 0) >= offset
        if not self._most:
            return False
        rows = self._rows.pop(block, None)
        if rows is None and len(self._rows) >= self._most:
            oldest = next(iter(self._rows))
            rows = self._rows.pop(oldest)
            del self._filled[oldest]
        self._rows[block] = np.empty((self._size, self._width), np.uint16) if rows is None else rows
        return True


class Lacks:
    """Which rows stages lack, from the loss until all is restored."""

    def __init__(self) -> None:
        self._new: set[LayerRange] = set()
        self._there: dict[LayerRange, dict[SequenceId, int]] = {}

    def begin(self, spans: Iterable[LayerRange]) -> None:
        """These layers' KV is lost, all of it."""
        for span in spans:
            self._new.add(span)
            self._there[span] = {}

    def there(self, span: LayerRange, held: HeldSequence) -> int:
        """Rows of a sequence that these layers hold, from its first on."""
        known = self._there.get(span, {})
        return known.get(held.sequence, 0 if span in self._new else len(held.token_ids))

    def note(self, span: LayerRange, sequence: SequenceId, rows: int) -> None:
        """So many are there, from the first on."""
        self._there.setdefault(span, {})[sequence] = rows

    def clear(self) -> None:
        """All that is of use is there."""
        if self._new or self._there:
            self._new.clear()
            self._there.clear()


@dataclass(frozen=True, slots=True)
class RestoringStep:
    """A batch, and what goes to the first stage."""

    batch: StepBatch
    bits_TD: WireBits | None
    """None: it is to be computed."""


class Restoring:
    """Of one route.

    Args:
        held: what live sequences held, the oldest first.
        spans: of the other stages, in order.
    """

    def __init__(
        self,
        held: Sequence[HeldSequence],
        own: LayerRange,
        spans: Sequence[LayerRange],
        lacks: Lacks,
        block_size: int,
        max_rows: int,
        journal: Journal | None,
    ) -> None:
        self.sequences: Collection[SequenceId] = frozenset(each.sequence for each in held)
        self._held = {each.sequence: each for each in held}
        self._own, self._lacks, self._journal = own, lacks, journal
        lacking = [span for span in spans if any(lacks.there(span, each) < len(each.token_ids) for each in held)]
        self.fills_to = lacking[-1].stop if lacking else 0
        self._computing = [span for span in spans if span.stop <= self.fills_to]
        self._steps = self._all_steps(held, block_size, max_rows)

    def next(self) -> RestoringStep | None:
        """What is to be sent next; None: nothing is left."""
        step = next(self._steps, None)
        if step is not None:
            for each in step.batch.steps:
                for span in self._computing:
                    known = 0 if each.sequence in step.batch.released else self._lacks.there(span, self._held[each.sequence])
                    self._lacks.note(span, each.sequence, min(known, each.first_position))
                if step.bits_TD is None:
                    self._lacks.note(self._own, each.sequence, each.first_position + len(each.token_ids))
        return step

    def came(self, batch: StageBatch) -> None:
        for sequence, first, n_rows in zip(batch.sequences, batch.first_positions, batch.row_counts, strict=True):
            for span in self._computing:
                self._lacks.note(span, sequence, first + n_rows)

    def _all_steps(self, held: Sequence[HeldSequence], block_size: int, max_rows: int) -> Iterator[RestoringStep]:
        ids = count()
        for in_journal, alike in groupby(held, self._is_in_journal):
            restored = [Restored(each, self._there(each, in_journal)) for each in alike]
            lacking = [each for each in restored if each.there < len(each.held.token_ids)]
            for batch in restoring_batches(lacking, block_size, max_rows, lambda: BatchId(next(ids))):
                yield RestoringStep(batch, self._journalled(batch) if in_journal else None)

    def _there(self, held: HeldSequence, in_journal: bool) -> int:
        spans = self._computing if in_journal else [self._own, *self._computing]
        return min((self._lacks.there(span, held) for span in spans), default=len(held.token_ids))

    def _is_in_journal(self, held: HeldSequence) -> bool:
        n = len(held.token_ids)
        if self._journal is None or self._lacks.there(self._own, held) < n:
            return False
        return self._journal.has(held.blocks, n)

    def _journalled(self, batch: StepBatch) -> WireBits:
        assert self._journal is not None, "it has the rows"
        return np.concatenate(
            [
                self._journal.rows(self._held[each.sequence].blocks, each.first_position, each.first_position + len(each.token_ids))
                for each in batch.steps
            ]
        )
