"""What a run's time stamps say: rates and waits. Pure arithmetic, one definition of each number for every bench and every engine.

Decode rate = (n - 1) / (t_last - t_first): the first token belongs to the prompt. Aggregate = all generated tokens / wall time, prompts
included. Total decode counts only while every sequence decodes, so that neither prompts nor stragglers blur it.

Named ways to draw, for benchmarks.

Requests driven through an engine side by side, and timed: what every measurement of a speed begins with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from random import Random
from statistics import median
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.text import Vocabulary


class Sampled(StrEnum):
    """How the tokens of a bench are drawn."""

    GREEDY = "greedy"
    DEFAULT = "default"
    """As the API draws what says nothing of it: at temperature 1."""
    QWEN3 = "qwen3"
    """As Qwen3's makers recommend: temperature 0.7, top-p 0.8, top-k 20."""

    @property
    def params(self) -> SamplingParams:
        match self:
            case Sampled.GREEDY:
                return SamplingParams(temperature=0.0)
            case Sampled.DEFAULT:
                return SamplingParams(seed=0)
            case Sampled.QWEN3:
                return SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Time stamps of one run: all sequences asked for at once, every one of the same length."""

    started_s: float
    """Just before the first request was handed over."""
    arrivals_s: tuple[tuple[float, ...], ...]
    """For each sequence, when each of its tokens was there. Never empty."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.arrivals_s))

    @property
    def ended_s(self) -> float:
        return max(times[-1] for times in self.arrivals_s)

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def aggregate_per_s(self) -> float:
        """Generated tokens over wall time, prompts included."""
        return self.tokens / self.wall_s

    @property
    def sequence_decode_per_s(self) -> float:
        """Median over the sequences of (n - 1) / (t_last - t_first). NaN for answers of one token."""
        rates = [(len(times) - 1) / (times[-1] - times[0]) for times in self.arrivals_s if times[-1] > times[0]]
        return median(rates) if rates else math.nan

    @property
    def total_decode_per_s(self) -> float:
        """Tokens a second, of all sequences, from the moment the last one has its first token until the first one ends.

        NaN where there is no such span: answers of one token, or sequences that ran one after another.
        """
        begin = max(times[0] for times in self.arrivals_s)
        end = min(times[-1] for times in self.arrivals_s)
        if end <= begin:
            return math.nan
        return sum(begin < at <= end for times in self.arrivals_s for at in times) / (end - begin)

    @property
    def first_token_s(self) -> tuple[float, ...]:
        """Each sequence's time to first token."""
        return tuple(times[0] - self.started_s for times in self.arrivals_s)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies, all sequences together."""
        return tuple(after - before for times in self.arrivals_s for before, after in pairwise(times))

    def prefill_per_s(self, prompt_tokens: int) -> float:
        """Prompt tokens of all sequences over the time until the last one has its first token."""
        return prompt_tokens * len(self.arrivals_s) / max(self.first_token_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all are not above (nearest rank). NaN of nothing."""
    if not values:
        return math.nan
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a latency, in milliseconds."""

    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Percentiles of times given in seconds."""
        return cls(*(1000 * percentile(seconds, percent) for percent in (50, 90, 99)))


class StepsRequests(Protocol):
    """What is needed of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: GenerationRequest) -> None: ...
    def step(self) -> list[GenerationChunk]: ...


class PromptMaker:
    """Prompts of an exact number of tokens: random ones that stand for text, never the same prompt twice in a bench."""

    def __init__(self, vocabulary: Vocabulary, seed: int = 0) -> None:
        self._random = Random(seed)
        self._ids = [token for token in range(vocabulary.size) if token not in vocabulary.eos_ids and vocabulary.token_bytes(token)]

    def make(self, count: int, length: int) -> list[tuple[int, ...]]:
        return [tuple(self._random.choices(self._ids, k=length)) for _ in range(count)]


def steps(
    engine: StepsRequests, requests: Sequence[GenerationRequest], clock: Clock, ends: Collection[FinishReason] = (FinishReason.LENGTH,)
) -> Iterator[tuple[float, list[GenerationChunk]]]:
    """Answer requests side by side: each step's chunks, and when they were there.

    Raises:
        PacelineError: a sequence ended otherwise than by one of `ends`.
    """
    for request in requests:
        engine.add(request)
    while engine.has_work:
        chunks = engine.step()
        now_s = clock.monotonic()
        for chunk in chunks:
            if chunk.finish_reason is not None and chunk.finish_reason not in ends:
                raise PacelineError(f"{chunk.request_id} ended by {chunk.finish_reason}: {chunk.error or 'no error was given'}")
        yield now_s, chunks


def drive(
    engine: StepsRequests, prompts: Sequence[tuple[int, ...]], answer_tokens: int, clock: Clock, sampling: Sampled = Sampled.GREEDY
) -> Timing:
    """Answer all prompts at once, in exactly `answer_tokens` tokens each, and note when each token was there.

    Raises:
        PacelineError: a sequence ended otherwise than by its length.
    """
    requests = [
        GenerationRequest(
            RequestId(f"bench-{number}"),
            prompt,
            answer_tokens,
            sampling.params,
            ignore_eos=True,
            draft="off",
        )
        for number, prompt in enumerate(prompts)
    ]
    arrivals: dict[RequestId, list[float]] = {request.request_id: [] for request in requests}
    started_s = clock.monotonic()
    for now_s, chunks in steps(engine, requests, clock):
        for chunk in chunks:
            arrivals[chunk.request_id].extend([now_s] * len(chunk.token_ids))
    for request_id, times in arrivals.items():
        if len(times) != answer_tokens:
            raise PacelineError(f"{request_id} got {len(times)} tokens where {answer_tokens} were asked for")
    return Timing(started_s, tuple(tuple(times) for times in arrivals.values()))
