"""Counters of an engine, and metrics as tables. Each package lists its rows, and one collector reads them when the page is scraped.

A row is a family's name, type, help and labels, and a function that reads its value from the package's source. A value is a number or a histogram, or a mapping
of them by label. Nothing is computed between scrapes. Times are counted by upper bound, which is cheap enough for every token.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

MOST_LABELS = 256
"""Labels with their own histogram in a node's life, at most. Raising it: more memory and a longer page; lowering it: more values share the label `rest`."""
_OF_ONE_ENGINE = frozenset({"max_context", "numerics_id", "steps_expected_s", "drafts_off", "step_seconds", "prefill_per_s"})


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of the engine at one moment."""

    waiting: int = 0
    running: int = 0
    max_context: int | None = None
    """Tokens of prompt and answer that one sequence may have with the KV memory there is now; None: the model's usual maximum."""
    numerics_id: str | None = None
    """Numerics id of what runs now; empty: no bytes are promised. None: as the model was loaded."""
    blocks_total: int = 0
    blocks_in_use: int = 0
    """Blocks held by live sequences; a block that only the prefix cache keeps is not in use."""
    blocks_cached: int = 0
    prefix_queries_tokens: int = 0
    """Prompt tokens looked up in the prefix cache since the start."""
    prefix_hits_tokens: int = 0
    prefix_fetched_tokens: int = 0
    """Prompt tokens with KV that was kept outside the cache (on disk or at another node) and brought back."""
    kept_blocks: dict[str, int] = field(default_factory=dict[str, int])
    """KV blocks kept outside the cache, or meant to be, counted by what became of them."""
    kept_bytes: int = 0
    """Bytes of KV kept there now, for all models."""
    reading_tokens_read: int = 0
    """Tokens read so far of the prompts that are being read."""
    reading_tokens: int = 0
    """All tokens of the prompts that are being read."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    steps_in_flight: int = 0
    steps_expected_s: float = 0.0
    """Expected seconds of the steps in flight, from how long steps took; 0: not known."""
    drafted_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Draft tokens that were verified, by what proposed them ("ngram", or the draft model's id)."""
    accepted_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Verified draft tokens that the model would have drawn itself: each saves a step."""
    draft_blocks: dict[str, int] = field(default_factory=dict[str, int])
    """Number of verified drafts, by what proposed them."""
    compared_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Draft tokens that were compared with the drawn token, verified or not, by what proposed them."""
    true_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Compared draft tokens that equalled the drawn token."""
    step_seconds: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds of a step without prompts, by its rows, where measured often enough."""
    prefill_per_s: float = 0.0
    """Prompt tokens a second, measured on steps with prompts; 0: not measured often enough."""
    drafts_off: bool = False
    """Drafting is off at present, because a machine that runs some of the layers gives other bytes for other batches."""
    finished: dict[str, int] = field(default_factory=dict[str, int])
    """Number of ended sequences, by finish reason."""

    def plus(self, other: EngineStats) -> EngineStats:
        """Return the sums of two engines' numbers, with the longer expected step time. The context, step times and prompt rates can't be added and are left
        out.
        """
        sums: dict[str, Any] = {}
        for name in (one.name for one in fields(self) if one.name not in _OF_ONE_ENGINE):
            mine, others = getattr(self, name), getattr(other, name)
            sums[name] = (
                {key: mine.get(key, 0) + others.get(key, 0) for key in {**mine, **others}} if isinstance(mine, dict) else mine + others
            )
        expected_s = max(self.steps_expected_s, other.steps_expected_s)
        return EngineStats(**sums, steps_expected_s=expected_s, drafts_off=self.drafts_off and other.drafts_off)

    @property
    def ended(self) -> EngineStats:
        """The counters that remain once the engine is gone; gauges are zero."""
        now = ("waiting", "running", "blocks_total", "blocks_in_use", "blocks_cached", "steps_in_flight", "kept_bytes")
        gauges = dict.fromkeys((*now, "reading_tokens_read", "reading_tokens"), 0)
        return replace(self, **gauges, max_context=None, numerics_id=None, steps_expected_s=0.0, drafts_off=False)


