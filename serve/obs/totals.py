"""Totals of the report, added up from batches of requests so that no row has to be kept."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from serve.core.rules.cause import CAUSES
from serve.obs.frame import STAGES, Column, Frame, ratio
from serve.obs.intervals import Intervals
from serve.obs.sketch import FINE_GROWTH, Sketch
from serve.obs.sweeps import END_NS, ConcurrentPeak
from serve.obs.thinning import Thinning

#: Edges of the histogram of latency ÷ target: eight bins for each doubling.
OVER_EDGES = np.geomspace(2.0**-5, 2.0**6, 11 * 8 + 1)
#: Edges of the histogram of measured ÷ reserved memory.
EXCESS_EDGES = np.linspace(0.5, 1.2, 71)


class ModelTotals:
    """Totals of one model, or of all."""

    def __init__(self) -> None:
        self.requests = 0
        self.violations = 0
        self.over = Sketch()
        self.latency_ms = Sketch()

    def add(self, requests: int, over: Column, latency_ms: Column, violations: int) -> None:
        """Add requests, and the answers among them."""
        self.requests += requests
        self.violations += violations
        self.over.add(over)
        self.latency_ms.add(latency_ms)

    def merge(self, other: "ModelTotals") -> None:
        """Add what another has."""
        self.requests += other.requests
        self.violations += other.violations
        self.over.merge(other.over)
        self.latency_ms.merge(other.latency_ms)


class StageSums:
    """Sums over answers of each stage's share of the latency."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = dict.fromkeys(STAGES, 0.0)

    def add(self, shares: dict[str, Column], chosen: Column | slice) -> None:
        """Add the chosen of some answers' shares by stage."""
        for stage, share in shares.items():
            taken = share[chosen]
            self._sums[stage] += float(taken.sum())
        self.count += len(taken)

    def without(self, others: "StageSums") -> "StageSums":
        """Return the sums over all answers but `others`, which are among them."""
        rest = StageSums()
        rest.count = self.count - others.count
        if rest.count:
            rest._sums = {stage: self._sums[stage] - others._sums[stage] for stage in STAGES}
        return rest

    def means(self) -> dict[str, float]:
        """Return the mean share by stage."""
        return {stage: total / max(self.count, 1) for stage, total in self._sums.items()}


class AnswerTotals:
    """Where the time of answers went, and how their times compare with targets and estimates."""

    def __init__(self) -> None:
        self.quet_over_target = Sketch()
        self.run_over_estimate = Sketch()
        #: Latency ÷ target: counts between OVER_EDGES, those beyond in the outermost; range.
        self.over_counts = np.zeros(len(OVER_EDGES) - 1, np.int64)
        self.over_range = (np.inf, 0.0)
        self._late, self._all = StageSums(), StageSums()
        #: Preparation, and the part of it during which the request waited in the queue anyway.
        self.prepare_ns = self.hidden_ns = 0
        #: Sum of that part ÷ latency.
        self.hidden_share = 0.0

    def add(self, answers: Frame, over: Column, late: Column) -> None:
        """Add answers, their latency ÷ target, and which of them were late."""
        if not len(answers):
            return
        self.over_counts += _histogram(over, OVER_EDGES)
        least, most = self.over_range
        self.over_range = (min(least, float(over.min())), max(most, float(over.max())))
        self.quet_over_target.add(ratio(answers["quet_ns"], answers["qos_target_ns"]))
        self.run_over_estimate.add(ratio(answers["run_ns"], answers["run_estimate_ns"]))
        latency = answers["latency_ns"]
        shares = {stage: ratio(time, latency) for stage, time in answers.stage_ns().items()}
        self._late.add(shares, late)
        self._all.add(shares, slice(None))
        hidden = answers["prepare_ns"] - answers["prepare_exposed_ns"]
        self.prepare_ns += int(answers["prepare_ns"].sum())
        self.hidden_ns += int(hidden.sum())
        self.hidden_share += float(ratio(hidden, latency).sum())

    @property
    def stages(self) -> dict[str, StageSums]:
        """Sums over the late answers, those in time, and all."""
        return {"late": self._late, "in time": self._all.without(self._late), "all": self._all}


