"""Reader of the report's database, also while a server writes to it."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from serve.errors import ConfigError
from serve.obs.frame import Column, Frame
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.schema import check_ours, columns_present
from serve.obs.selection import Selection


def read_runs(db: sqlite3.Connection, chosen: Selection) -> list[ServerRun]:
    """Return the server's runs, in their order; without those that ended before `chosen` begins.

    Runs that began after it ends are left out too.
    """
    present = columns_present(db, "server")
    names = [name for name in ServerRun.__struct_fields__ if name in present]
    rows = db.execute(f"SELECT {', '.join(names)} FROM server ORDER BY run_id")
    runs = [msgspec.convert(dict(zip(names, row, strict=True)), ServerRun) for row in rows]
    until = chosen.until_unix_ns or time.time_ns() + 2**61
    return [
        run
        for run, after in zip_longest(runs, runs[1:])
        if run.started_unix_ns < until
        and (after is None or after.started_unix_ns > chosen.from_unix_ns)
    ]


def read_rows(
    path: Path, chosen: Selection | None = None, most: int = -1
) -> Iterator[tuple[Any, ...]]:
    """Yield the chosen rows in order of arrival, `run_id` first; at most `most` unless negative.

    Raises ConfigError, naming path and reason, when the database cannot be read.
    """
    where, values = (chosen or Selection()).condition()
    with reading(path) as db:
        yield from _requests(db, f"{where} ORDER BY arrived_unix_ns, row_id LIMIT {most}", values)


def first_and_last(db: sqlite3.Connection, chosen: Selection) -> tuple[int, int]:
    """Return the first and the last arrival of the chosen requests, or zeros."""
    where, values = chosen.condition()
    found = [
        db.execute(
            f"SELECT arrived_unix_ns FROM {request_table(db)} WHERE {where} "
            f"ORDER BY arrived_unix_ns {order} LIMIT 1",
            values,
        ).fetchone()
        for order in ("ASC", "DESC")
    ]
    first, last = (row[0] if row else 0 for row in found)
    return first, last


def read_frame(db: sqlite3.Connection, row_ids: Column) -> Frame:
    """Return rows by their ids, in order of arrival."""
    marks = ", ".join("?" * len(row_ids))
    clause = f"row_id IN ({marks}) ORDER BY arrived_unix_ns, row_id"
    return Frame.of_rows(_requests(db, clause, row_ids.tolist()))


def read_present(
    db: sqlite3.Connection, chosen: Selection, begin_ns: int, end_ns: int, longest_ns: int
) -> Frame:
    """Return the chosen requests that were in the server between two moments.

    No latency exceeds `longest_ns`, which bounds when they arrived.
    """
    where, values = chosen.condition()
    clause = (
        f"{where} AND arrived_unix_ns BETWEEN ? AND ? AND arrived_unix_ns + latency_ns >= ? "
        "ORDER BY arrived_unix_ns, row_id"
    )
    return Frame.of_rows(_requests(db, clause, [*values, begin_ns - longest_ns, end_ns, begin_ns]))


def group_mates(db: sqlite3.Connection, rows: Frame, i: int, longest_ns: int) -> list[str]:
    """Return the ids of other requests in the group of row `i`, at most eight.

    Requests of one group waited at the same time, which bounds when they arrived.
    """
    group, arrived = int(rows["group_id"][i]), int(rows["arrived_unix_ns"][i])
    if group < 0:
        return []
    found = db.execute(
        "SELECT request_uid FROM request WHERE arrived_unix_ns BETWEEN ? AND ? AND run_id = ? "
        "AND group_id = ? AND request_uid <> ? ORDER BY arrived_unix_ns, row_id LIMIT 8",
        (arrived - longest_ns, arrived + int(rows["latency_ns"][i]), int(rows["run_id"][i]),
         group, rows["request_uid"][i]),
    )  # fmt: skip
    return [uid for (uid,) in found]


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection; raises ConfigError unless the database is gnnserve's."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such report database; a server makes it when it starts")
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as db:
            check_ours(db, path, may_be_empty=False)
            yield db
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def request_table(db: sqlite3.Connection) -> str:
    """Return the table of requests for FROM; columns that an older database lacks are 0 or ''."""
    present = columns_present(db, "request")
    fields = msgspec.structs.fields(RequestRecord)
    if all(field.encode_name in present for field in fields):
        return "request"
    names = (
        field.encode_name
        if field.encode_name in present
        else f"{_literal(field)} AS {field.encode_name}"
        for field in fields
    )
    return f"(SELECT row_id, run_id, {', '.join(names)} FROM request)"


def _literal(field: msgspec.structs.FieldInfo) -> str:
    default = field.type() if field.default is msgspec.NODEFAULT else field.default
    return "NULL" if default is None else "''" if default == "" else str(int(default))


def _requests(
    db: sqlite3.Connection, clause: str, values: Sequence[str | int]
) -> Iterator[tuple[Any, ...]]:
    names = ", ".join(RequestRecord.__struct_fields__)
    return db.execute(f"SELECT run_id, {names} FROM {request_table(db)} WHERE {clause}", values)
