"""Rows of the report are kept by age and size, and `gnnserve db` looks after their database."""

import json
import sqlite3
import threading
from contextlib import closing

import pytest
from typer.testing import CliRunner

from serve.cli import app
from serve.config import Config, ReportConfig
from serve.errors import ConfigError
from serve.obs.read import read_rows
from serve.obs.retention import INCREMENTAL, Retention, Trimmer, free_bytes, used_bytes
from serve.obs.store import RecordStore
from tests.obs.builders import MS, RUN, START_UNIX_NS, record

SECOND_NS = 1000 * MS
#: Long, so that few rows make a large database.
TEXT = "m" * 1000


def arrived(number, **fields):
    """Return a request that arrived `number` seconds after the start."""
    return record(f"{number}", arrived_unix_ns=START_UNIX_NS + number * SECOND_NS, **fields)


def fill(store, first, count):
    """Insert `count` large rows, the first of which arrived `first` seconds after the start."""
    for number in range(first, first + count):
        store.insert(arrived(number, message=TEXT))
    store.commit()


def ids(path):
    """Return the ids of all requests, in order of arrival."""
    with closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT request_uid FROM request ORDER BY arrived_unix_ns").fetchall()
    return [int(uid) for (uid,) in found]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.db"


def test_rows_beyond_their_age_are_deleted_the_oldest_first_in_pieces(path):
    store = RecordStore(path, RUN, retention=Retention(keep_ns=100 * SECOND_NS))
    fill(store, 0, 5000)
    left = len(ids(path))
    store.trim(START_UNIX_NS + 5000 * SECOND_NS)
    after = ids(path)
    assert 0 < left - len(after) < left
    assert after == list(range(5000 - len(after), 5000))
    for _ in range(20):
        store.trim(START_UNIX_NS + 5000 * SECOND_NS)
    store.close()
    assert ids(path) == list(range(4900, 5000))


def test_nothing_is_deleted_without_bounds_or_within_them(path, tmp_path):
    for number, bounds in enumerate(
        [Retention(), Retention(keep_ns=100 * SECOND_NS, max_bytes=2**30)]
    ):
        store = RecordStore(tmp_path / f"{number}.db", RUN, retention=bounds)
        fill(store, 0, 50)
        store.trim(START_UNIX_NS + 50 * SECOND_NS)
        store.close()
        assert len(ids(tmp_path / f"{number}.db")) == 50


def test_an_age_beyond_all_times_deletes_nothing(path):
    keep_ns = Config(report=ReportConfig(keep="999999d")).report.keep_ns
    store = RecordStore(path, RUN, retention=Retention(keep_ns))
    fill(store, 0, 3)
    store.trim(START_UNIX_NS)
    store.close()
    assert ids(path) == [0, 1, 2]
    done = CliRunner().invoke(app, ["db", "prune", "--keep", "999999d", "--db", str(path)])
    assert done.stdout == "0 requests deleted\n"


def test_a_database_under_load_keeps_its_size(path):
    most_bytes = 2**20
    store = RecordStore(path, RUN, retention=Retention(max_bytes=most_bytes))
    sizes = []
    for batch in range(60):
        fill(store, 100 * batch, 100)
        store.trim(START_UNIX_NS)
        with closing(sqlite3.connect(path)) as db:
            sizes.append(used_bytes(db) + free_bytes(db))
    store.close()
    # A batch is above the bound before it is trimmed.
    assert max(sizes[20:]) < 1.25 * most_bytes
    assert max(sizes[20:]) < 1.1 * min(sizes[20:])
    found = ids(path)
    assert found == list(range(6000 - len(found), 6000))
    assert len(found) > 300


def test_the_log_of_a_burst_is_cut_again(path):
    store = RecordStore(path, RUN)
    log = path.with_name(f"{path.name}-wal")
    fill(store, 0, 12_000)
    assert log.stat().st_size > 12 * 2**20
    for second in range(5):
        fill(store, 12_000 + 1000 * second, 1000)
    assert log.stat().st_size <= 8 * 2**20
    store.close()


def test_a_burst_of_rows_is_deleted_faster_than_it_came(path):
    store = RecordStore(path, RUN, retention=Retention(keep_ns=SECOND_NS))
    for batch in range(10):
        fill(store, 3000 * batch, 3000)
        store.trim(START_UNIX_NS + 30_000 * SECOND_NS)
    store.close()
    assert len(ids(path)) < 3000


def test_freed_pages_go_back_to_the_file_system(path):
    store = RecordStore(path, RUN, retention=Retention(keep_ns=SECOND_NS))
    fill(store, 0, 2000)
    store.close()
    large_bytes = path.stat().st_size
    store = RecordStore(path, RUN, retention=Retention(keep_ns=SECOND_NS))
    for _ in range(100):
        store.trim(START_UNIX_NS + 10_000 * SECOND_NS)
    store.close()
    assert path.stat().st_size < large_bytes / 10


