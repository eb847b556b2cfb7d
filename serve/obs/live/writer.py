"""Writer of buckets of time: seconds as requests end, and longer ones made of them.

The table `bucket` has a row for each width, start and key (``tally``). Requests count where they
ended. The last seconds are written again with each commit; when they are over they are joined to
buckets of ten seconds, those to a minute, and so on. `bucket_until` tells, by width, up to when its
buckets are whole.
"""

import sqlite3

from serve.obs.live.tally import COLUMNS, Second, ServerState, joined
from serve.obs.live.training import ShownJob, make_table, write_jobs
from serve.obs.record import RequestRecord

#: Widths of buckets in seconds, each a multiple of the one before, and how long each is kept.
KEPT_S = {1: 900, 10: 7_500, 60: 30_000, 300: 2 * 86_400}
WIDTHS = tuple(KEPT_S)
#: Time after which a second takes no more requests.
OPEN_S = 3
#: Longest time between two rows of a state that does not change.
_STATE_S = 15
#: A clock that is so far behind what was written has been set back.
_SET_BACK_S = 60
#: Most seconds in memory while the database takes none.
_MOST_SECONDS = 120

_KEY = ("kind", "name", "version")
_NAMES = ", ".join((*_KEY, *COLUMNS))
_INSERT = (
    f"INSERT INTO bucket (width_s, start_s, {_NAMES}) "
    f"VALUES ({', '.join('?' * (2 + len(_KEY) + len(COLUMNS)))})"
)


