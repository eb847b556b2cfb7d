"""Prometheus histograms that are filled from arrays, for a few observations of every request.

prometheus_client's own take locks and look labels up in every observation, many times as long.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serve.obs.frame import Column


class Histograms(Collector):
    """One histogram for each combination of labels' values, or a single one without labels."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], *labels: str) -> None:
        """Count observations up to each of `bounds`, ascending; beyond the last is `+Inf`."""
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = np.array(bounds)
        self._bound_names = [*map(floatToGoString, bounds), "+Inf"]
        self._counts: dict[tuple[str, ...], Column] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._counts[()], self._sums[()] = np.zeros(len(bounds) + 1, np.int64), 0.0

    def observe(self, values: Column, kinds: Column, of: Sequence[tuple[str, ...]]) -> None:
        """Count each of `values` in the histogram of the labels' values `of` its kind.

        Args:
            values: Observations, of any number.
            kinds: Kind of each, a position in `of`.
            of: The labels' values by kind; several kinds may have the same.
        """
        width = len(self._bound_names)
        at = kinds * width + np.searchsorted(self._bounds, values)
        counts = np.bincount(at, minlength=len(of) * width).reshape(len(of), width)
        sums = np.bincount(kinds, values, len(of)).tolist()
        for kind in np.flatnonzero(counts.any(axis=1)).tolist():
            labels = of[kind]
            self._counts[labels] = self._counts.get(labels, 0) + counts[kind]
            self._sums[labels] = self._sums.get(labels, 0.0) + sums[kind]

    def describe(self) -> list[Metric]:
        """Return the metric without samples."""
        return [Metric(self._name, self._help, "histogram")]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with all its series."""
        family = Metric(self._name, self._help, "histogram")
        for of, counts in list(self._counts.items()):
            labels = dict(zip(self._labels, of, strict=True))
            upper = list(accumulate(counts.tolist()))
            for bound, count in zip(self._bound_names, upper, strict=True):
                family.add_sample(f"{self._name}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{self._name}_count", labels, upper[-1])
            # Where values may be negative the sum may fall, which no counter may.
            if self._bounds[0] >= 0:
                family.add_sample(f"{self._name}_sum", labels, self._sums[of])
        yield family