class OutcomeTotals:
    """Why answers were late, why requests have no result, and both over time."""

    def __init__(self, first_unix_ns: int, last_unix_ns: int) -> None:
        """Cover requests that arrive between these times."""
        self.by_cause = Counter[str]()
        self.rejected = Counter[str]()
        #: Requests that ended at the client's own limit, after their target.
        self.expired_late = 0
        self.over_time = Intervals(first_unix_ns / 1e9, last_unix_ns / 1e9)

    def add(
        self, labels: Sequence[str], numbers: Frame, requests: Column, ok: Column, late: Column
    ) -> None:
        """Add rows.

        Args:
            labels: Texts by their positions.
            numbers: Columns of the rows. `label` is the position of the text that says why a row
                has no result, or why it was late; negative for others.
            requests: How many requests each row stands for.
            ok: Which were answered.
            late: Which were answered late.
        """
        at = self.over_time.slots(numbers["arrived_unix_ns"])
        self.over_time.add("kept", at[ok & ~late])
        self.over_time.add("late", at[late])
        self.over_time.add("none", at[~ok])
        for code in np.flatnonzero(np.bincount(numbers["label"] + 1)[1:]).tolist():
            name, mine = labels[code], numbers["label"] == code
            if caused := int(np.count_nonzero(mine & late)):
                self.by_cause[name] += caused
                if name in CAUSES:
                    self.over_time.add(f"c-{name}", at[mine & late])
            if ended := int(requests[mine & ~ok].sum()):
                self.rejected[name] += ended
            if name == "deadline":
                target = numbers["qos_target_ns"]
                expired = mine & ~ok & (target > 0) & (numbers["latency_ns"] > target)
                self.expired_late += int(requests[expired].sum())


class MemoryTotals:
    """What runs reserved, and what they took."""

    def __init__(self) -> None:
        #: Runs whose peak was measured; those above their reservation; those above the estimate.
        self.measured = self.underestimates = self.estimate_exceeded = 0
        self.reserved_over_measured = Sketch(FINE_GROWTH)
        self._peaks = ConcurrentPeak(2)
        #: Measured ÷ reserved: counts between EXCESS_EDGES, those beyond in the outermost.
        self.excess_counts = np.zeros(len(EXCESS_EDGES) - 1, np.int64)
        #: Runs that stand for all in a picture.
        self.points = Thinning()

    def add(self, runs: Frame, exceeded: Column, horizon_ns: int) -> None:
        """Add runs in order of arrival.

        Args:
            runs: Rows that reached a lane; `measured_bytes` is negative where nobody measured.
            exceeded: Which took more than was estimated.
            horizon_ns: Earliest start of the runs of later calls.
        """
        known = runs["measured_bytes"] >= 0
        took, held = runs["measured_bytes"][known], runs["reserve_bytes"][known]
        both = runs["reserve_bytes"], np.maximum(runs["measured_bytes"], 0)
        self._peaks.add(runs.launched_unix_ns, runs.finished_unix_ns, both, horizon_ns)
        self.measured += len(took)
        self.underestimates += int(np.count_nonzero(took > held))
        self.estimate_exceeded += int(np.count_nonzero(exceeded[known]))
        some = took > 0
        self.reserved_over_measured.add(held[some] / took[some])
        excess = ratio(took[some], np.maximum(held[some], 1))
        self.excess_counts += _histogram(excess, EXCESS_EDGES)
        self.points.add(excess, runs["row_id"][known][some])

    def finish(self) -> None:
        """Settle the concurrent peaks: no more runs come."""
        nothing = np.zeros(0, np.int64)
        self._peaks.add(nothing, nothing, (nothing, nothing), END_NS)

    @property
    def reserved_peak(self) -> int:
        """Largest sum of the reservations of concurrent runs."""
        return self._peaks.highest[0]

    @property
    def measured_peak(self) -> int:
        """Largest sum of what concurrent runs took."""
        return self._peaks.highest[1]


def _histogram(values: Column, edges: Column) -> Column:
    """Return counts between the edges, with values beyond them in the outermost bins."""
    inside = np.clip(values, edges[0], edges[-1] * (1 - 1e-9))
    at = np.searchsorted(edges, inside, side="right") - 1
    return np.bincount(at, minlength=len(edges) - 1)
