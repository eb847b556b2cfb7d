"""Commands about the report's database: `db info|prune|vacuum|backup`."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from serve.errors import ConfigError
from serve.obs.retention import (
    PIECE_ROWS,
    Retention,
    Trimmer,
    free_bytes,
    give_back_pages,
    used_bytes,
)
from serve.obs.schema import check_ours
from serve.terminal import Console
from serve.units import format_bytes, parse_bytes, parse_duration

app = typer.Typer(help="Look after the report's database, also while its server runs.")

DatabaseOption = Annotated[Path, typer.Option("--db", help="The server's database.")]
_DATABASE = Path("gnnserve.db")
#: Time to wait for a server that is writing.
_BUSY_S = 10.0


class Contents(msgspec.Struct, frozen=True):
    """What a database holds."""

    path: str
    requests: int
    #: Number of starts of the server.
    starts: int
    #: Rows that the database could not take.
    rows_lost: int
    #: First and last arrival, RFC 3339 in UTC; None without requests.
    first: str | None
    last: str | None
    used_bytes: int
    free_bytes: int


@app.command("info")
def info_command(
    db: DatabaseOption = _DATABASE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what the database holds, from when to when, and its size."""
    with _opened(db) as connection:
        found = _contents(db, connection)
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        Console().print(_table(found))


@app.command("prune")
def prune_command(
    db: DatabaseOption = _DATABASE,
    keep: Annotated[
        str | None, typer.Option(help="Delete requests older than 90m, 12h or 30d.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Delete the oldest requests beyond a size such as 1 GiB.")
    ] = None,
) -> None:
    """Delete old requests, in pieces between which a server may write."""
    if keep is None and max_size is None:
        raise ConfigError("give --keep or --max-size, or both")
    retention = Retention(
        None if keep is None else int(parse_duration(keep, "--keep") * 1e9),
        None if max_size is None else parse_bytes(max_size, "--max-size"),
    )
    deleted = 0
    with _opened(db) as connection:
        trimmer = Trimmer(connection, retention)
        while piece := trimmer.trim(time.time_ns(), PIECE_ROWS):
            deleted += piece
    typer.echo(f"{deleted} requests deleted")


@app.command("vacuum")
def vacuum_command(db: DatabaseOption = _DATABASE) -> None:
    """Rewrite the file without free pages; needs room for a copy, and no running server."""
    with _opened(db) as connection:
        before_bytes = used_bytes(connection) + free_bytes(connection)
        # A server would lose rows if it had to wait for long. This lock wants no other connection.
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        try:
            connection.execute("BEGIN EXCLUSIVE")
            connection.rollback()
        except sqlite3.OperationalError as error:
            raise ConfigError(f"{db}: in use, by a running server or a report: {error}") from error
        give_back_pages(connection)
        connection.execute("VACUUM")
        after_bytes = used_bytes(connection) + free_bytes(connection)
    typer.echo(f"{format_bytes(before_bytes)} before, {format_bytes(after_bytes)} now")


@app.command("backup")
def backup_command(
    target: Annotated[Path, typer.Argument(help="The copy; it must not exist.")],
    db: DatabaseOption = _DATABASE,
) -> None:
    """Copy the database as it is at one moment, also while its server writes."""
    if target.exists():
        raise ConfigError(f"{target}: exists already")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist")
    draft = target.with_name(f".{target.name}.part")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(0o600)
        with _opened(db) as connection:
            connection.execute("VACUUM INTO ?", (str(draft),))
        draft.rename(target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    typer.echo(f"{target}: {format_bytes(target.stat().st_size)}")


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an existing database of ours; raises ConfigError when it is none, or it fails."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such database")
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
            check_ours(connection, path, may_be_empty=False)
            yield connection
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}") from error


def _contents(path: Path, db: sqlite3.Connection) -> Contents:
    requests, first_ns, last_ns = db.execute(
        "SELECT count(*), min(arrived_unix_ns), max(arrived_unix_ns) FROM request"
    ).fetchone()
    starts, lost = db.execute("SELECT count(*), coalesce(sum(rows_lost), 0) FROM server").fetchone()
    return Contents(
        path=str(path),
        requests=requests,
        starts=starts,
        rows_lost=lost,
        first=_moment(first_ns),
        last=_moment(last_ns),
        used_bytes=used_bytes(db),
        free_bytes=free_bytes(db),
    )


def _moment(unix_ns: int | None) -> str | None:
    if unix_ns is None:
        return None
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).isoformat().replace("+00:00", "Z")


def _table(found: Contents) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "database": found.path,
        "requests": f"{found.requests:,}",
        "first": found.first or "none",
        "last": found.last or "none",
        "starts of the server": f"{found.starts:,}",
        "rows lost": f"{found.rows_lost:,}",
        "size": f"{format_bytes(found.used_bytes)}, and {format_bytes(found.free_bytes)} free",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
