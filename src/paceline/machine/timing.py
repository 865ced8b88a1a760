"""What a run's time stamps say: rates and waits. Pure arithmetic, one definition of each number for every bench and every engine.

Decode rate = (n - 1) / (t_last - t_first): the first token belongs to the prompt. Aggregate = all generated tokens / wall time, prompts
included. Total decode counts only while every sequence decodes, so that neither prompts nor stragglers blur it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


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