def test_an_older_database_is_trimmed_without_giving_pages_back(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA auto_vacuum = 0")
        db.execute("CREATE TABLE server (run_id INTEGER PRIMARY KEY)")
        db.execute(f"PRAGMA application_id = {0x474E4E53}")
        db.commit()
    store = RecordStore(path, RUN, retention=Retention(keep_ns=SECOND_NS))
    fill(store, 0, 2000)
    for _ in range(20):
        store.trim(START_UNIX_NS + 10_000 * SECOND_NS)
    store.close()
    assert ids(path) == []
    assert path.stat().st_size > 2**20
    assert run("db", "vacuum", "--db", path).exit_code == 0
    assert path.stat().st_size < 2**18
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone()[0] == INCREMENTAL


def test_readers_see_whole_rows_while_others_are_deleted(path):
    store = RecordStore(path, RUN, retention=Retention(keep_ns=SECOND_NS))
    fill(store, 0, 3000)
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            seen.append(sum(1 for _ in read_rows(path)))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        store.trim(START_UNIX_NS + 10_000 * SECOND_NS)
    done.set()
    reader.join()
    store.close()
    assert store.dropped == 0
    assert seen == sorted(seen, reverse=True)


def test_a_database_that_is_locked_keeps_its_rows_and_the_server_goes_on(path):
    store = RecordStore(path, RUN, busy_timeout_s=0.01, retention=Retention(keep_ns=SECOND_NS))
    fill(store, 0, 10)
    with closing(sqlite3.connect(path)) as db:
        db.execute("BEGIN IMMEDIATE")
        store.trim(START_UNIX_NS + 100 * SECOND_NS)
        assert len(ids(path)) == 10
    store.trim(START_UNIX_NS + 100 * SECOND_NS)
    store.close()
    assert ids(path) == []
    assert store.dropped == 0


# -- the commands ---------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def store(path):
    store = RecordStore(path, RUN)
    fill(store, 0, 1000)
    yield store
    store.close()


def test_info_tells_what_a_running_servers_database_holds(store, path):
    found = json.loads(run("db", "info", "--db", path, "--json").stdout)
    assert found["requests"] == 1000
    assert (found["first"], found["last"]) == ("2026-09-21T14:13:20Z", "2026-09-21T14:29:59Z")
    assert (found["starts"], found["rows_lost"]) == (1, 0)
    assert found["used_bytes"] > 2**20
    shown = run("db", "info", "--db", path).stdout
    assert "1,000" in shown
    assert "2026-09-21T14:13:20Z" in shown


def test_prune_deletes_by_size_beside_a_running_server(store, path):
    assert run("db", "prune", "--db", path, "--max-size", "500 KiB").exit_code == 0
    fill(store, 1000, 1)
    left = ids(path)
    assert left == list(range(1001 - len(left), 1001))
    assert 100 < len(left) < 600
    assert store.dropped == 0


def test_prune_deletes_by_age(store, path):
    assert run("db", "prune", "--db", path, "--keep", "1s").stdout == "1000 requests deleted\n"
    assert ids(path) == []


def test_a_backup_beside_a_running_server_holds_what_the_database_held(store, path, tmp_path):
    before = list(read_rows(path))
    target = tmp_path / "copy.db"
    assert run("db", "backup", target, "--db", path).exit_code == 0
    fill(store, 1000, 5)
    assert list(read_rows(target)) == before
    assert target.stat().st_mode & 0o077 == 0
    # A server can go on with it.
    RecordStore(target, RUN).close()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_vacuum_beside_a_running_server_is_refused(store, path):
    found = run("db", "vacuum", "--db", path)
    assert isinstance(found.exception, ConfigError)
    assert "in use" in str(found.exception)
    fill(store, 1000, 5)
    assert store.dropped == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("info",), "no such database"),
        (("prune",), "give --keep or --max-size"),
        (("prune", "--keep", "soon"), "'soon' is not a duration"),
        (("prune", "--max-size", "big"), "--max-size: 'big' is not a size"),
        (("backup", "/nowhere/copy.db"), "the folder /nowhere does not exist"),
        (("backup", "/"), "exists already"),
        (("backup", "x" * 254), "x: cannot be written: File name too long"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tmp_path, arguments, told):
    found = run("db", *arguments, "--db", tmp_path / "absent.db")
    assert isinstance(found.exception, ConfigError)
    assert told in str(found.exception)


def test_a_file_of_another_application_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE request (row_id INTEGER PRIMARY KEY, arrived_unix_ns INTEGER)")
        db.execute("INSERT INTO request VALUES (1, 0)")
        db.commit()
    assert "not a gnnserve report database" in str(
        run("db", "prune", "--db", path, "--keep", "1s").exception
    )
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM request").fetchone() == (1,)


def test_the_trimmer_needs_no_more_than_the_rows_it_deletes(path):
    store = RecordStore(path, RUN)
    fill(store, 0, 100)
    store.close()
    with closing(sqlite3.connect(path)) as db:
        trimmer = Trimmer(db, Retention(keep_ns=SECOND_NS))
        assert trimmer.trim(START_UNIX_NS + 1000 * SECOND_NS, 7) == 7
