"""How fast this machine runs a model, measured once by a short run when it is loaded, and kept.

Law: a figure belongs to (digest, weights format, numerics id, threads): change one and it is measured anew. So it is where other programs
were busy, and then the better counts. The run takes about a second, on the runner that will serve, before it serves, and leaves nothing
behind. `paceline bench` measures better, and takes longer.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.clock import Clock
from paceline.core.text import Vocabulary
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.engine.sampling import Sampler
from paceline.machine.devices import is_disturbed
from paceline.machine.timing import PromptMaker, Sampled, StepsRequests, drive
from paceline.store.home import Home, read_json_object, write_cache

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
