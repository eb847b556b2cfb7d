"""What counts as overload: by itself, and as a simulation's reports show it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.rules.demand import RECENT, Demand, WorkByTarget, target_class
from serve.core.types import Nanos
from serve.sim.engine import simulate
from tests.builders import MS, params
from tests.sim.test_engine import mixed, offered


@given(targets=st.lists(st.integers(1, 1 << 62), min_size=2, max_size=30))
def test_classes_rise_with_targets_and_are_narrow(targets):
    for short, long in zip(sorted(targets), sorted(targets)[1:], strict=False):
        assert target_class(short) <= target_class(long)
        if target_class(short) == target_class(long):
            assert long <= short * 9 / 8


@given(rows=st.lists(st.tuples(st.integers(1, 512), st.integers(0, 100)), max_size=40))
def test_sums_up_to_a_class(rows):
    work = WorkByTarget()
    for at, amount in rows:
        work.add(at, amount)
    for bound in (0, 1, 7, 8, 300, 512):
        assert work.up_to(bound) == sum(amount for at, amount in rows if at <= bound)


def ended(others, target_ms=20, stay_ms=20, slots=1):
    """Whether a task of 10 ms was overloaded beside `others`, (target, work) in ms."""
    demand, at = Demand(), target_class(Nanos(target_ms * MS))
    before = demand.came(at, Nanos(10 * MS))
    for other_ms, work_ms in others:
        demand.came(target_class(Nanos(other_ms * MS)), Nanos(work_ms * MS))
    return demand.exceeded(at, before, Nanos(0), Nanos(stay_ms * MS), slots)


@pytest.mark.parametrize(
    ("others", "overloaded"),
    [
        ([], False),
        ([(20, 10)], False),  # both fit
        ([(20, 11)], True),
        ([(5, 3), (5, 3), (5, 5)], True),
        ([(200, 100)], False),  # a long one could have waited
    ],
)
def test_only_work_as_urgent_counts(others, overloaded):
    assert ended(others) == overloaded
    assert not ended(others, slots=4)


def test_work_that_left_before_does_not_count():
    demand, at = Demand(), target_class(Nanos(20 * MS))
    demand.came(at, Nanos(50 * MS))
    demand.left(at, Nanos(50 * MS))
    before = demand.came(at, Nanos(10 * MS))
    assert demand.there_ns(at) == 10 * MS
    assert not demand.exceeded(at, before, Nanos(60 * MS), Nanos(81 * MS), 1)


def test_a_load_above_one_is_overload_for_all_who_were_there():
    demand, at = Demand(), target_class(Nanos(20 * MS))
    for number in range(RECENT):  # 2 ms of work each ms
        over = demand.asked(Nanos(2 * MS), Nanos(number * MS), 1)
    assert over
    end = RECENT * MS
    there, later = Nanos(end - 5 * MS), Nanos(end + MS)
    assert demand.exceeded(at, 0, there, Nanos(end), 1)
    assert not demand.exceeded(at, 0, later, Nanos(end + 9 * MS), 1)


def causes(rho, policy="slack", discipline="preemptive"):
    chosen = params(
        policy=policy, discipline=discipline, lanes=6, parallelism=2, can_suspend=True,
        max_queue=10**6,
    )  # fmt: skip
    report = simulate(mixed(rho, 2000, 2, seed=2), chosen)
    assert report.violations > 0
    return report.by_cause["overload"] / report.violations


def test_overload_is_told_from_a_bad_order():
    assert causes(0.3, "fifo", "rolling") < 0.05
    assert causes(0.3, "bqt", "barrier") < 0.05
    assert causes(1.5) > 0.9
    assert causes(1.5, "fifo", "rolling") > 0.8


def test_a_short_task_behind_a_long_one_waited_in_the_queue():
    requests = [offered(0, 20), offered(1, 1, 1)]
    report = simulate(requests, params(policy="slack", lanes=1))
    assert report.by_cause["queue"] == report.violations == 1
