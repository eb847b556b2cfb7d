"""The live numbers of several servers as those of one. No clock, no I/O.

Counts are added up. A percentile of several servers is not known from theirs; the highest of them
is shown, which that of all together does not exceed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from serve.obs.live.tally import ServerState
from serve.obs.live.view import CAUSES, NameTotals, Point
from serve.wilson import wilson_interval

#: Most points of a server that are kept, whatever it sends; a window of five minutes has 301.
MOST_POINTS = 400
#: Above what any server gives; beyond it numbers of JavaScript are not exact.
_MOST_ANSWERS = 1 << 53
#: Percentiles of a total: 50, 90, 99 and 99.9 %.
_SHARES = 4


class LaneFacts(msgspec.Struct):
    """What a server has for runs."""

    lanes: int
    budget_bytes: int
    lanes_started: int = 0


class Seen(msgspec.Struct):
    """What a server's stream of numbers says, as far as it is read here."""

    begin_s: int
    end_s: int
    width_s: int
    points: list[Point]
    total: NameTotals
    models: list[NameTotals]
    reasons: dict[str, int]
    meanings: dict[str, str]
    alarms: list[str]
    server: LaneFacts | None = None
    state: ServerState | None = None


class MachineSeen(msgspec.Struct):
    """What is known of one machine."""

    machine: str
    #: `host:port` of its server for HTTP.
    address: str
    #: The last that it said; None when it said nothing yet.
    seen: Seen | None = None
    #: Why it says nothing; empty while it does.
    problem: str = ""
    #: When it said something last, Unix seconds; 0 for never.
    heard_s: float = 0.0

    @property
    def answers(self) -> bool:
        """True while it says what it does."""
        return self.seen is not None and not self.problem


def with_changes(before: Sequence[Point], seen: Seen) -> Seen:
    """Return what a server says together with the points that it said before.

    Raises ValueError for counts that cannot be, which would spoil the sums of all.
    """
    counted: tuple[Point | NameTotals, ...] = (*seen.points, seen.total, *seen.models)
    for one in counted:
        if not 0 <= one.late <= one.answered <= _MOST_ANSWERS:
            raise ValueError("it tells of more late answers than answers, or of too many")
    whole = (point for point in seen.points if len(point.causes) == len(CAUSES))
    points = {point.start_s: point for point in (*before, *whole)}
    kept = sorted(at for at in points if at >= seen.begin_s)[-MOST_POINTS:]
    return msgspec.structs.replace(seen, points=[points[at] for at in kept])


def summed(machines: Sequence[MachineSeen], now_s: float) -> dict[str, Any]:
    """Return the numbers of all machines, in the shape of a server's stream, and a row for each.

    A machine that says nothing stays in the plots with what it said before.
    """
    heard = [one.seen for one in machines if one.seen is not None]
    now = [one.seen for one in machines if one.seen is not None and one.answers]
    end_s = max((seen.end_s for seen in now), default=int(now_s) + 1)
    span_s = max((seen.end_s - seen.begin_s for seen in heard), default=0)
    points = _points((seen.points for seen in heard), end_s - span_s)
    states = [seen.state for seen in now if seen.state is not None]
    servers = [seen.server for seen in now if seen.server is not None]
    return {
        "begin_s": end_s - span_s,
        "end_s": end_s,
        "width_s": max((seen.width_s for seen in heard), default=1),
        "server": {
            "lanes": sum(one.lanes for one in servers),
            "lanes_started": sum(one.lanes_started or one.lanes for one in servers),
            "budget_bytes": sum(one.budget_bytes for one in servers),
        },
        "state": {
            "queue": sum(one.queue for one in states),
            "reserved_bytes": sum(one.reserved_bytes for one in states),
            "lanes_up": sum(one.lanes_up for one in states),
        },
        "points": points,
        "total": _totals("", "", points, [seen.total for seen in now]),
        "causes": {name: sum(one.causes[i] for one in points) for i, name in enumerate(CAUSES)},
        "reasons": _added(seen.reasons for seen in now),
        "meanings": {name: text for seen in now for name, text in seen.meanings.items()},
        "models": _models(now),
        "alarms": [
            f"{one.machine}: {text}"
            for one in machines
            if one.seen is not None and one.answers
            for text in one.seen.alarms
        ],
        "machines": [_row(one) for one in machines],
    }


def _row(one: MachineSeen) -> dict[str, Any]:
    seen = one.seen if one.answers else None
    return {
        "machine": one.machine,
        "address": one.address,
        "problem": one.problem,
        "heard_s": one.heard_s,
        "total": None if seen is None else seen.total,
        "state": None if seen is None else seen.state,
        "server": None if seen is None else seen.server,
    }


def _points(all_points: Iterable[Sequence[Point]], begin_s: int) -> list[Point]:
    by_time: dict[int, list[Point]] = {}
    for points in all_points:
        for point in points:
            if point.start_s >= begin_s:
                by_time.setdefault(point.start_s, []).append(point)
    return [_point(start_s, found) for start_s, found in sorted(by_time.items())]


def _point(start_s: int, points: Sequence[Point]) -> Point:
    return Point(
        start_s=start_s,
        requests=sum(one.requests for one in points),
        answered=sum(one.answered for one in points),
        late=sum(one.late for one in points),
        p50=_highest(one.p50 for one in points),
        p99=_highest(one.p99 for one in points),
        p999=_highest(one.p999 for one in points),
        over_p50=_highest(one.over_p50 for one in points),
        over_p99=_highest(one.over_p99 for one in points),
        busy=sum(one.busy for one in points),
        queue=sum(one.queue or 0 for one in points),
        reserved_bytes=sum(one.reserved_bytes or 0 for one in points),
        causes=[sum(one.causes[i] for one in points) for i in range(len(CAUSES))],
    )


def _totals(
    name: str, version: str, counted: Sequence[Point | NameTotals], totals: Sequence[NameTotals]
) -> NameTotals:
    """Return totals: the counts of `counted`, and the highest percentiles of `totals`."""
    answered, late = sum(one.answered for one in counted), sum(one.late for one in counted)
    return NameTotals(
        name,
        version,
        sum(one.requests for one in counted),
        answered,
        late,
        wilson_interval(late, answered),
        _highest_of([one.latency_ms for one in totals]),
        _highest_of([one.over for one in totals]),
    )


def _models(heard: Sequence[Seen]) -> list[NameTotals]:
    by_name: dict[tuple[str, str], list[NameTotals]] = {}
    for seen in heard:
        for line in seen.models:
            by_name.setdefault((line.name, line.version), []).append(line)
    lines = [_totals(*named, found, found) for named, found in by_name.items()]
    return sorted(lines, key=lambda line: (-line.late, -line.requests, line.name, line.version))


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _highest_of(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [_highest(row[i] for row in rows if i < len(row)) for i in range(_SHARES)]
