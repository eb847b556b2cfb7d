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
    #: Nodes and edges, or whatever the model counts: of nodes first.
    counts: tuple[int, ...]
    #: To sample and to gather features.
    prepare_ns: int
    #: Self-loops among the edges; None: not counted.
    num_loops: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedSample:
    """A request's subgraph before it is sampled."""

    #: Medians, of all nodes and all edges.
    num_nodes: int
    num_edges: int
    prepare_ns: int
    #: 95th percentiles, which memory is planned by.
    num_nodes_high: int
    num_edges_high: int
    #: The same for each count by itself.
    counts: tuple[int, ...]
    counts_high: tuple[int, ...]


class SampleSizes:
    """Sizes of the samples of one graph with one choice of fan-outs. Not thread-safe."""

    def __init__(
        self,
        probes: Sequence[SampleProbe],
        limits: Sequence[int],
        *,
        kinds_of_nodes: int = 1,
        asked: int = 0,
    ) -> None:
        """Learn from `probes`, at least one.

        `limits` are the counts of the whole graph, which no sample exceeds: of `kinds_of_nodes`
        first. `asked` is the position among the counts of the kind that ids are of.
        """
        by_count: dict[int, list[SampleProbe]] = {}
        for probe in probes:
            by_count.setdefault(probe.num_ids, []).append(probe)
        if not by_count:
            raise ValueError("at least one probe is needed")
        self._num_ids = sorted(by_count)
        rows = [by_count[count] for count in self._num_ids]
        self._times = [_median([probe.prepare_ns for probe in row]) for row in rows]
        self._time_drift = Drift()
        self._kinds_of_nodes, self._asked = kinds_of_nodes, asked
        self._limits = tuple(limits)
        self._counts = [
            _OneCount([[probe.counts[position] for probe in row] for row in rows])
            for position in range(len(self._limits))
        ]

    def resized(self, *limits: int) -> None:
        """Bound samples by the new size of the graph, which has changed."""
        self._limits = limits

    def expected(self, num_ids: int) -> ExpectedSample:
        """Return the expected size for a request of `num_ids` ids."""
        counts, high = [], []
        for position, (one, most) in enumerate(zip(self._counts, self._limits, strict=True)):
            usual = self._at(one.medians, num_ids) * one.drift.factor
            # Ids that are asked for are nodes of the sample unless they are repeated.
            least = min(num_ids, most) if position == self._asked else 0
            counts.append(min(most, max(least, round(usual))))
            high.append(min(most, max(least, math.ceil(usual * one.high.value))))
        nodes = self._kinds_of_nodes
        return ExpectedSample(
            num_nodes=sum(counts[:nodes]),
            num_edges=sum(counts[nodes:]),
            prepare_ns=round(self._at(self._times, num_ids) * self._time_drift.factor),
            num_nodes_high=sum(high[:nodes]),
            num_edges_high=sum(high[nodes:]),
            counts=tuple(counts),
            counts_high=tuple(high),
        )

    def observe(self, found: SampleProbe) -> None:
        """Learn from a sample that was served."""
        for measured, one in zip(found.counts, self._counts, strict=True):
            expected = max(1.0, self._at(one.medians, found.num_ids))
            one.high.observe(max(1, measured) / (expected * one.drift.factor))
            one.drift.observe(max(1, measured), expected)
        expected = max(1.0, self._at(self._times, found.num_ids))
        self._time_drift.observe(max(1, found.prepare_ns), expected)

    def _at(self, known: Sequence[float], num_ids: int) -> float:
        """Interpolate linearly between probed counts; beyond them, in proportion."""
        if num_ids <= 0:
            return 0.0
        counts = self._num_ids
        at = bisect_left(counts, num_ids)
        if at == len(counts):
            return known[-1] * num_ids / counts[-1]
        if counts[at] == num_ids or at == 0:
            return known[at]
        share = (num_ids - counts[at - 1]) / (counts[at] - counts[at - 1])
        return known[at - 1] + share * (known[at] - known[at - 1])


class _OneCount:
    """One count of the samples: its medians by number of ids, and what was learned since."""

    def __init__(self, probed: Sequence[Sequence[int]]) -> None:
        """`probed` has the counts of each number of ids."""
        self.medians = [_median(row) for row in probed]
        spread = max(
            max(row) / max(1.0, median) for row, median in zip(probed, self.medians, strict=True)
        )
        self.drift = Drift()
        self.high = Quantile(max(_LEAST_BAND, spread))


def _median(values: Sequence[int]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2)
