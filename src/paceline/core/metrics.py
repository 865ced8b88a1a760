"""Metrics as data: each package lists its rows, and one collector reads them when the page is scraped.

A row is a family's name, type, help and labels, and a function that reads its value from the package's source: a number or a histogram, or,
by label, a mapping of them. Nothing is computed between scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.stats import Histogram

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
