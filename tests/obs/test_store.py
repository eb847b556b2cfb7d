"""The database: written rows survive, also a kill; other applications' databases are refused."""

import io
import logging
import os
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bench.kit.waiting import wait_for
from serve.errors import ConfigError
from serve.obs.read import read_rows
from serve.obs.render import render_report
from serve.obs.report import load_report
from serve.obs.schema import SCHEMA_VERSION
from serve.obs.selection import last
from serve.obs.sink import COMMIT_INTERVAL_S, RecordSink
from serve.obs.store import RecordStore
from serve.terminal import Console
from tests.obs.builders import RUN, late, read_database, record, unanswered


def store_all(path, *records):
    store = RecordStore(path, RUN)
    for row in records:
        store.insert(row)
    store.close()


def test_a_record_comes_back_as_it_was(tmp_path):
    rows = [record("a"), late("b"), unanswered("c", "CANCELLED", "cancelled", message="gone €")]
    store_all(tmp_path / "r.db", *rows)
    read = [row[1:] for row in read_rows(tmp_path / "r.db")]
    assert read == [msgspec.structs.astuple(row) for row in rows]


def test_a_new_database_and_what_lies_beside_it_are_for_their_owner_alone(tmp_path):
    path, before = tmp_path / "r.db", os.umask(0)
    try:
        store = RecordStore(path, RUN)
        store.insert(record("a"))
        store.commit()
        modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("r.db", "r.db-wal", "r.db-shm"), 0o600)


def test_a_database_that_is_there_keeps_the_mode_that_its_owner_gave_it(tmp_path):
    store_all(tmp_path / "r.db", record("a"))
    (tmp_path / "r.db").chmod(0o640)
    store_all(tmp_path / "r.db", record("b"))
    assert stat.S_IMODE((tmp_path / "r.db").stat().st_mode) == 0o640


def test_every_start_has_its_own_row_and_its_requests_point_to_it(tmp_path):
    store_all(tmp_path / "r.db", record("a"))
    store_all(tmp_path / "r.db", record("b"))
    frame, runs = read_database(tmp_path / "r.db")
    assert runs == [RUN, RUN]
    assert dict(zip(frame["request_uid"], frame["run_id"], strict=True)) == {"a": 1, "b": 2}


def test_since_keeps_recent_arrivals_only(tmp_path):
    now = time.time_ns()
    rows = [record("old", arrived_unix_ns=now - 3600 * 10**9), record("new", arrived_unix_ns=now)]
    store_all(tmp_path / "r.db", *rows)
    assert read_database(tmp_path / "r.db", last(60.0))[0]["request_uid"].tolist() == ["new"]
    assert len(read_database(tmp_path / "r.db", last(0.0))[0]) == 2


def test_reading_works_while_the_server_writes(tmp_path):
    store = RecordStore(tmp_path / "r.db", RUN)
    store.insert(record("a"))
    store.commit()
    store.insert(record("b"))
    assert len(read_database(tmp_path / "r.db")[0]) == 1
    store.close()
    assert len(read_database(tmp_path / "r.db")[0]) == 2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b"no database at all" * 100), "not a database"),
        (lambda path: path.mkdir(), "folder"),
    ],
)
def test_what_is_no_database_is_refused_by_name(tmp_path, make, reason):
    path = tmp_path / "r.db"
    make(path)
    with pytest.raises(ConfigError, match=reason) as caught:
        RecordStore(path, RUN)
    assert str(path) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        RecordStore(tmp_path / "nowhere" / "r.db", RUN)


def test_another_applications_database_is_refused_and_not_touched(tmp_path):
    path = tmp_path / "r.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE invoices (id)")
    other.commit()
    other.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="not a gnnserve report database: it holds invoices"):
        RecordStore(path, RUN)
    with pytest.raises(ConfigError, match="invoices"):
        read_database(path)
    assert path.read_bytes() == before


def test_a_corrupt_database_is_refused(tmp_path):
    path = tmp_path / "r.db"
    store_all(path, *(record(str(i)) for i in range(200)))
    content = bytearray(path.read_bytes())
    content[8192 : 8192 + 8192] = b"\xa5" * 8192
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used"):
        RecordStore(path, RUN)


