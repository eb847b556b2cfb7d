"""The bench of reserved multiprocessors: where its tasks run, and what it makes of the times."""

from bench.gpu.isolation import beside, captured, judged
from bench.gpu.kit import Rig
from bench.gpu.lanes import Lane
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.streams import StreamKind


class Work:
    """It notes on which streams it runs."""

    def __init__(self):
        self.warmed, self.used = [], []

    def warm(self, lanes):
        self.warmed += lanes

    def beside(self, lane, count, busy, others, kind, their_kind):
        others.used.append(their_kind)
        self.used.append(kind)
        return [float(number) for number in range(count)]

    def on_all(self, lanes, count, kind):
        self.used.append(kind)


def test_long_tasks_are_bounded_where_something_is_reserved():
    rig, one = Rig(True, 1), Lane(HostQueue(), None)
    crowd = [Lane(rig.queue(8), None) for _ in range(4)]
    for reserved, theirs in ((0, StreamKind.ORDINARY), (8, StreamKind.BOUNDED)):
        small, large = Work(), Work()
        row = beside(rig, one, crowd, small, large, reserved, quick=True)
        assert small.used == [StreamKind.URGENT]
        assert set(large.used) == {theirs}
        assert large.warmed == crowd
        assert (row["reserved_sms"], row["small_ms"]["median"]) == (reserved, 9.5)
        assert 18 < row["small_p99_ms"] <= 19


def test_a_capture_answers_what_is_put_in_later():
    lane = Lane(HostQueue(bounded=True), None)
    assert lane.call(captured, lane) == 6.0


def test_everything_is_told_relative_to_nothing_reserved():
    rows = [
        {"reserved_sms": number, "small_p99_ms": p99, "large_ms_per_task": {"median": large}}
        for number, p99, large in ((0, 4.0, 10.0), (8, 1.0, 10.7), (16, 0.8, 12.0))
    ]
    assert judged(rows) == {"8": {"p99": 0.25, "large": 1.07}, "16": {"p99": 0.2, "large": 1.2}}
    assert judged(rows[:1]) is None
    assert judged(rows[1:]) is None
