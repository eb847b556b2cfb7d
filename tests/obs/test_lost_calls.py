"""Calls that never became requests, in the report."""

from serve.obs.explanations import REASONS
from serve.obs.lost_calls import STATUS_BY_REASON, LostCalls
from serve.obs.render import verdict
from serve.obs.report import load_report
from serve.obs.sink import RecordSink
from serve.obs.store import RecordStore
from serve.rpc.refusals import FRONT_REASONS
from serve.rpc.refusals import REASONS as REFUSALS
from tests.obs.builders import RUN, build_report, record


def test_new_calls_have_a_row_for_each_reason():
    counts = {"unread": 0, "malformed": 0, "connections": 3}
    lost = LostCalls(lambda: counts)
    assert lost.records() == []
    counts |= {"unread": 5, "malformed": 1, "connections": 4}
    rows = lost.records()
    assert [(row.reason, row.status, row.left_out) for row in rows] == [
        ("unread", "CANCELLED", 4),
        ("malformed", "INVALID_ARGUMENT", 0),
    ]
    assert lost.records() == []
    counts["unread"] += 2
    assert [row.left_out for row in lost.records()] == [1]


def test_they_are_stored_with_the_last_batch_and_told_first(tmp_path):
    counts = {"unread": 7, "no_thread": 1}
    seen = []
    sink = RecordSink(RecordStore(tmp_path / "r.db", RUN), [seen.append])
    sink.count_lost(LostCalls(lambda: counts).records)
    sink.put(record())
    sink.close()
    report = load_report(tmp_path / "r.db")
    assert (report.requests, report.answered, len(seen)) == (9, 1, 1)
    assert report.rejected == {"unread": 7, "no_thread": 1}
    assert verdict(report).endswith("8 calls ended before they were read (unread 7, no_thread 1).")
    assert "before they were read" not in verdict(build_report([record()], [RUN]))


def test_every_reason_is_counted_somewhere_and_explained():
    assert set(STATUS_BY_REASON) <= {*REFUSALS, *FRONT_REASONS}
    assert set(STATUS_BY_REASON) <= REASONS.keys()
