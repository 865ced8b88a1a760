"""What an engine counts, as metrics and status show it, and metrics as data: each package lists its rows, and one collector reads them when the page is
scraped. A row is a family's name, type, help and labels, and a function that reads its value from the package's source: a number or a histogram, or, by
label, a mapping of them. Nothing is computed between scrapes.

Times are counted by upper bound, cheap enough for every token.
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
"""That have a histogram of their own in a node's life."""
_OF_ONE_ENGINE = frozenset({"max_context", "steps_expected_s", "drafts_off", "step_seconds", "prefill_per_s"})


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of the engine at one moment."""

    waiting: int = 0
    running: int = 0
    max_context: int | None = None
    """Tokens of prompt and answer that one sequence may have with the KV memory there is now; None: as the model is served."""
    blocks_total: int = 0
    blocks_in_use: int = 0
    """Held by live sequences; a block that only the prefix cache keeps is not in use."""
    blocks_cached: int = 0
    prefix_queries_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, in all."""
    prefix_hits_tokens: int = 0
    prefix_fetched_tokens: int = 0
    """Prompt tokens whose KV was kept elsewhere, and was brought back."""
    kept_blocks: dict[str, int] = field(default_factory=dict[str, int])
    """KV blocks that were kept elsewhere, or were to be, by what became of them."""
    kept_bytes: int = 0
    """What is kept there now, of all models."""
    reading_tokens_read: int = 0
    """Tokens that were read of the prompts being read now..."""
    reading_tokens: int = 0
    """...and all of their tokens."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    steps_in_flight: int = 0
    steps_expected_s: float = 0.0
    """What those in flight take, by how long steps took; 0: not known."""
    drafted_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Guessed tokens that were verified, by what guessed them ("ngram", or the draft model's id)."""
    accepted_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Those of them that the model would have drawn itself: each is a step saved."""
    draft_blocks: dict[str, int] = field(default_factory=dict[str, int])
    """Verified drafts."""
    compared_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Guessed tokens that were held against what was drawn, verified or not, by what guessed them."""
    true_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Those of them that were the same."""
    step_seconds: dict[int, float] = field(default_factory=dict[int, float])
    """Of a step without prompts, by its rows, where that was seen often enough."""
    prefill_per_s: float = 0.0
    """Tokens of prompts, as steps with prompts took; 0: not seen often enough."""
    drafts_off: bool = False
    """Nothing is drafted at present: a machine that runs some of the layers gives other bytes for other batches."""
    finished: dict[str, int] = field(default_factory=dict[str, int])
    """Sequences ended, by finish reason."""

    def plus(self, other: EngineStats) -> EngineStats:
        """Of two engines together. What they expect of a step, and the context, can't be added: the longest, and none. Nor can steps' times."""
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
        """What stays of it once the engine is gone: the counters."""
        now = ("waiting", "running", "blocks_total", "blocks_in_use", "blocks_cached", "steps_in_flight", "kept_bytes")
        gauges = dict.fromkeys((*now, "reading_tokens_read", "reading_tokens"), 0)
        return replace(self, **gauges, max_context=None, steps_expected_s=0.0, drafts_off=False)


@dataclass(frozen=True, slots=True)
class DraftUse:
    """What became of one kind of drafts for a node's model."""

    by: str
    """As a request's `draft` has it."""
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Each is a step saved."""
    node_id: str = ""
    """The node that drafts at present; empty: prompt lookup, or none."""
    model_id: str = ""
    blocks: int = 0
    """That proposers were asked for and gave."""
    hop_s: float = 0.0
    """Of one such block, from ask to answer, on average."""
    failures: int = 0
    trouble: str = ""
    """Why there is no drafter at present."""


class Histogram:
    """Counts by upper bound. prometheus-client's own takes a lock and a linear search for each observation."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum = 0.0
        """Of all observations."""

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` observations of `seconds` each."""
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self.sum += seconds * times

    @property
    def mean_s(self) -> float:
        """Of all observations; 0 where there is none."""
        times = sum(self._counts)
        return self.sum / times if times else 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, with +Inf last."""
        bounds = (*map(str, self._bounds_s), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


Label = TypeVar("Label")


class LabelledHistograms(Generic[Label]):
    """A histogram for each label, up to a number of labels: what others bring is counted together. For any thread.

    Args:
        rest: the label of those beyond.
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
        """By label. Histograms are this one's own."""
        with self._lock:
            return dict(self._by_label)


Source = TypeVar("Source")
Read = Callable[[Source], float | Histogram | Mapping[Any, float | Histogram]]
"""How a value is read; a mapping's keys are the label's value, or a tuple of the labels' values."""
Family = type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]


@dataclass(frozen=True, slots=True)
class Row(Generic[Source]):
    """One family of the page."""

    family: Family
    name: str
    documentation: str
    read: Read[Source]
    labels: tuple[str, ...] = ()


def counter(name: str, documentation: str, read: Read[Source], *labels: str) -> Row[Source]:
    """A number that only grows; the page adds `_total` to its name."""
    return Row(CounterMetricFamily, name, documentation, read, labels)


def gauge(name: str, documentation: str, read: Read[Source], *labels: str) -> Row[Source]:
    """A number as it is now."""
    return Row(GaugeMetricFamily, name, documentation, read, labels)


def histogram(name: str, documentation: str, read: Read[Source], *labels: str) -> Row[Source]:
    """Counts by upper bound."""
    return Row(HistogramMetricFamily, name, documentation, read, labels)


class Metrics(Collector, Generic[Source]):
    """The rows of one package, for `server.metrics.MetricsPage.add`.

    Args:
        source: what the rows are read from, asked for once a scrape; None: there is none at present, and no family.
    """

    def __init__(self, rows: Sequence[Row[Source]], source: Callable[[], Source | None]) -> None:
        self._rows, self._source = rows, source

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: the registry then takes the collector as it is."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a row."""
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
