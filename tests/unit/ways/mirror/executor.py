"""Runs every batch twice and compares."""

from __future__ import annotations

from typing import Any

from paceline.core.errors import ShardCorrupt
from paceline.core.ids import BatchId
from paceline.engine.executor import StepBatch, StepOutput
from paceline.engine.local import LocalExecutor


class MirrorExecutor(LocalExecutor):
    """The first of two executors, with the second beside it.

    Raises:
        ShardCorrupt: on `collect`, where they differ in a bit.
    """

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__(one)
        self._other = LocalExecutor(other)

    def submit(self, batch: StepBatch) -> None:
        super().submit(batch)
        self._other.submit(batch)

    def collect(self, deadline: float) -> StepOutput | None:
        mine, theirs = super().collect(deadline), self._other.collect(deadline)
        if mine is None or theirs is None:
            return None
        if mine.logits_RV.tobytes() != theirs.logits_RV.tobytes():
            raise ShardCorrupt(f"Batch {mine.batch_id} has other bytes on the second node")
        return mine

    def recall(self, batch_id: BatchId) -> None:
        super().recall(batch_id)
        self._other.recall(batch_id)

    def reset(self) -> None:
        super().reset()
        self._other.reset()

    def close(self) -> None:
        super().close()
        self._other.close()