@dataclass(frozen=True, slots=True)
class DraftUse:
    """Results of one kind of drafts for a node's model."""

    by: str
    """The kind, as a request's `draft` names it."""
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Accepted draft tokens: each saves a step."""
    node_id: str = ""
    """The node that drafts at present; empty: prompt lookup, or no node."""
    model_id: str = ""
    blocks: int = 0
    """Draft blocks that proposers were asked for and delivered."""
    hop_s: float = 0.0
    """Average seconds from asking for such a block to its arrival."""
    failures: int = 0
    trouble: str = ""
    """Why a drafter is missing at present; empty: nothing is wrong."""


class Histogram:
    """Counts by upper bound. The one of prometheus-client takes a lock and a linear search for each observation."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum = 0.0
        """Sum of all observations."""

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` observations of `seconds` each."""
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self.sum += seconds * times

    @property
    def mean_s(self) -> float:
        """Mean of all observations, in seconds; 0 if there are none."""
        times = sum(self._counts)
        return self.sum / times if times else 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts by upper bound, with +Inf last."""
        bounds = (*map(str, self._bounds_s), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


Label = TypeVar("Label")


class LabelledHistograms(Generic[Label]):
    """A histogram for each label, up to `MOST_LABELS` labels; values of further labels are counted together. For any thread.

    Args:
        bounds: upper bounds of each histogram.
        rest: the label of the values beyond the limit.
    """

    def __init__(self, bounds: Sequence[float], rest: Label) -> None:
        self._bounds, self._rest = bounds, rest
        self._lock = threading.Lock()
        self._by_label: dict[Label, Histogram] = {}

    def observe(self, label: Label, value: float, times: int = 1) -> None:
        """Count `times` observations of a value."""
        with self._lock:
            known = label in self._by_label or len(self._by_label) < MOST_LABELS
            self._by_label.setdefault(label if known else self._rest, Histogram(self._bounds)).observe(value, times)

    def all(self) -> dict[Label, Histogram]:
        """Return the live histograms by label, not copies of them."""
        with self._lock:
            return dict(self._by_label)


Source = TypeVar("Source")
Read = Callable[[Source], float | Histogram | Mapping[Any, float | Histogram]]
"""Function that reads a value from the source. A mapping's keys are the label's value, or a tuple of the labels' values."""
Family = type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]


@dataclass(frozen=True, slots=True)
class Row(Generic[Source]):
    """One metric family of the page."""

    family: Family
    name: str
    documentation: str
    read: Read[Source]
    labels: tuple[str, ...] = ()


def counter(name: str, documentation: str, read: Read[Source], *labels: str) -> Row[Source]:
    """Return a row for a number that only grows; the page adds `_total` to its name."""
    return Row(CounterMetricFamily, name, documentation, read, labels)


def gauge(name: str, documentation: str, read: Read[Source], *labels: str) -> Row[Source]:
    """Return a row for a number that can rise and fall."""
    return Row(GaugeMetricFamily, name, documentation, read, labels)


def histogram(name: str, documentation: str, read: Read[Source], *labels: str) -> Row[Source]:
    """Return a row for a histogram."""
    return Row(HistogramMetricFamily, name, documentation, read, labels)


class Metrics(Collector, Generic[Source]):
    """The rows of one package, for `server.metrics.MetricsPage.add`.

    Args:
        source: returns the object that the rows are read from, once a scrape. None: there is none at present, and no family is shown.
    """

    def __init__(self, rows: Sequence[Row[Source]], source: Callable[[], Source | None]) -> None:
        self._rows, self._source = rows, source

    def describe(self) -> list[Metric]:
        """Return nothing, so that the registry takes the collector without a check of its names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each row."""
        source = self._source()
        if source is None:
            return
        for row in self._rows:
            family: Any = row.family(row.name, row.documentation, labels=row.labels)
            value = row.read(source)
            for labels, one in value.items() if isinstance(value, Mapping) else [((), value)]:
                names = [labels] if isinstance(labels, str) else list(map(str, labels))
                family.add_metric(names, *((one.buckets(), one.sum) if isinstance(one, Histogram) else (one,)))
            yield family
