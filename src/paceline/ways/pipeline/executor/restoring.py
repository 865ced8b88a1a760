"""What stages of a route lack of live sequences' KV after a loss, and the batches that give it to them.

Laws:
- A stage that took part in the route before holds what it held; one that is new holds nothing.
- A batch goes through every stage before the last that lacks rows, and is computed by all of them. One that is on its way when the route breaks was run by
  some stages and not by others: rows count as there once it is back.
- What went to the first stage comes from the journal, where that has it; else this machine computes its own layers anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np

from paceline.core.ids import BatchId, SequenceId
from paceline.core.model import LayerRange
from paceline.engine.executor import HeldSequence, StepBatch
from paceline.engine.local import WireBits
from paceline.engine.restoring import Restored, restoring_batches
from paceline.ways.pipeline.executor.journal import Journal
from paceline.ways.pipeline.executor.stage_batch import StageBatch


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
        own: layers of this machine, maybe none.
        spans: of the other stages, in order.
        max_rows: of a batch.
        journal: None: there is none.
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
        """A batch is back."""
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
