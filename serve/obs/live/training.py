"""Training jobs as the live page shows them."""

import sqlite3
from collections.abc import Sequence

import msgspec

#: Most jobs on the page.
MOST_SHOWN = 20


class ShownJob(msgspec.Struct, frozen=True, kw_only=True):
    """A training job as it stands."""

    job_id: int
    model: str
    graph: str
    #: `queued`, `preparing`, `ready`, `running`, `paused`; `done`, `cancelled` or `failed`.
    state: str
    epochs: int
    epochs_done: int
    #: Of the last epoch that was told; 0 before, None for no number.
    loss: float | None
    #: Mean time of an epoch lately, standing still not counted; 0 before the first.
    epoch_ns: int
    #: Version that it was published as; 0 before.
    version: int
    #: Why it failed.
    message: str


def make_table(db: sqlite3.Connection) -> None:
    """Create the table where it is missing; leaves the transaction open."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS live_job (job_id INTEGER PRIMARY KEY, facts TEXT NOT NULL)"
    )


def write_jobs(db: sqlite3.Connection, jobs: Sequence[ShownJob]) -> None:
    """Have the database hold these jobs and no others; leaves the transaction open."""
    db.execute("DELETE FROM live_job")
    db.executemany(
        "INSERT INTO live_job VALUES (?, ?)",
        [(job.job_id, msgspec.json.encode(job).decode()) for job in jobs],
    )


def read_jobs(db: sqlite3.Connection) -> list[ShownJob]:
    """Return the jobs, the newest first."""
    rows = db.execute("SELECT facts FROM live_job ORDER BY job_id DESC")
    return [msgspec.json.decode(facts, type=ShownJob) for (facts,) in rows]