def make_tables(db: sqlite3.Connection) -> None:
    """Create the tables where they are missing; leaves the transaction open."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS bucket (width_s INTEGER NOT NULL, start_s INTEGER NOT NULL, "
        "kind TEXT NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL, requests INTEGER NOT NULL, "
        "answered INTEGER NOT NULL, late INTEGER NOT NULL, run_ns INTEGER NOT NULL, "
        "longest_ns INTEGER NOT NULL, labels TEXT NOT NULL, latency BLOB NOT NULL, "
        "over BLOB NOT NULL, queue INTEGER, reserved_bytes INTEGER, lanes_up INTEGER)"
    )
    db.execute("CREATE INDEX IF NOT EXISTS bucket_start ON bucket (width_s, start_s, kind, name)")
    db.execute(
        "CREATE TABLE IF NOT EXISTS bucket_until "
        "(width_s INTEGER PRIMARY KEY, until_s INTEGER NOT NULL)"
    )
    make_table(db)


class BucketWriter:
    """Keeps the buckets of one database; for one thread, which commits."""

    def __init__(self, db: sqlite3.Connection, now_s: int) -> None:
        """Go on after the last run that wrote to `db`, which has the tables.

        What an earlier run wrote after `now_s`, by a clock that was ahead, is deleted.
        """
        self._db = db
        self._seconds: dict[int, Second] = {}
        self._state: ServerState | None = None
        self._state_s = 0
        #: Training jobs; those of an earlier run stand in the database until some are told.
        self._jobs: tuple[ShownJob, ...] | None = None
        self._jobs_changed = False
        self._begin(now_s)

    def _begin(self, now_s: int) -> None:
        """Go on at `now_s` after what the database holds; what lies ahead of it is deleted."""
        db = self._db
        db.execute("DELETE FROM bucket WHERE start_s > ?", (now_s,))
        (last_s,) = db.execute("SELECT max(start_s) FROM bucket WHERE width_s = 1").fetchone()
        #: Earliest second that still takes requests.
        self._open_s = now_s - OPEN_S if last_s is None else max(last_s + 1, now_s - OPEN_S)
        told = dict(db.execute("SELECT width_s, until_s FROM bucket_until"))
        #: By width, up to when its buckets are whole.
        self._until = {
            width_s: min(told.get(width_s, 0), _floor(now_s, width_s)) for width_s in WIDTHS
        }

    @property
    def changed(self) -> bool:
        """True when there is something to write."""
        return self._jobs_changed or any(second.changed for second in self._seconds.values())

    def add(self, record: RequestRecord, now_s: int) -> None:
        """Count a request that ended a moment ago; `now_s` is the time since the epoch."""
        ended_s = (record.arrived_unix_ns + record.latency_ns) // 1_000_000_000
        self._second(ended_s, now_s).add(record)

    def tell(self, state: ServerState, now_s: int) -> None:
        """Take the server's state at `now_s`."""
        if state != self._state or abs(now_s - self._state_s) >= _STATE_S:
            self._state, self._state_s = state, now_s
            self._second(now_s, now_s).tell(state)

    def tell_jobs(self, jobs: tuple[ShownJob, ...]) -> None:
        """Take the training jobs as they stand."""
        if jobs != self._jobs:
            self._jobs, self._jobs_changed = jobs, True

    def write(self, now_s: int) -> None:
        """Write what changed, join what is over and delete what is old; raises sqlite3.Error.

        When the clock has been set back, what lies ahead of it is deleted, written or not.
        """
        if self._is_set_back(now_s):
            self._seconds = {at: one for at, one in self._seconds.items() if at <= now_s}
            self._begin(now_s)
        if self._jobs_changed:
            write_jobs(self._db, self._jobs or ())
        written = [start_s for start_s, second in self._seconds.items() if second.changed]
        for start_s in written:
            where = "width_s = 1 AND start_s = ?"
            self._db.execute(f"DELETE FROM bucket WHERE {where}", (start_s,))
            for row in self._seconds[start_s].rows():
                self._db.execute(_INSERT, (1, start_s, *row))
        self._open_s = max(self._open_s, now_s - OPEN_S)
        until_s = self._open_s
        moved: dict[int, int] = {}
        for width_s in WIDTHS:
            whole_s = _floor(until_s, width_s)
            if whole_s > self._until[width_s]:
                if width_s > 1:
                    self._join(width_s, self._until[width_s], whole_s)
                moved[width_s] = whole_s
            until_s = max(whole_s, self._until[width_s])
        for width_s, whole_s in moved.items():
            self._forget(width_s, whole_s)
        self._jobs_changed = False
        for start_s in written:
            self._seconds[start_s].changed = False
        self._until.update(moved)
        for start_s in [one for one in self._seconds if one < self._open_s]:
            del self._seconds[start_s]

    def _is_set_back(self, now_s: int) -> bool:
        return now_s < self._open_s - _SET_BACK_S

    def _second(self, wanted_s: int, now_s: int) -> Second:
        open_s = now_s - OPEN_S
        if not self._is_set_back(now_s):
            open_s = max(open_s, self._open_s)
        start_s = min(max(wanted_s, open_s), max(now_s, open_s))
        second = self._seconds.get(start_s)
        if second is None:
            if len(self._seconds) >= _MOST_SECONDS:
                del self._seconds[min(self._seconds)]
            second = self._seconds[start_s] = Second()
        return second

    def _join(self, width_s: int, from_s: int, until_s: int) -> None:
        """Make the buckets of a width of those of the next smaller one."""
        finer_s = WIDTHS[WIDTHS.index(width_s) - 1]
        rows = self._db.execute(
            f"SELECT start_s, {_NAMES} FROM bucket WHERE width_s = ? AND start_s >= ? "
            "AND start_s < ? ORDER BY start_s",
            (finer_s, from_s, until_s),
        ).fetchall()
        parts: dict[int, list[tuple[object, ...]]] = {}
        for start_s, *row in rows:
            parts.setdefault(_floor(start_s, width_s), []).append(tuple(row))
        for start_s, mine in parts.items():
            for row in joined(mine):
                self._db.execute(_INSERT, (width_s, start_s, *row))

    def _forget(self, width_s: int, until_s: int) -> None:
        """Delete old buckets, which longer ones hold by now."""
        self._db.execute(
            "DELETE FROM bucket WHERE width_s = ? AND start_s < ?",
            (width_s, until_s - KEPT_S[width_s]),
        )
        self._db.execute("REPLACE INTO bucket_until VALUES (?, ?)", (width_s, until_s))


def _floor(moment_s: int, width_s: int) -> int:
    return moment_s - moment_s % width_s
