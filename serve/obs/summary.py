"""What the report needs of the requests in databases, gathered in one pass over each.

SQLite filters the rows and computes small columns of them; batches of arrays add these to totals,
sketches and sweeps. So memory does not grow with the number of rows. The few rows that pictures
show whole are read by their ids afterwards.

Ids are unique in a database. Here the row `i` of the n-th of k databases has the id `i * k + n`.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from serve.obs.columns import batches
from serve.obs.frame import Column, Frame, ratio
from serve.obs.read import first_and_last, group_mates, read_frame, read_present, request_table
from serve.obs.selection import Selection
from serve.obs.sweeps import END_NS, BusiestWindow
from serve.obs.thinning import with_largest
from serve.obs.totals import AnswerTotals, MemoryTotals, ModelTotals, OutcomeTotals

#: Number of violations described one by one.
WORST = 10

#: Bits of the column `flags`; the rest of it is the number of requests left out.
_OK, _LATE, _LAUNCHED, _EXCEEDED, _LEFT_OUT = 1, 2, 4, 8, 16
_COLUMNS = {
    "model": "model",
    # Why a request has no result, or why its answer was late; NULL for others.
    "label": "CASE WHEN status <> 'OK' THEN CASE reason WHEN '' THEN lower(status) ELSE reason END"
    " WHEN violated THEN cause END",
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


class Summary:
    """Everything that the report shows of the chosen requests."""

    def __init__(self, servers: Mapping[str, sqlite3.Connection], chosen: Selection) -> None:
        """Read the requests of `chosen` from the database of each server, by its machine."""
        self.all = ModelTotals()
        self.by_model: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        self.by_machine = {machine: ModelTotals() for machine in servers}
        #: Of each model on each machine.
        self._totals: defaultdict[tuple[str, str], ModelTotals] = defaultdict(ModelTotals)
        self.first_unix_ns, self.last_unix_ns = _first_and_last(servers, chosen)
        self.answers = AnswerTotals()
        self.outcomes = OutcomeTotals(self.first_unix_ns, self.last_unix_ns)
        self.memory = MemoryTotals()
        self._window = BusiestWindow()
        self._longest_ns = 0
        self._late = (np.zeros(0), np.zeros(0, np.int64))
        #: Of the window, whose lanes are one server's.
        self.window_machine = next(iter(servers))
        for number, (machine, db) in enumerate(servers.items()):
            before = self._window.window()
            for models, labels, columns in _batches(db, chosen, number, len(servers)):
                self._add(machine, models, labels, columns)
            # Its runs share lanes and memory with those of no other server.
            self.memory.finish()
            nothing = np.zeros(0, np.int64)
            self._window.add(nothing, nothing, nothing.astype(np.bool_), END_NS)
            if self._window.window() != before:
                self.window_machine = machine
        for (machine, model), one in self._totals.items():
            for whole in (self.by_machine[machine], self.by_model[model], self.all):
                whole.merge(one)
        self._read_shown(servers, chosen)

    def _read_shown(self, servers: Mapping[str, sqlite3.Connection], chosen: Selection) -> None:
        """Read the rows that pictures and tables show whole."""
        self.worst, machines = _read_rows(servers, self._late[1])
        order = np.argsort(-self.worst.over_target, kind="stable")
        self.worst = self.worst.where(order)
        #: Of each of the worst: its machine, and the ids of others in its group.
        self.worst_machines = [machines[i] for i in order]
        self.mates = [
            group_mates(servers[machine], self.worst, i, self._longest_ns)
            for i, machine in enumerate(self.worst_machines)
        ]
        self.points, _ = _read_rows(servers, self.memory.points.chosen())
        self.window = self._window.window()
        begin, end = self.window or (0, 0)
        db = servers[self.window_machine]
        self.shown = read_present(db, chosen, begin, end, self._longest_ns)

    def _add(
        self, machine: str, models: Sequence[str], labels: Sequence[str], numbers: Frame
    ) -> None:
        flags = numbers["flags"]
        ok, launched = flags & _OK != 0, flags & _LAUNCHED != 0
        late = ok & (flags & _LATE != 0)
        requests = 1 + flags // _LEFT_OUT
        over = ratio(numbers["latency_ns"], numbers["qos_target_ns"])
        self._longest_ns = max(self._longest_ns, int(numbers["latency_ns"].max()))
        for code in np.flatnonzero(np.bincount(numbers["model"])).tolist():
            rows = np.flatnonzero(numbers["model"] == code)
            mine = rows[ok[rows]]
            self._totals[machine, models[code]].add(
                int(requests[rows].sum()),
                over[mine],
                numbers["latency_ns"][mine] / 1e6,
                int(np.count_nonzero(late[mine])),
            )
        self.answers.add(numbers.where(ok), over[ok], late[ok])
        self.outcomes.add(labels, numbers, requests, ok, late)
        self._late = with_largest(self._late, over[late], numbers["row_id"][late], WORST)
        runs, horizon_ns = numbers.where(launched), int(numbers["arrived_unix_ns"][-1])
        self._window.add(runs.launched_unix_ns, runs.finished_unix_ns, late[launched], horizon_ns)
        self.memory.add(runs, runs["flags"] & _EXCEEDED != 0, horizon_ns)


def _first_and_last(
    servers: Mapping[str, sqlite3.Connection], chosen: Selection
) -> tuple[int, int]:
    """Return the first and the last arrival of the chosen requests, or zeros."""
    ends = [found for db in servers.values() if any(found := first_and_last(db, chosen))]
    return min((first for first, _ in ends), default=0), max((last for _, last in ends), default=0)


def _read_rows(
    servers: Mapping[str, sqlite3.Connection], row_ids: Column
) -> tuple[Frame, list[str]]:
    """Return rows by their ids among all servers', and the machine of each."""
    frames, machines = [], list[str]()
    for number, (machine, db) in enumerate(servers.items()):
        frames.append(read_frame(db, row_ids[row_ids % len(servers) == number] // len(servers)))
        machines += [machine] * len(frames[-1])
    return Frame.joined(frames), machines


def _batches(
    db: sqlite3.Connection, chosen: Selection, number: int, count: int
) -> Iterator[tuple[list[str], list[str], Frame]]:
    """Yield names of models, labels and columns of the chosen requests, in order of arrival.

    The columns `model` and `label` are positions among the names. The database is the one with this
    `number` of so many.
    """
    where, values = chosen.condition()
    columns = _COLUMNS | {"row_id": f"row_id * {count} + {number}"}
    query = (
        f"SELECT {', '.join(columns.values())} FROM {request_table(db)} "
        f"WHERE {where} ORDER BY arrived_unix_ns, row_id"
    )
    for (models, labels), found in batches(db, query, values, texts=2):
        yield models, labels, Frame(dict(zip(columns, found, strict=True)))
