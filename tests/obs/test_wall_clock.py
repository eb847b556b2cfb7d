"""Times of records, in order while the clock is corrected and right after it was set."""

import itertools
import logging
import sqlite3
from contextlib import closing

import pytest

from bench.kit.waiting import wait_for
from serve.errors import NotReady
from serve.obs import selection
from serve.obs.access_log import line_of
from serve.obs.report import load_report
from serve.obs.retention import Retention
from serve.obs.sink import DOUBTS_NS, RecordSink
from serve.obs.store import RecordStore
from serve.obs.wall_clock import WallClock
from serve.server import clock, report_rows
from tests.obs.builders import MS, RUN, START_UNIX_NS, record

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
DAY_NS = 24 * HOUR_NS


class Clocks:
    """A wall clock that can be set, and a monotonic one that only goes on."""

    def __init__(self):
        self.up_ns, self.ahead_ns = 50 * SECOND_NS, 0

    def wall_ns(self):
        return START_UNIX_NS + self.up_ns + self.ahead_ns

    def monotonic_ns(self):
        return self.up_ns

    def read_by(self, **more):
        return WallClock(self.wall_ns, self.monotonic_ns, **more)


@pytest.fixture
def clocks():
    return Clocks()


def test_small_corrections_change_nothing(clocks):
    wall = clocks.read_by()
    start_ns = wall.now_ns()
    for clocks.ahead_ns in (10**6, -(10**6), 5 * 10**8):
        assert wall.now_ns() == start_ns


@pytest.mark.parametrize("step_ns", [HOUR_NS, -HOUR_NS, 3 * DAY_NS, -2 * HOUR_NS])
def test_a_clock_that_is_set_is_followed_there_and_back(clocks, step_ns):
    wall = clocks.read_by()
    start_ns = wall.now_ns()
    for clocks.ahead_ns in (step_ns, 0):
        assert wall.now_ns() == start_ns + clocks.ahead_ns
        assert wall.follow() == 0
    clocks.ahead_ns = step_ns
    assert wall.follow() == step_ns


def test_corrections_that_add_up_are_followed(clocks):
    """Records are never more than a second off."""
    wall = clocks.read_by()
    start_ns = wall.now_ns()
    for clocks.ahead_ns in range(0, 10 * SECOND_NS, SECOND_NS // 10):
        assert abs(wall.now_ns() - start_ns - clocks.ahead_ns) <= SECOND_NS


def test_a_doubtful_clock_is_followed_when_it_stays_ahead(clocks):
    wall = clocks.read_by(doubts_ns=HOUR_NS)
    start_ns = wall.now_ns()
    clocks.ahead_ns = DAY_NS
    assert wall.now_ns() == start_ns
    clocks.up_ns += HOUR_NS - 1
    assert wall.now_ns() == start_ns + HOUR_NS - 1
    # Set right again, it has to stay ahead for as long once more.
    clocks.ahead_ns = 0
    wall.follow()
    clocks.ahead_ns = DAY_NS
    assert wall.follow() == 0
    clocks.up_ns += HOUR_NS
    assert wall.follow() == DAY_NS


def test_a_doubtful_clock_is_followed_back_at_once(clocks):
    wall = clocks.read_by(doubts_ns=HOUR_NS)
    clocks.ahead_ns = -HOUR_NS
    assert wall.follow() == -HOUR_NS


@pytest.mark.parametrize("step_ns", [HOUR_NS, -HOUR_NS])
def test_rows_have_the_new_time_and_the_latency_that_was(clocks, monkeypatch, step_ns):
    """A request that waits while the clock is set: neither row nor access log goes backwards."""
    monkeypatch.setattr(clock, "_wall", clocks.read_by())
    monkeypatch.setattr(report_rows.clock, "now_ns", clocks.monotonic_ns)
    arrived_ns = clocks.up_ns
    clocks.up_ns += 40 * MS
    clocks.ahead_ns = step_ns
    row = report_rows.refusal_record("r", "gcn", "1", "c", arrived_ns, NotReady("stopping"))
    assert row.latency_ns == 40 * MS
    assert row.arrived_unix_ns + row.latency_ns == clocks.wall_ns()
    assert line_of(row).latency_ms == 40


@pytest.mark.parametrize("step_ns", [HOUR_NS, -HOUR_NS])
def test_spans_of_a_trace_keep_their_order(clocks, monkeypatch, step_ns):
    spans = pytest.importorskip("serve.server.tracing.spans")
    from opentelemetry.sdk.resources import Resource

    monkeypatch.setattr(clock, "_wall", clocks.read_by())
    arrived_ns = clocks.up_ns
    clocks.ahead_ns = step_ns
    row = record("r", arrived_unix_ns=clock.wall_of(arrived_ns), prepare_start_ns=-MS)
    found = spans.spans_of(row, 1.0, Resource({}))
    assert {span.name for span in found} == {"infer gcn", "wait", "stage", "run", "answer"}
    assert all(span.start_time <= span.end_time for span in found)
    assert min(span.start_time for span in found) == START_UNIX_NS + arrived_ns + step_ns


def uids(path):
    with closing(sqlite3.connect(path)) as db:
        return [uid for (uid,) in db.execute("SELECT request_uid FROM request ORDER BY row_id")]


class Rows:
    """Rows that arrive now, put into a sink until its thread has looked at the clock."""

    def __init__(self, path, clocks):
        self._path, self._clocks = path, clocks
        store = RecordStore(path, RUN, retention=Retention(keep_ns=12 * HOUR_NS))
        self.sink = RecordSink(store, (), clocks.wall_ns, clocks.monotonic_ns)
        self._names = map(str, itertools.count())

    def put(self):
        """Put a row; return its id once it and one more are stored."""
        found = [next(self._names), next(self._names)]
        for uid in found:
            self.sink.put(record(uid, arrived_unix_ns=self._clocks.wall_ns()))
            wait_for(lambda uid=uid: uid in uids(self._path), "the row")
        return found[0]


def test_a_clock_set_ahead_deletes_rows_when_it_has_stayed_so(tmp_path, clocks, caplog):
    caplog.set_level(logging.WARNING)
    path = tmp_path / "report.db"
    rows = Rows(path, clocks)
    first = rows.put()
    clocks.ahead_ns = DAY_NS
    second = rows.put()
    assert first in uids(path)
    assert caplog.text.count("the system's clock was set ahead by 86400.0 s") == 1
    clocks.up_ns += DOUBTS_NS
    rows.put()
    wait_for(lambda: first not in uids(path), "the old row to go")
    assert second in uids(path)
    rows.sink.close()


def test_a_clock_set_back_deletes_nothing_and_is_told(tmp_path, clocks, caplog):
    caplog.set_level(logging.WARNING)
    path = tmp_path / "report.db"
    rows = Rows(path, clocks)
    first = rows.put()
    clocks.ahead_ns = -HOUR_NS
    second = rows.put()
    rows.sink.close()
    assert {first, second} <= set(uids(path))
    assert "the system's clock was set back by 3600.0 s" in caplog.text


def test_since_counts_from_the_clock_as_it_is(tmp_path, clocks, monkeypatch):
    path = tmp_path / "report.db"
    store = RecordStore(path, RUN)
    store.insert(record("before", arrived_unix_ns=clocks.wall_ns()))
    clocks.ahead_ns = HOUR_NS
    store.insert(record("after", arrived_unix_ns=clocks.wall_ns()))
    store.close()
    monkeypatch.setattr(selection.time, "time_ns", clocks.wall_ns)
    assert load_report(path, selection.last(600)).requests == 1
    assert load_report(path, selection.last(2 * 3600)).requests == 2
