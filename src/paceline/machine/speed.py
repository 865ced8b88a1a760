"""How fast this machine runs a model, measured once by a short run when it is loaded, and kept.

Law: a figure belongs to (digest, weights format, numerics id, threads): change one and it is measured anew. So it is where other programs
were busy, and then the better counts. The run takes about a second, on the runner that will serve, before it serves, and leaves nothing
behind. `paceline bench` measures better, and takes longer.

Requests are driven through an engine side by side, and timed: what every measurement of a speed begins with. Each number has one definition, for every bench
and every engine. Decode rate = (n - 1) / (t_last - t_first): the first token belongs to the prompt. Aggregate = all generated tokens / wall time, prompts
included. Total decode counts only while every sequence decodes, so that neither prompts nor stragglers blur it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.text import Vocabulary
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.engine.sampling import Sampler
from paceline.machine.devices import is_disturbed
from paceline.machine.settings import Sampled
from paceline.store.home import Home, read_json_object, write_cache


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


BUDGET_S = 0.4
"""What the decode run and the prefill run should take each."""
LEAST_TOKENS, MOST_TOKENS = 4, 64
LEAST_PROMPT, MOST_PROMPT = 32, 512
_SEED = 7
"""Other prompts than a bench's."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was seen of a model when it was loaded. Tokens a second."""

    tokens_per_second: float
    prefill_tokens_per_second: float
    numerics_id: str
    holds_identity: bool
    vocabulary: str
    disturbed: bool = False
    """Other programs were busy: it may be faster."""


@dataclass(frozen=True, slots=True)
class SpeedKey:
    """What a figure belongs to, besides the numerics id."""

    digest: str
    weights: str
    threads: int
    ranks: tuple[float, ...] = (1.0,)
    """Speeds of the tensor ranks that share the layers; below 0 of those on other machines."""


class SpeedCache:
    """Speeds kept under a home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def find(self, key: SpeedKey, numerics_id: str | None = None) -> Speed | None:
        """What was measured: with these numerics, or as the model was last loaded."""
        kept = read_json_object(self._path(key)) or {}
        last = kept.get("last") if numerics_id is None else numerics_id
        speeds: object = kept.get("speeds")
        return _speed(speeds.get(last)) if isinstance(speeds, dict) and isinstance(last, str) else None

    def keep(self, key: SpeedKey, speed: Speed) -> None:
        """Remember, as the last way the model was loaded."""
        kept = read_json_object(self._path(key)) or {}
        before: object = kept.get("speeds")
        speeds: dict[str, Any] = before if isinstance(before, dict) else {}
        said = {"last": speed.numerics_id, "speeds": {**speeds, speed.numerics_id: asdict(speed)}}
        write_cache(self._path(key), json.dumps(said).encode())

    def _path(self, key: SpeedKey) -> Path:
        name = hashlib.sha256(json.dumps(asdict(key)).encode()).hexdigest()[:40]
        return self._home.speeds / f"{name}.json"


def learn_speed(
    home: Home,
    key: SpeedKey,
    runner: LayerRunner[Any],
    vocabulary: Vocabulary,
    config: EngineConfig,
    clock: Clock,
    sampler: Sampler,
) -> Speed:
    """The speed of a model just loaded: as it was measured before, or measured now.

    Args:
        runner: what will serve; nothing runs on it yet.
    """
    cache = SpeedCache(home)
    speed = cache.find(key, runner.numerics_id)
    if speed is None or speed.disturbed:
        before = (speed.tokens_per_second, speed.prefill_tokens_per_second) if speed is not None else (0.0, 0.0)
        disturbed = is_disturbed()
        now = measure(Engine(LocalExecutor(runner), vocabulary, config, clock, sampler=sampler), vocabulary, config.max_context, clock)
        decode, prefill = map(max, before, now)
        speed = Speed(decode, prefill, runner.numerics_id, runner.holds_identity, vocabulary_id(vocabulary), disturbed)
    cache.keep(key, speed)
    return speed


def measure(engine: StepsRequests, vocabulary: Vocabulary, max_context: int, clock: Clock) -> tuple[float, float]:
    """(decode, prefill) in tokens a second of one sequence. Longer runs where the model is faster."""
    prompts = PromptMaker(vocabulary, _SEED)

    def run(prompt: int, answer: int) -> tuple[float, float]:
        answer = max(2, min(answer, max_context - 1))
        prompt = max(1, min(prompt, max_context - answer))
        timing = drive(engine, prompts.make(1, prompt), answer, clock, Sampled.DEFAULT)
        return timing.sequence_decode_per_s, timing.prefill_per_s(prompt)

    first, _ = run(8, LEAST_TOKENS)  # also warms up
    if not math.isfinite(first):
        return 0.0, 0.0  # a clock too coarse to say
    decode, _ = run(16, min(max(int(first * BUDGET_S), LEAST_TOKENS), MOST_TOKENS))
    # A prompt's tokens run several at a time; as many of them as would be decoded in that time is a safe length.
    length = min(max(int(4 * first * BUDGET_S), LEAST_PROMPT), MOST_PROMPT)
    _, prefill = run(length, 2)
    return (decode if math.isfinite(decode) else 0.0), (prefill if math.isfinite(prefill) else 0.0)


def vocabulary_id(vocabulary: Vocabulary) -> str:
    """Hash of the tokens' bytes, in order: with equal ones, a token means the same to two models."""
    digest = hashlib.sha256()
    for token_id in range(vocabulary.size):
        spelled = vocabulary.token_bytes(token_id)
        digest.update(len(spelled).to_bytes(4, "little") + spelled)
    for token_id in sorted(vocabulary.eos_ids):
        digest.update(token_id.to_bytes(4, "little"))
    return digest.hexdigest()[:32]


def _speed(kept: object) -> Speed | None:
    """A speed as it was written; None for anything else."""
    if not isinstance(kept, dict) or kept.keys() != set(Speed.__slots__):
        return None
    said: dict[str, Any] = kept
    texts = (said["numerics_id"], said["vocabulary"])
    rates = (said["tokens_per_second"], said["prefill_tokens_per_second"])
    sound = all(isinstance(text, str) for text in texts) and all(isinstance(rate, int | float) and 0 <= rate < 1e9 for rate in rates)
    return Speed(**said) if sound and isinstance(said["holds_identity"], bool) and isinstance(said["disturbed"], bool) else None
