"""Size of a sampled subgraph before it is sampled, by graph and fan-outs.

At first use a few samples of doubling numbers of random ids are drawn and timed; between them is
interpolated. Clients may ask for other nodes than random ones, so every sample that is served
corrects the numbers: the median by a factor, the upper quantile by small steps.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from serve.estimate.correction import Drift, Quantile

#: Upper quantile ÷ median to start with, at least: a few draws show little of a heavy tail.
_LEAST_BAND = 1.25


@dataclass(frozen=True, slots=True)
class SampleProbe:
    """Sample that was drawn to learn from."""

    num_ids: int
    num_nodes: int
    num_edges: int
    #: To sample and to gather features.
    prepare_ns: int
    #: Self-loops among the edges; None: not counted.
    num_loops: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedSample:
    """A request's subgraph before it is sampled."""

    #: Medians.
    num_nodes: int
    num_edges: int
    prepare_ns: int
    #: 95th percentiles, which memory is planned by.
    num_nodes_high: int
    num_edges_high: int


class SampleSizes:
    """Sizes of the samples of one graph with one choice of fan-outs. Not thread-safe."""

    def __init__(self, probes: Sequence[SampleProbe], num_nodes: int, num_edges: int) -> None:
        """Learn from `probes`, at least one; no sample is larger than the graph."""
        by_count: dict[int, list[SampleProbe]] = {}
        for probe in probes:
            by_count.setdefault(probe.num_ids, []).append(probe)
        if not by_count:
            raise ValueError("at least one probe is needed")
        self._counts = sorted(by_count)
        rows = [by_count[count] for count in self._counts]
        self._nodes = [_median([probe.num_nodes for probe in row]) for row in rows]
        self._edges = [_median([probe.num_edges for probe in row]) for row in rows]
        self._times = [_median([probe.prepare_ns for probe in row]) for row in rows]
        self._limits = num_nodes, num_edges
        spread = max(
            max(probe.num_edges for probe in row) / max(1.0, edges)
            for row, edges in zip(rows, self._edges, strict=True)
        )
        self._nodes_drift, self._edges_drift, self._time_drift = Drift(), Drift(), Drift()
        self._nodes_high = Quantile(max(_LEAST_BAND, spread))
        self._edges_high = Quantile(max(_LEAST_BAND, spread))

    def resized(self, num_nodes: int, num_edges: int) -> None:
        """Bound samples by the new size of the graph, which has changed."""
        self._limits = num_nodes, num_edges

    def expected(self, num_ids: int) -> ExpectedSample:
        """Return the expected size for a request of `num_ids` ids."""
        nodes = self._at(self._nodes, num_ids) * self._nodes_drift.factor
        edges = self._at(self._edges, num_ids) * self._edges_drift.factor
        most_nodes, most_edges = self._limits
        # Ids that are asked for are nodes of the sample unless they are repeated.
        least = min(num_ids, most_nodes)
        return ExpectedSample(
            num_nodes=min(most_nodes, max(least, round(nodes))),
            num_edges=min(most_edges, round(edges)),
            prepare_ns=round(self._at(self._times, num_ids) * self._time_drift.factor),
            num_nodes_high=min(most_nodes, max(least, math.ceil(nodes * self._nodes_high.value))),
            num_edges_high=min(most_edges, math.ceil(edges * self._edges_high.value)),
        )

    def observe(self, found: SampleProbe) -> None:
        """Learn from a sample that was served."""
        for measured, known, drift, high in (
            (found.num_nodes, self._nodes, self._nodes_drift, self._nodes_high),
            (found.num_edges, self._edges, self._edges_drift, self._edges_high),
            (found.prepare_ns, self._times, self._time_drift, None),
        ):
            expected = max(1.0, self._at(known, found.num_ids))
            if high is not None:
                high.observe(max(1, measured) / (expected * drift.factor))
            drift.observe(max(1, measured), expected)

    def _at(self, known: Sequence[float], num_ids: int) -> float:
        """Interpolate linearly between probed counts; beyond them, in proportion."""
        if num_ids <= 0:
            return 0.0
        counts = self._counts
        at = bisect_left(counts, num_ids)
        if at == len(counts):
            return known[-1] * num_ids / counts[-1]
        if counts[at] == num_ids or at == 0:
            return known[at]
        share = (num_ids - counts[at - 1]) / (counts[at] - counts[at - 1])
        return known[at - 1] + share * (known[at] - known[at - 1])


def _median(values: Sequence[int]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2)
