"""Numbers of the live page over a window of time, for everything, one model or one tenant."""

import sqlite3
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from serve.obs.explanations import REASONS
from serve.obs.live.alarms import alarms_of
from serve.obs.live.bins import counted, quantiles
from serve.obs.live.tally import (
    ALL,
    COLUMNS,
    LATE,
    MODEL,
    NONE,
    TENANT,
    label_counts,
)
from serve.obs.live.training import read_jobs
from serve.obs.live.writer import WIDTHS
from serve.obs.read import read_runs
from serve.obs.record import ServerRun
from serve.obs.selection import Selection
from serve.wilson import wilson_interval

#: By name of a window: its length and the width of its points, in seconds.
WINDOWS = {"5m": (300, 1), "1h": (3_600, 10), "6h": (21_600, 60), "1d": (86_400, 300)}
#: Order of a late answer's causes in points.
CAUSES = ("queue", "prepare", "interference", "estimate", "overload", "network")
#: Share of a processor that the tables of a view may take.
_SHARE = 0.01
_SHARES = (0.5, 0.9, 0.99, 0.999)
#: Time within which the last known state is still the present one.
_STATE_S = 40

_Row = dict[str, Any]


class Focus(msgspec.Struct, frozen=True):
    """What a view is about: a window, and one model, a version of it or a tenant, or everything."""

    window: str = "5m"
    model: str = ""
    version: str = ""
    tenant: str = ""

    @property
    def kind(self) -> str:
        """Kind of the rows that it adds up."""
        return MODEL if self.model else TENANT if self.tenant else ALL

    @property
    def selection(self) -> Selection:
        """The requests that it is about, at any time."""
        return Selection(model=self.model, version=self.version, tenant=self.tenant)

    def condition(self) -> tuple[str, list[str]]:
        """Return a condition for its rows, and the values of the question marks."""
        parts, values = ["kind = ?"], [self.kind]
        for column, value in (("name", self.model or self.tenant), ("version", self.version)):
            if value:
                parts.append(f"{column} = ?")
                values.append(value)
        return " AND ".join(parts), values


class Point(msgspec.Struct, array_like=True):
    """One point of the plots."""

    start_s: int
    requests: int
    answered: int
    late: int
    #: In ms, and latency ÷ target; None without answers.
    p50: float | None
    p99: float | None
    p999: float | None
    over_p50: float | None
    over_p99: float | None
    #: Mean number of lanes that ran something.
    busy: float
    #: Of the whole server; None where it told nothing.
    queue: int | None
    reserved_bytes: int | None
    #: Late answers by cause, in the order of `CAUSES`.
    causes: list[int]


class NameTotals(msgspec.Struct):
    """Totals of the window, of everything or of one name."""

    name: str
    version: str
    requests: int
    answered: int
    late: int
    #: 95 % interval of the share of late answers.
    interval: tuple[float, float]
    #: Median, 90 %, 99 % and 99.9 % of the latency in ms, and of latency ÷ target.
    latency_ms: list[float | None]
    over: list[float | None]


