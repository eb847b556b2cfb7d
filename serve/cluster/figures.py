"""What a server has done, read from the sums of seconds in its report's database."""

import sqlite3
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.obs.live.tally import ALL, LATE, NONE
from serve.obs.live.writer import OPEN_S
from serve.obs.read import reading

#: Causes of late answers, and reasons of refusals, that more servers would help.
_CROWDED = frozenset({LATE + cause for cause in ("queue", "interference", "overload")}) | {
    NONE + "queue_full"
}
#: Answers that their clients did not wait for are late.
_LATE = frozenset({NONE + "deadline"})
#: Reasons that lie in the client, or in the server's end, and tell nothing of a configuration.
_NOT_COUNTED = frozenset(
    NONE + reason
    for reason in ("cancelled", "draining", "invalid_input", "malformed", "no_message", "unread")
)


class Figures(msgspec.Struct, frozen=True):
    """What a server has done since somebody began to read."""

    #: Requests that ended; those of them that were late, that failed, and that were late or refused
    #: because there was too much to do.
    ended: int = 0
    late: int = 0
    failed: int = 0
    crowded: int = 0
    #: Time of runs, summed over cores.
    run_ns: int = 0
    #: Runs that execute at once.
    cores: int = 1


class FigureReader:
    """Reads what one server has done, second by second."""

    def __init__(self, database: Path, now_s: int) -> None:
        """Count what ends from `now_s` on, seconds since the epoch."""
        self._database = database
        self._from_s = now_s
        self._figures = Figures()

    def read(self, now_s: int) -> Figures:
        """Return what it has done until the last second that is over and can be read."""
        until_s = now_s - OPEN_S
        if until_s > self._from_s:
            try:
                with reading(self._database) as db:
                    self._figures = _added(self._figures, db, self._from_s, until_s)
                self._from_s = until_s
            except (ConfigError, sqlite3.Error):
                pass  # it does not exist yet, or is being made
        return self._figures


def _added(before: Figures, db: sqlite3.Connection, from_s: int, until_s: int) -> Figures:
    ended, late, failed = before.ended, before.late, before.failed
    crowded, run_ns = before.crowded, before.run_ns
    for requests, answers_late, busy_ns, labels in db.execute(
        "SELECT requests, late, run_ns, labels FROM bucket "
        "WHERE width_s = 1 AND kind = ? AND start_s >= ? AND start_s < ?",
        (ALL, from_s, until_s),
    ):
        counts = msgspec.json.decode(labels, type=dict[str, int])
        skipped = sum(counts.get(label, 0) for label in _NOT_COUNTED)
        expired = sum(counts.get(label, 0) for label in _LATE)
        without = sum(count for label, count in counts.items() if label.startswith(NONE))
        ended += requests - skipped
        late += answers_late + expired
        failed += without - skipped - expired
        crowded += sum(counts.get(label, 0) for label in _CROWDED)
        run_ns += busy_ns
    row = db.execute("SELECT lanes FROM server ORDER BY run_id DESC LIMIT 1").fetchone()
    cores = max(1, row[0]) if row else 1
    return Figures(ended, late, failed, crowded, run_ns, cores)
