"""Runs that slow one another are put side by side only where they end sooner by it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.rules.contention import ends_of, set_after_set

times_of_runs = st.lists(st.integers(1, 30), min_size=1, max_size=5)
slowdowns = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), max_size=4).map(
    lambda steps: [1.0 + sum(steps[:count]) for count in range(len(steps) + 1)]
)


def all_in_order(runs):
    """Yield all ways to cut a sequence into sets."""
    if not runs:
        yield []
    for size in range(1, len(runs) + 1):
        for others in all_in_order(runs[size:]):
            yield [tuple(runs[:size]), *others]


@given(times_of_runs, slowdowns)
def test_no_order_from_short_to_long_ends_sooner(times, slowdown):
    sets = set_after_set(times, slowdown)
    assert sorted(run for members in sets for run in members) == list(range(len(times)))
    for one, other in pairwise(sets):
        assert max(times[run] for run in one) <= min(times[run] for run in other)
    in_order = sorted(range(len(times)), key=lambda run: times[run])
    least = min(sum(ends_of(ways, times, slowdown)) for ways in all_in_order(in_order))
    assert sum(ends_of(sets, times, slowdown)) == pytest.approx(least)


def test_runs_that_do_not_contend_go_side_by_side_and_others_in_turn():
    times = [4.0, 2.0, 6.0]
    assert set_after_set(times, [1.0]) == [(0, 1, 2)]
    # Two take three times as long as one: shortest first.
    assert set_after_set(times, [1.0, 3.0]) == [(1,), (0,), (2,)]
    # Two at once are no slower; three are.
    assert set_after_set(times, [1.0, 1.0, 9.0]) == [(1,), (0, 2)]
    assert set_after_set([], [1.0]) == []


def test_the_next_set_starts_when_the_last_run_of_the_one_before_has_ended():
    # Side by side at half speed, the shorter ends at 4, and the longer has 2 left then.
    assert ends_of([(0, 1), (2,)], [4.0, 2.0, 1.0], [1.0, 2.0]) == [6.0, 4.0, 7.0]


def test_a_table_of_slowdowns_that_falls_is_refused():
    with pytest.raises(ValueError, match="never fall"):
        set_after_set([1.0], [1.0, 2.0, 1.5])