def test_a_newer_schema_is_refused_and_a_missing_column_added(tmp_path):
    path = tmp_path / "r.db"
    store_all(path, record("a"))
    db = sqlite3.connect(path)
    db.execute("ALTER TABLE request DROP COLUMN co_runners")
    db.execute("ALTER TABLE request DROP COLUMN pmc_measured_bytes")
    db.execute("ALTER TABLE request ADD COLUMN from_the_future TEXT DEFAULT 'x'")
    db.commit()
    assert read_database(path)[0]["co_runners"].tolist() == [0]
    store_all(path, record("b", co_runners=3))
    assert read_database(path)[0]["co_runners"].tolist() == [0, 3]
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.commit()
    db.close()
    for use in (lambda: RecordStore(path, RUN), lambda: read_database(path)):
        with pytest.raises(ConfigError, match=f"newer gnnserve: schema {SCHEMA_VERSION + 1}"):
            use()


def test_a_database_that_cannot_be_written_is_refused_at_start(tmp_path):
    path = tmp_path / "r.db"
    store_all(path)
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="locked"):
        RecordStore(path, RUN, busy_timeout_s=0.05)
    holder.close()


def test_a_full_disk_costs_rows_is_said_once_and_passes(tmp_path, caplog):
    store = RecordStore(tmp_path / "r.db", RUN)
    store.insert(record("kept"))
    store.commit()
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with caplog.at_level(logging.WARNING):
        for attempt in range(3):
            row = record(f"lost {attempt}")
            # More rows than the remaining pages can hold.
            msgspec.structs.force_setattr(row, "message", "x" * 20_000)
            store.insert(row)
            store.commit()
    assert store.dropped == 3
    assert [entry.message for entry in caplog.records if "being lost" in entry.message] != []
    assert len(caplog.records) == 1
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.insert(record("kept too"))
    store.close()
    assert set(read_database(tmp_path / "r.db")[0]["request_uid"]) == {"kept", "kept too"}
    report = load_report(tmp_path / "r.db")
    assert report.rows_lost == 3
    out = io.StringIO()
    Console(file=out).print(render_report(report, []))
    assert out.getvalue().startswith("3 rows are missing here")


def test_a_lost_row_that_stands_for_others_counts_for_all(tmp_path, monkeypatch):
    store = RecordStore(tmp_path / "r.db", RUN)
    store.insert(record("kept", left_out=3))
    store.commit()
    store.insert(record("rolled back", left_out=4))
    with monkeypatch.context() as patch:
        patch.setattr("serve.obs.store._INSERT_REQUEST", "no statement")
        store.insert(record("refused", left_out=10))
    store.insert(record("no column", left_out=100, qos_target_ns=2**70))
    store.close()
    assert store.dropped == 5 + 11 + 101
    assert load_report(tmp_path / "r.db").rows_lost == store.dropped


def test_a_row_no_column_can_hold_costs_only_itself(tmp_path):
    store = RecordStore(tmp_path / "r.db", RUN)
    for row in (record("a"), record("b", qos_target_ns=2**70), record("c", message="\ud800")):
        store.insert(row)
    store.close()
    assert store.dropped == 2
    assert read_database(tmp_path / "r.db")[0]["request_uid"].tolist() == ["a"]


def test_the_sink_stores_and_observes_everything_put_before_close(tmp_path):
    seen = []
    sink = RecordSink(RecordStore(tmp_path / "r.db", RUN), [lambda row: seen.append(row)])
    rows = [record(str(i)) for i in range(500)]
    for row in rows:
        sink.put(row)
    sink.close()
    sink.close()
    assert seen == rows
    assert len(read_database(tmp_path / "r.db")[0]) == 500
    assert sink.dropped == 0


def test_the_sink_flushes_when_observers_have_a_batch(tmp_path):
    seen, flushed = [], []

    def flush():
        flushed.append(len(seen))
        raise ValueError("a bug")

    store = RecordStore(tmp_path / "r.db", RUN)
    sink = RecordSink(store, [seen.append], flushes=[flush])
    for number in range(50):
        sink.put(record(str(number)))
    sink.close()
    assert flushed[-1] == 50
    assert len(flushed) <= 3
    assert len(read_database(tmp_path / "r.db")[0]) == 50


def test_an_observer_that_fails_costs_no_row(tmp_path, caplog):
    def broken(_):
        raise ValueError("a bug")

    sink = RecordSink(RecordStore(tmp_path / "r.db", RUN), [broken])
    sink.put(record("a"))
    sink.put(record("b"))
    sink.close()
    assert len(read_database(tmp_path / "r.db")[0]) == 2
    assert len(caplog.records) == 1


