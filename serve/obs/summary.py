"""What the report needs of the database's requests, gathered in one pass.

SQLite filters the rows and computes small columns of them; batches of arrays add these to totals,
sketches and sweeps. So memory does not grow with the number of rows. The few rows that pictures
show whole are read by their ids afterwards.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from serve.core.rules.cause import CAUSES
from serve.obs.frame import STAGES, Column, Frame, ratio
from serve.obs.intervals import Intervals
from serve.obs.read import first_and_last, read_frame, read_present, request_table
from serve.obs.selection import Selection
from serve.obs.sketch import Sketch
from serve.obs.sweeps import END_NS, BusiestWindow, ConcurrentPeak
from serve.obs.thinning import Thinning

#: Number of violations described one by one.
WORST = 10
#: Rows of a batch, and rows that SQLite hands over at once, few enough to stay in the cache.
_BATCH = 16_384
_FETCHED = 512
#: Edges of the histogram of latency ÷ target: eight bins for each doubling.
OVER_EDGES = np.geomspace(2.0**-5, 2.0**6, 11 * 8 + 1)
#: Edges of the histogram of measured ÷ reserved memory.
EXCESS_EDGES = np.linspace(0.5, 1.2, 71)

#: Bits of the column `flags`; the rest of it is the number of requests left out.
_OK, _LATE, _LAUNCHED, _EXCEEDED, _LEFT_OUT = 1, 2, 4, 8, 16
_NUMBERS = {
    "flags": "(status = 'OK') + 2 * (violated <> 0) + 4 * (lane >= 0)"
    " + 8 * (ifnull(pmc_measured_bytes, 0) > pmc_estimate_bytes) + 16 * left_out",
    **{
        name: name
        for name in (
            "row_id", "arrived_unix_ns", "latency_ns", "qos_target_ns", "quet_ns", "queue_ns",
            "prepare_ns", "prepare_exposed_ns", "run_ns", "suspended_ns", "answer_ns",
            "run_estimate_ns", "reserve_bytes",
        )
    },
    "measured_bytes": "ifnull(pmc_measured_bytes, -1)",
}  # fmt: skip
#: Why a request has no result, or why its answer was late; NULL for others.
_LABEL = (
    "CASE WHEN status <> 'OK' THEN CASE reason WHEN '' THEN lower(status) ELSE reason END"
    " WHEN violated THEN cause END"
)


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


class StageSums:
    """Sums over answers of each stage's share of the latency."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = dict.fromkeys(STAGES, 0.0)

    def add(self, answers: Frame) -> None:
        """Add answers."""
        self.count += len(answers)
        for stage, time in answers.stage_ns().items():
            self._sums[stage] += float(ratio(time, answers["latency_ns"]).sum())

    def means(self) -> dict[str, float]:
        """Return the mean share by stage."""
        return {stage: total / max(self.count, 1) for stage, total in self._sums.items()}


