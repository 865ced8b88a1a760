"""Engines over the null backend: what they answer, checked at every step, and what a request answers when it runs alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from tests.fakes.clock import FakeClock
from tests.fakes.executors import InOrderExecutor
from tests.fakes.null_backend import ByteVocabulary, NullRunner

from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, Notice, TokenLogprob
from paceline.core.ids import RequestId, SequenceId
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.drafts import DraftAnswer, DraftAsk
from paceline.engine.engine import Engine
from paceline.engine.kv_source import KvLoans, KvSource

VOCAB = 32
# Token 3 and 4 are halves of one character, 5 spells two letters: texts that lag behind their tokens.
VOCABULARY = ByteVocabulary(VOCAB, frozenset({0}), (b"", b"a", b"b", "é".encode()[:1], "é".encode()[1:], b"ab"))


@dataclass(slots=True)
class Answer:
    """What one sequence gave."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish: FinishReason | None = None
    error: str | None = None
    code: str | None = None
    notices: tuple[Notice, ...] = ()
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    chunks: int = 0


class EngineBench:
    """An engine, what runs under it, and all it said."""

    def __init__(
        self,
        *,
        n_blocks: int = 32,
        block_size: int = 4,
        depth: int = 1,
        one_path: bool = False,
        lose: Collection[int] = (),
        break_at: int | None = None,
        max_context: int = 64,
        max_running: int = 8,
        max_waiting: int = 64,
        prefill_chunk: int = 8,
        max_guesses: int = 64,
        prefix_cache: bool = True,
        max_losses: int = 8,
        drafting: DraftingConfig | None = None,
        clock: FakeClock | None = None,
        restores: bool = False,
        wait: Callable[[float], object] | None = None,
        kv: Callable[[NullRunner], KvSource] | None = None,
        loans: KvLoans | None = None,
        model_digest: str = "",
        kv_check_every: int = 512,
    ) -> None:
        self._loans = loans or KvLoans()
        self.wait = wait or (lambda seconds: self.clock.advance(1000 * seconds))
        self.runner = NullRunner(n_blocks=n_blocks, block_size=block_size, vocab=VOCAB, one_path=one_path)
        self.executor = InOrderExecutor(self.runner, depth, lose, break_at, restores=restores)
        config = self.config = EngineConfig(
            max_context=max_context,
            max_running=max_running,
            max_waiting=max_waiting,
            prefill_chunk=prefill_chunk,
            max_guesses=max_guesses,
            prefix_cache=prefix_cache,
            max_losses=max_losses,
            model_digest=model_digest,
            kv_check_every=kv_check_every,
        )
        seeds = count(1000)
        self.clock = clock or FakeClock()
        self.engine = Engine(self.executor, VOCABULARY, config, self.clock, entropy=lambda: next(seeds), drafting=drafting, wait=self.wait,
            kv=None if kv is None else kv(self.runner), loans=loans,
        )  # fmt: skip
        self.answers: dict[tuple[RequestId, int], Answer] = {}

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self) -> list[GenerationChunk]:
        chunks = self.engine.step()
        self.engine.check_invariants()
        self.read(chunks)
        return chunks

    def read(self, chunks: Iterable[GenerationChunk]) -> None:
        for chunk in chunks:
            answer = self.answers.setdefault((chunk.request_id, chunk.index), Answer())
            assert answer.finish is None, "a chunk followed the end"
            ended = chunk.finish_reason is FinishReason.STOP  # by a token that has no entry, or by a text
            assert len(chunk.logprobs) in {0, len(chunk.token_ids), len(chunk.token_ids) - ended}
            answer.token_ids += chunk.token_ids
            answer.text += chunk.text
            answer.logprobs += chunk.logprobs
            answer.finish, answer.error, answer.code = chunk.finish_reason, chunk.error, chunk.code
            answer.notices += chunk.notices
            answer.cached_tokens += chunk.cached_tokens
            answer.chunks += 1

    def run(self, *requests: GenerationRequest) -> dict[tuple[RequestId, int], Answer]:
        self.add(*requests)
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to rest"
        self.check_rest()
        return self.answers

    def check_rest(self) -> None:
        self.engine.check_invariants()
        stats = self.engine.stats()
        lent = {block for loan in self._loans.out for block in loan.blocks.values()}  # another thread may still read them
        assert (stats.running, stats.waiting, stats.blocks_in_use) == (0, 0, len(lent))


def answer_alone(request: GenerationRequest, index: int = 0, *, one_path: bool = False) -> Answer:
    """What sequence `index` of a request answers on an engine of its own, without prefix cache and with room for all."""
    seed = request.sampling.seed
    sampling = replace(request.sampling, seed=None if seed is None else seed + index)
    bench = EngineBench(n_blocks=80, max_context=256, prefill_chunk=1000, prefix_cache=False, one_path=one_path)
    return bench.run(replace(request, n=1, sampling=sampling))[request.request_id, 0]


class UnsteadySource:
    """A `DraftSource` that holds the engine to its side: what it is told of a sequence has no gap.

    Args:
        truth: prompt and answer of a sequence.
        chance: decides everything.
        vocabulary: token ids below this are tokens.
    """

    def __init__(self, truth: Callable[[SequenceId], Sequence[int]], chance: random.Random, vocabulary: int) -> None:
        self.expected_s: float | None = 0.001
        self.told: dict[SequenceId, list[int]] = {}
        self.asks = 0
        self.block = 8
        self._truth, self._chance, self._vocabulary = truth, chance, vocabulary
        self._due: deque[tuple[DraftAsk, int]] = deque()

    def ask(self, ask: DraftAsk) -> None:
        self.asks += 1
        told = self.told.setdefault(ask.sequence, [])
        assert 0 <= ask.first_position <= len(told), "a source is told of tokens behind a gap"
        told[ask.first_position :] = ask.token_ids
        assert told, "a source is asked to go on behind nothing"
        self._due.append((ask, len(told)))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        n = len(self._due) if wait_s else self._chance.randrange(len(self._due) + 1)
        due = [self._due.popleft() for _ in range(n)]
        return [DraftAnswer(ask.sequence, position, self._drafted(ask, position)) for ask, position in due]

    def forget(self, sequence: SequenceId) -> None:
        self.told.pop(sequence, None)

    def _drafted(self, ask: DraftAsk, position: int) -> Sequence[int]:
        kind = self._chance.random()
        if kind < 0.1:
            return ()
        if kind < 0.2:
            return [self._chance.choice((-1, self._vocabulary, 1 << 40)) for _ in range(ask.length)]
        if ask.sequence not in self.told:
            return (1,) * ask.length
        right = list(self._truth(ask.sequence)[position : position + ask.length])
        for place in range(len(right)):
            if self._chance.random() < 0.1:
                right[place] = self._chance.randrange(self._vocabulary)
        return right
