"""Reader of the report's database, also while a server writes to it."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from serve.errors import ConfigError
from serve.obs.frame import Frame
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.schema import check_ours, columns_present


def read_database(path: Path, since_s: float | None = None) -> tuple[Frame, list[ServerRun]]:
    """Return the requests that arrived in the last `since_s` seconds, and the server's runs.

    Returns all requests when `since_s` is 0 or None. Raises ConfigError, naming path and reason,
    when the database cannot be read.
    """
    with _reading(path) as db:
        runs = [
            msgspec.convert(dict(zip(ServerRun.__struct_fields__, row, strict=True)), ServerRun)
            for row in _select(db, "server", ServerRun, "ORDER BY run_id")
        ]
        return Frame.of_rows(_requests(db, since_s)), runs


def read_rows(path: Path, since_s: float | None = None) -> Iterator[tuple[Any, ...]]:
    """Yield rows in order of arrival, `run_id` first; see `read_database`."""
    with _reading(path) as db:
        yield from _requests(db, since_s)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
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


def _requests(db: sqlite3.Connection, since_s: float | None) -> Iterator[tuple[Any, ...]]:
    oldest = 0 if not since_s else time.time_ns() - int(since_s * 1e9)
    return _select(
        db,
        "request",
        RequestRecord,
        "WHERE arrived_unix_ns >= ? ORDER BY arrived_unix_ns, row_id",
        (oldest,),
        first="run_id, ",
    )


def _select(
    db: sqlite3.Connection,
    table: str,
    kind: type[msgspec.Struct],
    clause: str,
    values: tuple[Any, ...] = (),
    first: str = "",
) -> Iterator[tuple[Any, ...]]:
    """Select a struct's columns; those that an older database lacks get their default value."""
    present = columns_present(db, table)
    missing = [
        field.default if field.default is not msgspec.NODEFAULT else field.type()
        for field in msgspec.structs.fields(kind)
        if field.encode_name not in present
    ]
    names = (name if name in present else "?" for name in kind.__struct_fields__)
    return db.execute(
        f"SELECT {first}{', '.join(names)} FROM {table} {clause}", (*missing, *values)
    )
