"""Prometheus histograms that one thread fills, for a few observations of every request.

prometheus_client's own take locks and look labels up in every observation, ten times as long.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histograms(Collector):
    """One histogram for each combination of labels' values, or a single one without labels."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], *labels: str) -> None:
        """Count observations up to each of `bounds`, ascending; beyond the last is `+Inf`."""
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = bounds
        self._bound_names = [*map(floatToGoString, bounds), "+Inf"]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._add(())

    def observe(self, value: float, *of: str) -> None:
        """Count `value` in the histogram of the labels' values `of`; always the same thread."""
        counts = self._counts.get(of)
        if counts is None:
            counts = self._add(of)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[of] += value

    def describe(self) -> list[Metric]:
        """Return the metric without samples."""
        return [Metric(self._name, self._help, "histogram")]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with all its series."""
        family = Metric(self._name, self._help, "histogram")
        for of, counts in list(self._counts.items()):
            labels = dict(zip(self._labels, of, strict=True))
            upper = list(accumulate(counts))
            for bound, count in zip(self._bound_names, upper, strict=True):
                family.add_sample(f"{self._name}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{self._name}_count", labels, upper[-1])
            # Where values may be negative the sum may fall, which no counter may.
            if self._bounds[0] >= 0:
                family.add_sample(f"{self._name}_sum", labels, self._sums[of])
        yield family

    def _add(self, of: tuple[str, ...]) -> list[int]:
        self._sums[of] = 0.0
        counts = self._counts[of] = [0] * (len(self._bounds) + 1)
        return counts
