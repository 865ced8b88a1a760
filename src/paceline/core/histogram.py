"""Counts of times by upper bound, cheap enough to be kept for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts by upper bound. prometheus-client's own takes a lock and a linear search for each observation."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` observations of `seconds` each."""
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self._sum_s += seconds * times

    @property
    def mean_s(self) -> float:
        """Of all observations; 0 where there is none."""
        times = sum(self._counts)
        return self._sum_s / times if times else 0.0

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """As Prometheus wants it."""
        from prometheus_client.core import HistogramMetricFamily

        return HistogramMetricFamily(name, documentation, buckets=self.buckets(), sum_value=self._sum_s)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """As one of several of a family that differ in their labels."""
        family.add_metric(labels, self.buckets(), self._sum_s)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, with +Inf last."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets
