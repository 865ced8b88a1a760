"""Answers a set of prompts at once, and says what came and how fast.

A rate counts the time in which nothing but answers is made: from the moment the last sequence has its first token until the end of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats
from paceline.machine.timing import StepsRequests, steps

GRAM = 8
"""Tokens of the pieces by which a text that goes round in circles is known."""
LEAST_DISTINCT = 0.5


class MeasuredEngine(StepsRequests, Protocol):
    """What is needed of an engine."""

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class DraftTally:
    """What was done, and in what time. Adds up."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    blocks: int = 0
    """Drafts that were verified, the tokens in them, and those of them that were right."""
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftTally) -> DraftTally:
        return DraftTally(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.steps + other.steps,
            self.blocks + other.blocks,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    @property
    def per_s(self) -> float:
        """Tokens a second; 0 of nothing."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


Answers = list[tuple[int, ...]]


def answer_all(
    engine: MeasuredEngine, prompts: Sequence[tuple[int, ...]], draft: str, max_tokens: Sequence[int], clock: Clock
) -> tuple[Answers, DraftTally]:
    """Answer greedily, ends of sequence honoured.

    Args:
        engine: idle.
        draft: as `GenerationRequest` has it.
        max_tokens: of each prompt's answer.

    Raises:
        PacelineError: a sequence ended otherwise than by its own end or its length.
    """
    names = [RequestId(f"draft-{place}") for place in range(len(prompts))]
    answers: dict[RequestId, list[int]] = {name: [] for name in names}
    arrivals: dict[RequestId, list[float]] = {name: [] for name in names}
    greedy = SamplingParams(temperature=0.0)
    requests = [
        GenerationRequest(name, prompt, most, greedy, draft=draft) for name, prompt, most in zip(names, prompts, max_tokens, strict=True)
    ]
    before = engine.stats()
    for now_s, chunks in steps(engine, requests, clock, (FinishReason.LENGTH, FinishReason.STOP)):
        for chunk in chunks:
            answers[chunk.request_id] += chunk.token_ids
            arrivals[chunk.request_id] += [now_s] * len(chunk.token_ids)
    after = engine.stats()
    begin = max(times[0] for times in arrivals.values())
    end = max(times[-1] for times in arrivals.values())
    tally = DraftTally(
        sum(at > begin for times in arrivals.values() for at in times),
        end - begin,
        after.steps - before.steps,
        sum(after.draft_blocks.values()) - sum(before.draft_blocks.values()),
        sum(after.drafted_tokens.values()) - sum(before.drafted_tokens.values()),
        sum(after.accepted_tokens.values()) - sum(before.accepted_tokens.values()),
    )
    return [tuple(answers[name]) for name in names], tally


def loops(token_ids: Sequence[int]) -> bool:
    """Whether an answer goes round in circles: any drafter would guess it, so it says nothing."""
    grams = [tuple(token_ids[start : start + GRAM]) for start in range(len(token_ids) - GRAM + 1)]
    return bool(grams) and len({*grams}) < LEAST_DISTINCT * len(grams)
