"""Times of records: in order while the wall clock is corrected, right after it was set."""

import pytest

from serve.server import clock

DAY_NS = 86_400 * 10**9


@pytest.fixture
def wall(monkeypatch):
    """Set the wall clock by a number of ns; the monotonic clock stands still."""
    now_ns = clock.now_ns()
    at_start_ns = clock.wall_of(now_ns)
    monkeypatch.setattr(clock, "_wall_offset_ns", at_start_ns - now_ns)
    monkeypatch.setattr(clock.time, "monotonic_ns", lambda: now_ns)

    def at(step_ns):
        monkeypatch.setattr(clock.time, "time_ns", lambda: at_start_ns + step_ns)
        return clock.wall_of(now_ns) - at_start_ns

    return at


def test_small_corrections_change_nothing(wall):
    assert [wall(step_ns) for step_ns in (10**6, -(10**6), 5 * 10**8)] == [0, 0, 0]


@pytest.mark.parametrize("step_ns", [DAY_NS, -DAY_NS])
def test_a_clock_that_is_set_is_followed_there_and_back(wall, step_ns):
    assert (wall(step_ns), wall(0)) == (step_ns, 0)