def test_a_transport_that_tells_no_lost_calls_costs_no_row(tmp_path, caplog):
    """Its port may be closed just when it is asked."""

    def closed():
        raise ValueError("the front is closed")

    sink = RecordSink(RecordStore(tmp_path / "r.db", RUN))
    sink.count_lost(closed)
    sink.put(record("a"))
    sink.close()
    assert len(read_database(tmp_path / "r.db")[0]) == 1
    assert len(caplog.records) == 1


def test_texts_that_clients_make_long_are_cut(tmp_path):
    """Twenty refusals of a megabyte each once took 63 MiB."""
    long = "x" * 1_000_000
    names = dict.fromkeys(("client_id", "model", "version", "tenant", "graph"), long)
    for number in range(20):
        row = unanswered(f"r{number}", "INVALID_ARGUMENT", "invalid_input", message=long, **names)
        store_all(tmp_path / "r.db", row)
    assert (tmp_path / "r.db").stat().st_size < 200_000
    frame, _ = read_database(tmp_path / "r.db")
    assert {len(text) for text in frame["message"]} == {1000}
    assert {len(frame[name][0]) for name in names} == {256}
    assert frame["message"][0].endswith("x…")
    assert record(message="a" * 1000).message == "a" * 1000


def test_a_flood_of_refusals_gets_few_rows_and_is_counted_in_full(tmp_path):
    sink = RecordSink(RecordStore(tmp_path / "r.db", RUN))
    flood = [unanswered(f"f{i}", "INVALID_ARGUMENT", "invalid_input") for i in range(5_000)]
    flood += [unanswered(f"q{i}", "RESOURCE_EXHAUSTED", "queue_full") for i in range(3_000)]
    flood += [unanswered(f"e{i}", "DEADLINE_EXCEEDED", "deadline") for i in range(2_000)]
    flood += [
        unanswered(f"l{i}", "DEADLINE_EXCEEDED", "deadline", latency_ns=99 * 10**9)
        for i in range(1_000)
    ]
    kept = [record(f"a{i}") for i in range(500)] + [
        unanswered(f"m{i}", "INTERNAL", "model_error", lane=1) for i in range(500)
    ]
    for row in flood + kept:
        sink.put(row)
    sink.close()
    frame, _ = read_database(tmp_path / "r.db")
    assert sink.dropped == 0
    assert {row.request_uid for row in kept} <= set(frame["request_uid"]), "they were on lanes"
    # The number of batches, each of a quarter of a second, depends on the machine.
    assert len(frame) < len(kept) + len(flood) / 10
    report = load_report(tmp_path / "r.db")
    assert report.requests == len(flood) + len(kept)
    assert report.by_model["gcn"].requests == report.requests
    assert report.rejected == {
        "invalid_input": 5_000, "queue_full": 3_000, "deadline": 3_000, "model_error": 500
    }  # fmt: skip
    assert report.expired_late == 1_000


def test_refusals_with_long_texts_take_300_bytes_of_disk_at_most(tmp_path):
    RecordSink(RecordStore(tmp_path / "r.db", RUN)).close()
    empty_bytes = (tmp_path / "r.db").stat().st_size
    sink = RecordSink(RecordStore(tmp_path / "r.db", RUN))
    count = 5_000
    for number in range(count):
        text = "m" * 1000
        sink.put(unanswered(f"f{number}", "INVALID_ARGUMENT", "invalid_input", message=text))
    sink.close()
    taken_bytes = sum(path.stat().st_size for path in tmp_path.iterdir()) - empty_bytes
    assert taken_bytes <= 300 * count


WRITER = """
import sys, time
from pathlib import Path
from serve.obs.sink import RecordSink
from serve.obs.store import RecordStore
from tests.obs.builders import RUN, record
sink = RecordSink(RecordStore(Path(sys.argv[1]), RUN))
print("open", flush=True)
for i in range(1_000_000):
    sink.put(record(str(i)))
    time.sleep(0.002)
"""


def test_rows_older_than_half_a_second_survive_kill_9(tmp_path):
    assert COMMIT_INTERVAL_S < 0.5
    path = tmp_path / "r.db"

    def stored():
        return set(read_database(path)[0]["request_uid"])

    command = [sys.executable, "-c", WRITER, str(path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        try:
            assert writer.stdout.readline() == "open\n"
            # The writer goes on meanwhile, so nobody waits until it ends or pauses.
            wait_for(lambda: len(stored()) > 200, "rows that others see")
            seen = stored()
            assert writer.poll() is None
        finally:
            writer.kill()
    assert seen <= stored()
    store_all(path, record("after"))
    assert "after" in stored()
