"""Reports progress through prompts: a notice now and then for a prompt that takes long, and totals for all prompts."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.core.generation import PROMPT_PROGRESS, GenerationChunk, Notice
from paceline.engine.executor import SequenceStep
from paceline.engine.sequence import Phase, SequenceState

NOTICE_INTERVAL_S = 2.0
"""Seconds between two notices of one prompt, and before the first. Lowering it: prompts that are read quickly get notices too."""


class PromptProgress:
    """The prompts of one engine that have no answer yet. The first sequence of a request stands for all of its sequences."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s: dict[SequenceState, float] = {}
        """Monotonic time at which the next notice of a prompt is due."""
        self._n_read: dict[SequenceState, int] = {}
        """Tokens read, after the last collected step."""

    def begin(self, seq: SequenceState) -> None:
        """Watch a prompt until `end`."""
        self._due_s[seq] = self._clock.monotonic() + NOTICE_INTERVAL_S

    def end(self, seq: SequenceState) -> None:
        """Forget a prompt that was read, or a sequence that ended before that."""
        self._due_s.pop(seq, None)
        self._n_read.pop(seq, None)

    def collected(self, steps: Iterable[tuple[SequenceState, SequenceStep]]) -> list[GenerationChunk]:
        """Record the tokens that a batch read, and return the notices that are due."""
        if not self._due_s:
            return []
        now_s, told = self._clock.monotonic(), list[GenerationChunk]()
        for seq, step in steps:
            due_s = self._due_s.get(seq)
            if due_s is None or step.epoch != seq.epoch:
                continue
            n_read = self._n_read[seq] = step.first_position + len(step.token_ids)
            if now_s >= due_s and n_read < seq.n_prompt:
                self._due_s[seq] = now_s + NOTICE_INTERVAL_S
                notice = Notice(PROMPT_PROGRESS, {"tokens_read": n_read, "tokens": seq.n_prompt})
                told.append(GenerationChunk(seq.request.request_id, seq.index, (), "", notices=(notice,)))
        return told

    def totals(self) -> tuple[int, int]:
        """Return the tokens read, and all tokens, of the prompts that are being read."""
        reading = [seq for seq in self._due_s if seq.phase is Phase.RUNNING]
        n_read = [min(max(self._n_read.get(seq, 0), seq.cached_tokens or 0), seq.computed) for seq in reading]
        return sum(n_read), sum(seq.n_prompt for seq in reading)
