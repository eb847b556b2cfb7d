"""The small parts by themselves: ledger, window, parameters, registry of disciplines."""

import pytest

from serve.core.disciplines import DISCIPLINES, get_discipline
from serve.core.params import SchedulerParams
from serve.core.rules.window import AdaptiveWindow, FixedWindow
from serve.core.state.ledger import Ledger
from serve.core.types import Bytes, LaneId, Nanos, TaskId
from serve.errors import ConfigError, InvariantViolation
from tests.builders import MS, US, device, task


def test_ledger_refuses_to_pass_the_budget():
    ledger = Ledger(Bytes(10))
    ledger.reserve(TaskId(0), Bytes(6))
    with pytest.raises(InvariantViolation, match="task 1 needs 5 bytes, 4 are left"):
        ledger.reserve(TaskId(1), Bytes(5))
    with pytest.raises(InvariantViolation, match="task 0 holds memory already"):
        ledger.reserve(TaskId(0), Bytes(1))
    ledger.reserve(TaskId(1), Bytes(4))
    ledger.give_back(TaskId(0))
    assert ledger.reserved_bytes == 4
    assert ledger.holders() == {1}
    with pytest.raises(InvariantViolation, match="task 0 holds no memory"):
        ledger.give_back(TaskId(0))


def test_fixed_window_closes_at_multiples_of_its_length():
    window = FixedWindow(Nanos(10 * MS))
    assert window.closes_ns(True) is None
    window.arrived(task(0), Nanos(23 * MS))
    window.arrived(task(1), Nanos(29 * MS))
    assert window.closes_ns(True) == window.closes_ns(False) == 30 * MS
    window.closed(Nanos(30 * MS), 2)
    assert window.closes_ns(False) is None
    window.arrived(task(2), Nanos(30 * MS))
    assert window.closes_ns(False) == 40 * MS


def relaxed(task_id, now):
    """A task that arrives now and could wait for a second."""
    return task(task_id, arrived_ns=now, target_ns=1000 * MS)


def test_adaptive_window_closes_at_once_for_a_waiting_lane():
    window = AdaptiveWindow()
    window.arrived(relaxed(0, 7 * MS), Nanos(7 * MS))
    assert window.closes_ns(lane_waits=True) == 7 * MS
    assert window.closes_ns(lane_waits=False) > 7 * MS


def test_adaptive_window_follows_the_arrival_rate():
    lengths = []
    for gap in (50 * US, 200 * US, 100 * MS):
        window, now = AdaptiveWindow(), 0
        for task_id in range(100):
            now += gap
            window.closed(Nanos(now), 0)
            window.arrived(relaxed(task_id, now), Nanos(now))
        lengths.append(window.closes_ns(lane_waits=False) - now)
    assert lengths[0] == pytest.approx(8 * 50 * US, rel=0.1)
    assert lengths[1] == pytest.approx(8 * 200 * US, rel=0.1)
    assert lengths[2] == AdaptiveWindow.MAX_LENGTH_NS


def test_adaptive_window_closes_before_the_tightest_task_must_start():
    window = AdaptiveWindow()
    window.arrived(relaxed(0, 0), Nanos(0))
    tight = task(1, run_ns=MS, prepare_ns=0, arrived_ns=0, target_ns=MS + 300 * US)
    window.arrived(tight, Nanos(0))
    assert window.closes_ns(lane_waits=False) == 300 * US


def test_adaptive_window_rests_in_proportion_to_what_was_planned():
    window = AdaptiveWindow()
    window.closed(Nanos(0), planned=32)
    window.arrived(relaxed(0, 10), Nanos(10))
    assert window.closes_ns(lane_waits=True) == 32 * AdaptiveWindow.REST_PER_TASK_NS


def test_every_discipline_is_known_by_its_name():
    assert set(DISCIPLINES) == {"barrier", "rolling", "preemptive"}
    for name in DISCIPLINES:
        assert get_discipline(name).name == name
    with pytest.raises(ConfigError, match="unknown discipline 'roling'; known: barrier, "):
        get_discipline("roling")


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_queue", 0), ("horizon", 0), ("patience", 0), ("prepare_ahead", -1),
     ("bypass_limit", -1), ("window_ns", 0)],
)  # fmt: skip
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SchedulerParams(device=device(), **{field: value})


def test_device_facts_are_checked():
    with pytest.raises(ValueError, match="no id twice"):
        device(lanes=0)
    with pytest.raises(ValueError, match="parallelism 0"):
        device(parallelism=0)
    assert device(lanes=4, parallelism=2).slots == 2
    assert device(lanes=2, parallelism=8).slots == 2
    assert device(lanes=2).lane_ids == (LaneId(0), LaneId(1))