class Summary:
    """Everything that the report shows of the chosen requests."""

    def __init__(self, db: sqlite3.Connection, chosen: Selection) -> None:
        """Read the requests of `chosen`."""
        self.all = ModelTotals()
        self.by_model: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        self.by_cause = Counter[str]()
        self.rejected = Counter[str]()
        self.expired_late = 0
        self.run_over_estimate = Sketch()
        self.quet_over_target = Sketch()
        self.first_unix_ns, self.last_unix_ns = first_and_last(db, chosen)
        self.stages = {name: StageSums() for name in ("late", "in time", "all")}
        self.prepare_ns = self.hidden_ns = 0
        self.hidden_share = 0.0
        # Memory.
        self.measured = self.underestimates = self.estimate_exceeded = 0
        self.reserved_over_measured = Sketch()
        self.reserved_peak, self.measured_peak = ConcurrentPeak(), ConcurrentPeak()
        self.excess_counts = np.zeros(len(EXCESS_EDGES) - 1, np.int64)
        self._points = Thinning()
        # Pictures.
        self.over_counts = np.zeros(len(OVER_EDGES) - 1, np.int64)
        self.over_range = (np.inf, 0.0)
        self.over_time = Intervals(self.first_unix_ns / 1e9, self.last_unix_ns / 1e9)
        self._window = BusiestWindow()
        self._longest_ns = 0
        self._late = (np.zeros(0), np.zeros(0, np.int64))
        for models, labels, numbers in _batches(db, chosen):
            self._add(models, labels, numbers)
        self._finish(db, chosen)

    def _finish(self, db: sqlite3.Connection, chosen: Selection) -> None:
        nothing = np.zeros(0, np.int64)
        for peak in (self.reserved_peak, self.measured_peak):
            peak.add(nothing, nothing, nothing, END_NS)
        self._window.add(nothing, nothing, nothing.astype(np.bool_), END_NS)
        self.worst = read_frame(db, self._late[1])
        self.worst = self.worst.where(np.argsort(-self.worst.over_target, kind="stable"))
        self.mates = [_mates(db, self.worst, i, self._longest_ns) for i in range(len(self.worst))]
        self.points = read_frame(db, self._points.chosen())
        self.window = self._window.window()
        begin, end = self.window or (0, 0)
        self.shown = read_present(db, chosen, begin, end, self._longest_ns)

    def _add(self, models: tuple[str, ...], labels: tuple[Any, ...], numbers: Frame) -> None:
        flags = numbers["flags"]
        ok, launched = flags & _OK != 0, flags & _LAUNCHED != 0
        late = ok & (flags & _LATE != 0)
        self._longest_ns = max(self._longest_ns, int(numbers["latency_ns"].max()))
        over = ratio(numbers["latency_ns"], numbers["qos_target_ns"])
        requests = 1 + flags // _LEFT_OUT
        codes, names = _encode(models)
        for code, name in enumerate(names):
            rows = np.flatnonzero(codes == code) if len(names) > 1 else np.arange(len(codes))
            mine = rows[ok[rows]]
            facts = (int(requests[rows].sum()), over[mine], numbers["latency_ns"][mine] / 1e6,
                     int(np.count_nonzero(late[mine])))  # fmt: skip
            self.by_model[name].add(*facts)
            self.all.add(*facts)
        self._answers(numbers.where(ok), over[ok], late[ok])
        self._reasons(labels, numbers, requests, ok, late)
        self._worst(over, late, numbers["row_id"])
        self._runs(numbers.where(launched), late[launched], int(numbers["arrived_unix_ns"][-1]))

    def _answers(self, answers: Frame, over: Column, late: Column) -> None:
        if not len(answers):
            return
        lo, hi = OVER_EDGES[0], OVER_EDGES[-1] * (1 - 1e-9)
        self.over_counts += np.histogram(np.clip(over, lo, hi), OVER_EDGES)[0]
        least, most = self.over_range
        self.over_range = (min(least, float(over.min())), max(most, float(over.max())))
        self.quet_over_target.add(ratio(answers["quet_ns"], answers["qos_target_ns"]))
        self.run_over_estimate.add(ratio(answers["run_ns"], answers["run_estimate_ns"]))
        self.stages["late"].add(answers.where(late))
        self.stages["in time"].add(answers.where(~late))
        self.stages["all"].add(answers)
        hidden = answers["prepare_ns"] - answers["prepare_exposed_ns"]
        self.prepare_ns += int(answers["prepare_ns"].sum())
        self.hidden_ns += int(hidden.sum())
        self.hidden_share += float(ratio(hidden, answers["latency_ns"]).sum())

    def _reasons(
        self, labels: tuple[Any, ...], numbers: Frame, requests: Column, ok: Column, late: Column
    ) -> None:
        """Count requests by reason, late answers by cause, and both over time."""
        at = self.over_time.slots(numbers["arrived_unix_ns"])
        self.over_time.add("kept", at[ok & ~late])
        self.over_time.add("late", at[late])
        self.over_time.add("none", at[~ok])
        codes, names = _encode(labels)
        for code, name in enumerate(names):
            mine = codes == code
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

    def _worst(self, over: Column, late: Column, row_id: Column) -> None:
        over = np.concatenate([self._late[0], over[late]])
        row_id = np.concatenate([self._late[1], row_id[late]])
        order = np.argsort(-over, kind="stable")[:WORST]
        self._late = (over[order], row_id[order])

    def _runs(self, runs: Frame, late: Column, horizon_ns: int) -> None:
        start, end = runs.launched_unix_ns, runs.finished_unix_ns
        self._window.add(start, end, late, horizon_ns)
        self.reserved_peak.add(start, end, runs["reserve_bytes"], horizon_ns)
        known = runs["measured_bytes"] >= 0
        took, held = runs["measured_bytes"][known], runs["reserve_bytes"][known]
        self.measured_peak.add(start[known], end[known], took, horizon_ns)
        self.measured += len(took)
        self.underestimates += int(np.count_nonzero(took > held))
        self.estimate_exceeded += int(np.count_nonzero(runs["flags"][known] & _EXCEEDED))
        some = took > 0
        self.reserved_over_measured.add(held[some] / took[some])
        excess = ratio(took[some], np.maximum(held[some], 1))
        self.excess_counts += np.histogram(np.clip(excess, 0.5, 1.2 - 1e-9), EXCESS_EDGES)[0]
        self._points.add(excess, runs["row_id"][known][some])


