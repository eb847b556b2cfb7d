"""Requests behind a point of the live page, and the story of one."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from serve.errors import DeadlineExceeded, UnknownName
from serve.obs.explanations import CAUSES, REASONS, STAGES
from serve.obs.frame import Frame
from serve.obs.live.writer import WIDTHS
from serve.obs.read import group_mates, read_frame, read_present, request_table
from serve.obs.selection import Selection
from serve.obs.violations import Violation, violations_of
from serve.units import format_ms

#: Most requests that are listed, and most that are shown beside one.
MOST_LISTED, MOST_BESIDE = 100, 60
#: Steps of SQLite's machine after which it gives up: a second or two.
_STEPS, _STEPS_AT_ONCE = 60_000_000, 1_000_000
_NS = 1_000_000_000


class Listed(msgspec.Struct, kw_only=True):
    """A request in a list. Times in ms."""

    request_uid: str
    model: str
    version: str
    tenant: str
    #: µs since the epoch, which JavaScript's numbers hold exactly, unlike ns.
    arrived_unix_us: int
    status: str
    reason: str
    cause: str
    late: bool
    latency_ms: float
    target_ms: float


class Beside(msgspec.Struct, kw_only=True):
    """A request that ran while another was in the server; times in ms after that one's arrival."""

    request_uid: str
    model: str
    lane: int
    group: bool
    late: bool
    began_ms: float
    ended_ms: float


class Story(msgspec.Struct, kw_only=True):
    """What happened to one request."""

    version: str
    status: str
    message: str
    executor: str
    #: The request with its stages; ``Violation`` holds for requests that were in time, too.
    facts: Violation
    late: bool
    stage_names: dict[str, str]
    #: What happened, and what would have helped.
    why: str
    remedies: list[str]
    #: Runs while it was in the server, those nearest to its own where there were many, and how many
    #: more there were.
    beside: list[Beside]
    left_out: int


@contextmanager
def bounded(db: sqlite3.Connection) -> Iterator[None]:
    """End queries in the block that take too long; raises DeadlineExceeded."""
    left = _STEPS // _STEPS_AT_ONCE

    def step() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    db.set_progress_handler(step, _STEPS_AT_ONCE)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        raise DeadlineExceeded(
            "the database is too large for this question; ask for less time, or give the time of "
            "arrival"
        ) from error
    finally:
        db.set_progress_handler(None, 0)


def requests_between(
    db: sqlite3.Connection, chosen: Selection, begin_s: int, end_s: int, most: int = MOST_LISTED
) -> tuple[int, list[Listed]]:
    """Return how many of the chosen requests ended in a time, and the first ones.

    Those without a result and the latest come first. Raises DeadlineExceeded for too long a search.
    """
    where, values = chosen.condition()
    begin_ns, end_ns = begin_s * _NS, end_s * _NS
    source = (
        f"FROM {request_table(db)} WHERE {where} AND arrived_unix_ns BETWEEN ? AND ? "
        "AND arrived_unix_ns + latency_ns >= ? AND arrived_unix_ns + latency_ns < ?"
    )
    bounds = [*values, begin_ns - _longest_ns(db, begin_s, end_s), end_ns, begin_ns, end_ns]
    with bounded(db):
        (count,) = db.execute(f"SELECT coalesce(sum(1 + left_out), 0) {source}", bounds).fetchone()
        rows = db.execute(
            "SELECT request_uid, model, version, tenant, arrived_unix_ns, status, reason, cause, "
            f"violated, latency_ns, qos_target_ns {source} ORDER BY status = 'OK', violated DESC, "
            "latency_ns * 1.0 / max(qos_target_ns, 1) DESC LIMIT ?",
            [*bounds, most],
        ).fetchall()
    return count, [
        Listed(
            request_uid=row[0], model=row[1], version=row[2], tenant=row[3],
            arrived_unix_us=row[4] // 1000, status=row[5], reason=row[6], cause=row[7],
            late=row[5] == "OK" and bool(row[8]), latency_ms=row[9] / 1e6, target_ms=row[10] / 1e6,
        )
        for row in rows
    ]  # fmt: skip


def story_of(db: sqlite3.Connection, uid: str, arrived_unix_us: int = 0) -> Story:
    """Return the story of a request; its time of arrival, if known, makes the search short.

    Raises UnknownName when no row has this id, and DeadlineExceeded for too long a search.
    """
    near = "arrived_unix_ns BETWEEN ? AND ? AND" if arrived_unix_us else ""
    values = (arrived_unix_us * 1000, arrived_unix_us * 1000 + 999) if arrived_unix_us else ()
    with bounded(db):
        found = db.execute(
            f"SELECT row_id, message FROM request WHERE {near} request_uid = ? "
            "ORDER BY row_id DESC LIMIT 1",
            (*values, uid),
        ).fetchone()
        if found is None:
            raise UnknownName(f"request '{uid[:64]}': the report has no row with this id")
        frame = read_frame(db, np.array([found[0]]))
        return _told(db, frame, found[1])


