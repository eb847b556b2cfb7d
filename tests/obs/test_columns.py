"""Columns of queries: compiled code and Python read the same."""

import random
import sqlite3
from pathlib import Path

import pytest

from serve.obs import columns
from serve.obs.columns import BATCH, batches, compiled_rows

QUERY = "SELECT name, why, number, number / 2 FROM t WHERE number >= ? AND name <> ? ORDER BY id"


def database(path, rows, seed=0):
    rng = random.Random(seed)
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, why TEXT, number INTEGER)")
    names = ["gcn", "", "größer", "a\0b", "<b>", "no"]
    db.executemany(
        "INSERT INTO t (name, why, number) VALUES (?, ?, ?)",
        (
            (rng.choice(names), rng.choice([None, "queue"]), rng.choice([-1, 0, 2**62]))
            for _ in range(rows)
        ),
    )
    db.commit()
    return db


def all_rows(found):
    """Return the rows as tuples, with texts in place of codes."""
    rows = []
    for names, parts in found:
        texts = [
            [None if code < 0 else known[code] for code in part.tolist()]
            for known, part in zip(names, parts, strict=False)
        ]
        rows += zip(*texts, *(part.tolist() for part in parts[len(names) :]), strict=True)
    return rows


@pytest.mark.parametrize("count", [0, 1, 700, BATCH, BATCH + 1])
@pytest.mark.parametrize("way", ["compiled", "python"])
def test_columns_are_the_rows_of_the_query(tmp_path, monkeypatch, count, way):
    if way == "python":
        monkeypatch.setattr(columns, "compiled_rows", lambda *_: None)
    db = database(tmp_path / "t.db", count)
    wanted = (-1, "no")
    assert all_rows(batches(db, QUERY, wanted, 2)) == db.execute(QUERY, wanted).fetchall()


def test_compiled_code_reads_where_python_has_a_shared_sqlite(tmp_path):
    if "libsqlite3.so.0" not in Path("/proc/self/maps").read_text():
        pytest.skip("Python's SQLite is no shared library")
    db = database(tmp_path / "t.db", 1)
    assert compiled_rows(db, QUERY, (0, ""), 2) is not None


def test_a_database_in_memory_is_read():
    db = database(":memory:", 10)
    assert all_rows(batches(db, QUERY, (-1, ""), 2)) == db.execute(QUERY, (-1, "")).fetchall()


@pytest.mark.parametrize("query", ["SELECT absent FROM t", "SELECT 1 FROM gone WHERE ? = ?"])
def test_what_sqlite_refuses_is_its_error(tmp_path, query):
    db = database(tmp_path / "t.db", 3)
    with pytest.raises(sqlite3.Error, match="no such"):
        list(batches(db, query, (), 0))


def test_a_damaged_database_is_told_while_it_is_read(tmp_path):
    path = tmp_path / "t.db"
    database(path, 5000).close()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path.write_bytes(content)
    db = sqlite3.connect(path)
    with pytest.raises(sqlite3.Error, match="malformed"):
        list(batches(db, QUERY, (-1, "no"), 2))
