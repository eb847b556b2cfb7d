"""Writer of the report's database, for use by one thread (see ``sink``).

SQLite uses a write-ahead log with ``synchronous=NORMAL``: committed rows survive the death of the
process at any moment, and readers never wait for the writer. See ``read`` for reading.
"""

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.files import private
from serve.obs.live.tally import ServerState
from serve.obs.live.training import ShownJob
from serve.obs.live.writer import BucketWriter
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.retention import KEEP_ALL, PIECE_ROWS, Retention, Trimmer, give_back_pages
from serve.obs.schema import check_ours, field_names, migrate

_log = logging.getLogger(__name__)

#: Largest database whose integrity is checked at the start; the check reads every page.
_CHECKED_BYTES = 256 * 2**20
#: Size to which the write-ahead log is cut when a larger one is not needed any more.
_MOST_LOG_BYTES = 8 * 2**20


def _insert(table: str, names: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


_INSERT_REQUEST = _insert("request", ("run_id", *field_names(RequestRecord)))
_INSERT_RUN = _insert("server", field_names(ServerRun))

_TELL_LOST = "UPDATE server SET rows_lost = ? WHERE run_id = ?"
_TELL_TARGET = "UPDATE server SET qos_factor = ? WHERE run_id = ?"


class RecordStore:
    """Writes one server run: its own row in `server`, and one row per request."""

    def __init__(
        self,
        path: Path,
        facts: ServerRun,
        busy_timeout_s: float = 5.0,
        retention: Retention = KEEP_ALL,
    ) -> None:
        """Open or create the database at `path` and write this run's row.

        Raises ConfigError naming the path and the reason when the database cannot be written, is
        corrupt, belongs to another application or was written by a newer schema.
        """
        self.path = path
        #: Requests without a row since the start because the database could not take it.
        self.dropped = 0
        #: Rows lost before they came here, which the run's row counts too.
        self.overflowed = 0
        self._lost_told = 0
        self._uncommitted = 0
        #: Rows inserted since the last piece was deleted.
        self._inserted = 0
        self._failing = False
        # SQLite would leave the mode to the umask; files beside the database get the database's.
        # What keeps the file from being made is told by SQLite.
        with contextlib.suppress(OSError), open(path, "xb", opener=private):
            pass
        try:
            self._db = sqlite3.connect(path, timeout=busy_timeout_s, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: cannot be opened: {_reason(path, error)}") from error
        try:
            self._run_id = self._prepare(facts)
            self._trimmer = Trimmer(self._db, retention)
        except sqlite3.Error as error:
            self._db.close()
            raise ConfigError(f"{path}: cannot be used: {_reason(path, error)}") from error
        except ConfigError:
            self._db.close()
            raise

    def _prepare(self, facts: ServerRun) -> int:
        check_ours(self._db, self.path, may_be_empty=True)
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        if pages * self._db.execute("PRAGMA page_size").fetchone()[0] <= _CHECKED_BYTES:
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(f"corrupt: {found}")
        if not pages:
            give_back_pages(self._db)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        # The log keeps the size of its largest transaction otherwise.
        self._db.execute(f"PRAGMA journal_size_limit = {_MOST_LOG_BYTES}")
        migrate(self._db)
        self._buckets = BucketWriter(self._db, int(time.time()))
        run_id = self._db.execute(_INSERT_RUN, msgspec.structs.astuple(facts)).lastrowid
        self._db.commit()
        assert run_id is not None
        return run_id

    def insert(self, record: RequestRecord) -> None:
        """Add a row, which is durable after `commit`. Never raises: counts rows that fail."""
        stands_for = 1 + record.left_out
        try:
            self._db.execute(_INSERT_REQUEST, (self._run_id, *msgspec.structs.astuple(record)))
        except (OverflowError, UnicodeError) as error:
            self.dropped += stands_for
            _log.warning("request %s has no row: %s", record.request_uid, error)
        except sqlite3.Error as error:
            self._lose(stands_for, error)
        else:
            self._uncommitted += stands_for
            self._inserted += 1

    def count(self, record: RequestRecord, now_s: int) -> None:
        """Count a request that has just ended for the live page, whether it has a row or not."""
        self._buckets.add(record, now_s)

    def tell(self, state: ServerState, now_s: int) -> None:
        """Take the server's state at `now_s` for the live page."""
        self._buckets.tell(state, now_s)

    def tell_jobs(self, jobs: tuple[ShownJob, ...]) -> None:
        """Take the training jobs as they stand for the live page."""
        self._buckets.tell_jobs(jobs)

    def commit(self, now_s: int | None = None) -> None:
        """Make the inserted rows and what was counted until `now_s` durable. Never raises."""
        lost = self.dropped + self.overflowed
        if not self._uncommitted and lost == self._lost_told and not self._buckets.changed:
            return
        try:
            self._buckets.write(int(time.time()) if now_s is None else now_s)
            if lost != self._lost_told:
                self._db.execute(_TELL_LOST, (lost, self._run_id))
            self._db.commit()
        except sqlite3.Error as error:
            self._lose(0, error)
            return
        self._lost_told = lost
        written, self._uncommitted = self._uncommitted, 0
        if self._failing and written:
            self._failing = False
            _log.warning("%s: written again; %d rows were lost so far", self.path, self.dropped)

    def keep(self, retention: Retention) -> None:
        """Keep rows by other bounds from the next ``trim`` on."""
        self._trimmer.retention = retention

    def tell_target(self, qos_factor: float) -> None:
        """Have this run's row say another `qos_factor`. Never raises."""
        try:
            self._db.execute(_TELL_TARGET, (qos_factor, self._run_id))
            self._db.commit()
        except sqlite3.Error as error:
            self._lose(0, error)

    def trim(self, now_unix_ns: int) -> None:
        """Delete a piece of what is not kept any longer. Never raises.

        A piece is larger than what was inserted since the last call.
        """
        most_rows = PIECE_ROWS + 2 * self._inserted
        self._inserted = 0
        try:
            self._trimmer.trim(now_unix_ns, most_rows)
        except sqlite3.Error as error:
            self._lose(0, error)

    def close(self) -> None:
        """Commit and close, which leaves the database in one file."""
        self.commit()
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _lose(self, more: int, error: sqlite3.Error) -> None:
        """Count the requests that lost their rows: those not committed, and `more`.

        Logs the first error until writing works again.
        """
        with contextlib.suppress(sqlite3.Error):
            self._db.rollback()
        self.dropped += self._uncommitted + more
        self._uncommitted = 0
        if not self._failing:
            self._failing = True
            _log.error("%s: rows are being lost: %s; serving goes on", self.path, error)


def _reason(path: Path, error: sqlite3.Error) -> str:
    """Return why a database cannot be opened, more precisely than SQLite where possible."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if path.is_dir():
        return "it is a folder"
    return str(error)