def _told(db: sqlite3.Connection, frame: Frame, message: str) -> Story:
    arrived = int(frame["arrived_unix_ns"][0])
    ended = arrived + int(frame["latency_ns"][0])
    longest = max(_longest_ns(db, arrived // _NS, ended // _NS + 1), ended - arrived)
    facts = violations_of(frame, [group_mates(db, frame, 0, longest)])[0]
    late = bool(frame.violated[0])
    status, reason = str(frame["status"][0]), str(frame["reason"][0])
    if late:
        why = CAUSES.get(facts.cause, ("", ""))[0]
        why = f"Late because of {facts.cause}: it {why}." if why else "Late."
    elif status == "OK":
        why = "Answered in time." if facts.qos_target_ms else "Answered; it had no target."
    else:
        why = f"No result: {REASONS.get(reason, reason or status)}."
    if facts.front_ms:
        why += f" A front had it {format_ms(facts.front_ms)} before it was here."
    ran_beside = read_present(db, Selection(), arrived, ended, longest)
    beside, left_out = _beside(ran_beside, facts, frame)
    return Story(
        version=str(frame["version"][0]),
        status=status,
        message=message,
        executor=str(frame["executor"][0]),
        facts=facts,
        late=late,
        stage_names=STAGES,
        why=why,
        remedies=list(_remedies(facts)) if late else [],
        beside=beside,
        left_out=left_out,
    )


def _remedies(facts: Violation) -> Iterator[str]:
    """Yield what would have changed the latency, largest first, and what to try."""
    if facts.cause == "network":
        yield f"Try first: {CAUSES[facts.cause][1]}."
        return
    stages = facts.stages_ms
    saved = {
        "without waiting for a lane or memory": stages["queue"],
        "with a run as long as estimated": max(stages["run"] - facts.run_estimate_ms, 0.0),
        "without the wait for its inputs": stages["prepare_exposed"],
        "without being suspended for more urgent requests": stages["suspended"],
        "with an answer handed over at once": stages["answer"],
    }
    for what, ms in sorted(saved.items(), key=lambda item: -item[1]):
        if ms < 0.05 * facts.latency_ms:
            continue
        left = facts.latency_ms - ms
        end = "in time" if left <= facts.qos_target_ms else "still late"
        yield f"{what[0].upper()}{what[1:]}: {format_ms(left)}, {end}."
    if facts.qos_target_ms < facts.solo_estimate_ms:
        yield (
            f"No order of requests helps: its target, {format_ms(facts.qos_target_ms)}, is less "
            f"than its estimated time alone, {format_ms(facts.solo_estimate_ms)}."
        )
    remedy = CAUSES.get(facts.cause, ("", ""))[1]
    if remedy:
        yield f"Try first: {remedy}."


def _beside(rows: Frame, facts: Violation, mine: Frame) -> tuple[list[Beside], int]:
    """Return the runs on lanes of the same server as they began, and how many are left out.

    The nearest to the request's own run are kept: those that ended at most a little before it began
    say what it waited for.
    """
    rows = rows.where(rows.launched & (rows["run_id"] == mine["run_id"][0]))
    rows = rows.where(rows.finished_unix_ns > facts.arrived_unix_ns)
    launched, finished = int(mine.launched_unix_ns[0]), int(mine.finished_unix_ns[0])
    apart = np.maximum(launched - rows.finished_unix_ns, rows.launched_unix_ns - finished)
    nearest = np.argsort(np.maximum(apart, 0), kind="stable")[:MOST_BESIDE]
    order = nearest[rows.launched_unix_ns[nearest].argsort(kind="stable")]
    return [
        Beside(
            request_uid=rows["request_uid"][i],
            model=rows["model"][i],
            lane=int(rows["lane"][i]),
            group=facts.group_id >= 0 and int(rows["group_id"][i]) == facts.group_id,
            late=bool(rows.violated[i]),
            began_ms=(int(rows.launched_unix_ns[i]) - facts.arrived_unix_ns) / 1e6,
            ended_ms=(int(rows.finished_unix_ns[i]) - facts.arrived_unix_ns) / 1e6,
        )
        for i in order.tolist()
    ], len(rows) - len(order)


def _longest_ns(db: sqlite3.Connection, begin_s: int, end_s: int) -> int:
    """Return a bound of the latency of requests that ended at about a time."""
    (longest,) = db.execute(
        f"SELECT max(longest_ns) FROM bucket WHERE width_s IN ({', '.join(map(str, WIDTHS))}) "
        "AND start_s BETWEEN ? AND ? AND kind = 'all'",
        (begin_s - WIDTHS[-1], end_s + WIDTHS[-1]),
    ).fetchone()
    return int(longest or 60 * _NS)
