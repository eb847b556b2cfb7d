"""Schema of the report's database: one table per struct of ``record``, one column per field.

Buckets of time for the live page have tables of their own (``live.writer``).

A new field of a struct adds its column to an older database at the next start. A database with more
columns than this version knows stays readable and writable. ``SCHEMA_VERSION`` rises only for
changes that an older version cannot handle, which then refuses the database.
"""

import sqlite3
import types
from pathlib import Path
from typing import Any, get_args

import msgspec

from serve.errors import ConfigError
from serve.obs.live.writer import make_tables
from serve.obs.record import RequestRecord, ServerRun

SCHEMA_VERSION = 1
#: Marks the file as gnnserve's ("GNNS"), so that no other application's database is written to.
APPLICATION_ID = 0x474E4E53

TABLES: dict[str, type[msgspec.Struct]] = {"server": ServerRun, "request": RequestRecord}

_SQL_TYPES = {str: ("TEXT", "''"), int: ("INTEGER", "0"), bool: ("INTEGER", "0"),
              float: ("REAL", "0.0")}  # fmt: skip


def field_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the struct's fields, which are its table's columns, in order."""
    return kind.__struct_fields__


def value_type(annotation: Any) -> tuple[type, bool]:
    """Return the plain type of a field, and True when it may be None."""
    if isinstance(annotation, types.UnionType):
        plain = [arg for arg in get_args(annotation) if arg is not types.NoneType]
        return plain[0], True
    return annotation, False


def _column(field: msgspec.structs.FieldInfo) -> str:
    plain, optional = value_type(field.type)
    sql_type, zero = _SQL_TYPES[plain]
    default = "" if optional else f" NOT NULL DEFAULT {zero}"
    return f'"{field.encode_name}" {sql_type}{default}'


def migrate(db: sqlite3.Connection) -> None:
    """Create the tables, or add the columns that an older database lacks.

    Leaves the transaction open: nothing changes until the caller commits.
    """
    db.execute("BEGIN IMMEDIATE")
    # Requests refer to their server run, because group ids start again with each run.
    db.execute("CREATE TABLE IF NOT EXISTS server (run_id INTEGER PRIMARY KEY)")
    db.execute(
        "CREATE TABLE IF NOT EXISTS request "
        "(row_id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES server)"
    )
    for table, kind in TABLES.items():
        present = columns_present(db, table)
        for field in msgspec.structs.fields(kind):
            if field.encode_name not in present:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {_column(field)}")
    db.execute("CREATE INDEX IF NOT EXISTS request_arrived ON request (arrived_unix_ns)")
    make_tables(db)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def columns_present(db: sqlite3.Connection, table: str) -> frozenset[str]:
    """Return the columns that a table has in this database."""
    return frozenset(row[1] for row in db.execute(f"PRAGMA table_info({table})"))


def check_ours(db: sqlite3.Connection, path: Path, *, may_be_empty: bool) -> None:
    """Raise ConfigError unless the database has this or an older schema of gnnserve."""
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if not tables and may_be_empty:
        return
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    if application_id != APPLICATION_ID:
        held = f"it holds {', '.join(tables[:3])}" if tables else "it is empty"
        raise ConfigError(f"{path}: not a gnnserve report database: {held}")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: written by a newer gnnserve: schema {version}, "
            f"this version knows up to {SCHEMA_VERSION}"
        )
