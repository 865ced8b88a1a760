"""Requests driven through an engine side by side, and timed: what every measurement of a speed begins with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.text import Vocabulary
from paceline.machine.sampled import Sampled
from paceline.machine.timing import Timing


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