def _batches(
    db: sqlite3.Connection, chosen: Selection
) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...], Frame]]:
    """Yield models, labels and numbers of the chosen requests, in order of arrival."""
    where, values = chosen.condition()
    rows = db.execute(
        f"SELECT model, {_LABEL}, {', '.join(_NUMBERS.values())} FROM {request_table(db)} "
        f"WHERE {where} ORDER BY arrived_unix_ns, row_id",
        values,
    )
    texts: list[tuple[Any, ...]] = [(), ()]
    parts: list[list[Column]] = []
    size = 0

    def batch() -> tuple[tuple[str, ...], tuple[Any, ...], Frame]:
        columns = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
        return texts[0], texts[1], Frame(dict(zip(_NUMBERS, columns, strict=True)))

    while fetched := rows.fetchmany(_FETCHED):
        model, label, *numbers = zip(*fetched, strict=True)
        texts = [texts[0] + model, texts[1] + label]
        parts.append([np.fromiter(column, np.int64, len(column)) for column in numbers])
        size += len(fetched)
        if size >= _BATCH:
            yield batch()
            texts, parts, size = [(), ()], [], 0
    if size:
        yield batch()


def _encode(names: tuple[Any, ...]) -> tuple[Column, list[Any]]:
    """Return a code for each name, and the names by code; None has the code -1."""
    codes: defaultdict[Any, int] = defaultdict(count().__next__)
    if None in names:
        found = (-1 if name is None else codes[name] for name in names)
    else:
        found = (codes[name] for name in names)
    return np.fromiter(found, np.int64, len(names)), list(codes)


def _mates(db: sqlite3.Connection, worst: Frame, i: int, longest_ns: int) -> list[str]:
    """Return the ids of other requests in the group of a late answer, at most eight.

    Requests of one group waited at the same time, which bounds when they arrived.
    """
    group, arrived = int(worst["group_id"][i]), int(worst["arrived_unix_ns"][i])
    if group < 0:
        return []
    rows = db.execute(
        "SELECT request_uid FROM request WHERE arrived_unix_ns BETWEEN ? AND ? AND run_id = ? "
        "AND group_id = ? AND request_uid <> ? ORDER BY arrived_unix_ns, row_id LIMIT 8",
        (arrived - longest_ns, arrived + int(worst["latency_ns"][i]), int(worst["run_id"][i]),
         group, worst["request_uid"][i]),
    )  # fmt: skip
    return [uid for (uid,) in rows]