class View:
    """Keeps the numbers of one focus up to date; for one thread."""

    def __init__(self, focus: Focus) -> None:
        self.focus = focus
        self._span_s, self._width_s = WINDOWS[focus.window]
        #: Points that will not change any more, by their start.
        self._done: dict[int, Point] = {}
        self._tables: _Row = {}
        self._next_tables_s = 0.0

    def update(self, db: sqlite3.Connection, now_s: float) -> _Row:
        """Return all numbers at a time; points that are over are not read again."""
        until = dict(db.execute("SELECT width_s, until_s FROM bucket_until"))
        end_s = int(now_s) + 1
        begin_s = (end_s - self._span_s) // self._width_s * self._width_s
        points = self._points(db, until, begin_s, end_s)
        if time.monotonic() >= self._next_tables_s:
            began = time.thread_time()
            self._tables = self._read_tables(db, until, begin_s, end_s)
            cost_s = time.thread_time() - began
            self._next_tables_s = time.monotonic() + min(cost_s / _SHARE - 0.5, 60.0)
        runs = read_runs(db, Selection(from_unix_ns=int(now_s * 1e9)))
        run = runs[-1] if runs else None
        state = self._state(db, end_s, run)
        seen = {
            "now_s": now_s,
            "begin_s": begin_s,
            "end_s": end_s,
            "width_s": self._width_s,
            "focus": self.focus,
            "server": run,
            "state": state,
            "points": points,
            "jobs": read_jobs(db),
            **self._tables,
        }
        seen["alarms"] = alarms_of(seen["total"], seen["causes"], run, state, points)
        return seen

    def _points(
        self, db: sqlite3.Connection, until: dict[int, int], begin_s: int, end_s: int
    ) -> list[Point]:
        width_s = self._width_s
        self._done = {start_s: one for start_s, one in self._done.items() if start_s >= begin_s}
        from_s = max(self._done, default=begin_s - width_s) + width_s
        parts: dict[int, list[_Row]] = {}
        where, values = self.focus.condition()
        ranges = list(cover(until, from_s, end_s, width_s))
        for row in _read(db, ranges, where, values):
            parts.setdefault(row["start_s"] // width_s * width_s, []).append(row)
        if self.focus.kind != ALL:
            for row in _read(db, ranges, "kind = ?", [ALL]):
                states = {name: row[name] for name in ("queue", "reserved_bytes")}
                at = row["start_s"] // width_s * width_s
                parts.setdefault(at, []).append(_NOTHING | states)
        whole_s = until.get(1, 0)
        fresh = {
            start_s: _point(start_s, parts.get(start_s, []), min(width_s, end_s - start_s))
            for start_s in range(from_s, end_s, width_s)
        }
        self._done |= {at: one for at, one in fresh.items() if at + width_s <= whole_s}
        return [one for _, one in sorted((self._done | fresh).items())]

    def _read_tables(
        self, db: sqlite3.Connection, until: dict[int, int], begin_s: int, end_s: int
    ) -> _Row:
        found: dict[tuple[str, str, str], list[_Row]] = {}
        for row in _read(db, list(cover(until, begin_s, end_s, WIDTHS[-1])), "1", []):
            found.setdefault((row["kind"], row["name"], row["version"]), []).append(row)
        focus = self.focus
        mine: list[_Row] = []
        for (kind, name, version), rows in found.items():
            if (
                kind == focus.kind
                and name in (focus.model or focus.tenant or name,)
                and version in (focus.version or version,)
            ):
                mine += rows
        labels = [row["labels"] for row in mine]
        causes = label_counts(labels, LATE)
        reasons = dict(label_counts(labels, NONE).most_common())
        return {
            "total": _line("", "", mine),
            "causes": {cause: causes.pop(cause, 0) for cause in CAUSES} | dict(causes),
            "reasons": reasons,
            "meanings": {reason: REASONS[reason] for reason in reasons if reason in REASONS},
            "models": _lines(found, MODEL),
            "tenants": _lines(found, TENANT),
        }

    def _state(
        self, db: sqlite3.Connection, end_s: int, run: ServerRun | None
    ) -> dict[str, int] | None:
        started_s = run.started_unix_ns // 10**9 if run else 0
        # A clock that was set back may be before the start.
        since_s = end_s - _STATE_S if started_s > end_s else max(end_s - _STATE_S, started_s)
        row = db.execute(
            "SELECT queue, reserved_bytes, lanes_up FROM bucket WHERE width_s = 1 AND kind = 'all' "
            "AND start_s BETWEEN ? AND ? AND queue IS NOT NULL ORDER BY start_s DESC LIMIT 1",
            (since_s, end_s),
        ).fetchone()
        names = ("queue", "reserved_bytes", "lanes_up")
        return None if row is None else dict(zip(names, row, strict=True))


def cover(
    until: dict[int, int], begin_s: int, end_s: int, widest_s: int
) -> Iterator[tuple[int, int, int]]:
    """Yield widths with a begin and an end, which together cover a time once.

    The widest buckets that are whole come first; shorter ones cover what they leave at both ends.
    """
    if begin_s >= end_s:
        return
    from_s = -(-begin_s // widest_s) * widest_s
    to_s = min(end_s // widest_s * widest_s, until.get(widest_s, 0))
    if widest_s == WIDTHS[0]:
        yield widest_s, begin_s, end_s
        return
    finer_s = WIDTHS[WIDTHS.index(widest_s) - 1]
    if from_s >= to_s:
        yield from cover(until, begin_s, end_s, finer_s)
        return
    yield widest_s, from_s, to_s
    yield from cover(until, begin_s, from_s, finer_s)
    yield from cover(until, to_s, end_s, finer_s)


_READ = ("start_s", "kind", "name", "version", *COLUMNS)
_NOTHING: _Row = dict.fromkeys(COLUMNS, 0) | {"labels": "{}", "latency": b"", "over": b""}


def _read(
    db: sqlite3.Connection,
    ranges: Iterable[tuple[int, int, int]],
    where: str,
    values: list[str],
) -> Iterator[_Row]:
    for width_s, begin_s, end_s in ranges:
        rows = db.execute(
            f"SELECT {', '.join(_READ)} FROM bucket "
            f"WHERE width_s = ? AND start_s >= ? AND start_s < ? AND {where}",
            (width_s, begin_s, end_s, *values),
        )
        for row in rows:
            yield dict(zip(_READ, row, strict=True))


def _point(start_s: int, rows: list[_Row], length_s: int) -> Point:
    latency = counted(b"".join(row["latency"] for row in rows))
    over = counted(b"".join(row["over"] for row in rows))
    causes = label_counts((row["labels"] for row in rows), LATE)
    requests, answered, late = (
        sum(row[name] for row in rows) for name in ("requests", "answered", "late")
    )
    p50, p99, p999 = quantiles(latency, (0.5, 0.99, 0.999))
    over_p50, over_p99 = quantiles(over, (0.5, 0.99))
    return Point(
        start_s=start_s,
        requests=requests,
        answered=answered,
        late=late,
        p50=p50,
        p99=p99,
        p999=p999,
        over_p50=over_p50,
        over_p99=over_p99,
        busy=sum(row["run_ns"] for row in rows) / 1e9 / max(length_s, 1),
        queue=_most(row["queue"] for row in rows),
        reserved_bytes=_most(row["reserved_bytes"] for row in rows),
        causes=[causes[cause] for cause in CAUSES],
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _lines(found: dict[tuple[str, str, str], list[_Row]], kind: str) -> list[NameTotals]:
    lines = [_line(name, version, rows) for (k, name, version), rows in found.items() if k == kind]
    return sorted(lines, key=lambda line: (-line.late, -line.requests, line.name, line.version))


def _line(name: str, version: str, rows: list[_Row]) -> NameTotals:
    answered, late = sum(row["answered"] for row in rows), sum(row["late"] for row in rows)
    return NameTotals(
        name,
        version,
        sum(row["requests"] for row in rows),
        answered,
        late,
        wilson_interval(late, answered),
        quantiles(counted(b"".join(row["latency"] for row in rows)), _SHARES),
        quantiles(counted(b"".join(row["over"] for row in rows)), _SHARES),
    )
