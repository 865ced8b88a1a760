"""An executor whose model says what it is told to: everything is computed, and then the logit of the wanted token is raised above all others.

So the speed of a small model is measured on text that only a large one would write. A row's wanted token depends on its position alone, as a
model's would where a draft is right; what stands behind a wrong one is not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.core.generation import Notice
from paceline.core.ids import BatchId, SequenceId
from paceline.engine.executor import Executor, HeldSequence, StepBatch, StepOutput

CERTAIN = 1e30
"""A logit above any model's, and finite."""


@dataclass(frozen=True, slots=True)
class Script:
    """What one sequence has to say."""

    first_position: int
    """Where its answer begins: the length of its prompt."""
    token_ids: tuple[int, ...]
    """With its end. What is asked for beyond it is its end again."""

    def at(self, position: int) -> int:
        """The token that stands there."""
        return self.token_ids[min(position - self.first_position, len(self.token_ids) - 1)]


class ForcedExecutor:
    """An `Executor` over another. Without scripts it is that one."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._scripts: Sequence[Script] = ()
        self._first: SequenceId | None = None
        self._pending: deque[StepBatch] = deque()

    def begin(self, scripts: Sequence[Script]) -> None:
        """Of the sequences that come from now on, in the order of their arrival; none: the model speaks for itself. Nothing may be live."""
        self._scripts, self._first = scripts, None

    @property
    def depth(self) -> int:
        return self._inner.depth

    @property
    def n_blocks(self) -> int:
        return self._inner.n_blocks

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    @property
    def one_path(self) -> bool:
        return self._inner.one_path

    @property
    def numerics_id(self) -> str:
        return self._inner.numerics_id

    @property
    def holds_identity(self) -> bool:
        return self._inner.holds_identity

    def ready(self) -> bool:
        return self._inner.ready()

    def restore(self, held: Sequence[HeldSequence]) -> Collection[SequenceId] | None:
        return self._inner.restore(held)

    def notices(self) -> Sequence[Notice]:
        return self._inner.notices()

    def submit(self, batch: StepBatch) -> None:
        if self._first is None and batch.steps:
            # Ids count up in the order of arrival, and who comes first is admitted first.
            self._first = min(step.sequence for step in batch.steps)
        self._pending.append(batch)
        self._inner.submit(batch)

    def recall(self, batch_id: BatchId) -> None:
        self._inner.recall(batch_id)

    @property
    def advanced(self) -> int:
        return self._inner.advanced

    def collect(self, deadline: float) -> StepOutput | None:
        output = self._inner.collect(deadline)
        batch = self._pending.popleft()
        if output is not None and self._scripts and self._first is not None:
            row = 0
            for step in batch.steps:
                script = self._scripts[step.sequence - self._first]
                for place in step.logits_rows:
                    output.logits_RV[row, script.at(step.first_position + place + 1)] = CERTAIN
                    row += 1
        return output

    def reset(self) -> None:
        self._pending.clear()
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()
