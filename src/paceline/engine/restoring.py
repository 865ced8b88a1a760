"""Batches that compute KV of live sequences anew, from their ids, on the paths that their positions had. Nothing is drawn from them.

A block that several sequences share is computed once: what comes later begins behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.engine.executor import HeldSequence, Path, SequenceStep, StepBatch
from paceline.engine.local import blocks_for


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
