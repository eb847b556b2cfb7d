"""The bound against every choice on small cases, and against every simulated schedule."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scheduling import bound
from bench.scheduling.bound import most_on_time, unavoidable_violations
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.core.types import Nanos
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from tests.builders import MS, params, task
from tests.sim.test_engine import mixed

#: Launching and switching cost nothing.
FREE = DeviceModel(switch_ns=Nanos(0))


def request(task_id, at_ms, run_ms, target_ms):
    run_ns = run_ms * MS
    given = task(
        task_id, run_ns=run_ns, prepare_ns=0, arrived_ns=at_ms * MS, target_ns=target_ms * MS
    )
    return Offered(given, Nanos(run_ns), Nanos(0))


def requests(rows):
    return [request(number, *row) for number, row in enumerate(sorted(rows))]


def on_time_together(chosen, slots):
    """Whether `slots` lanes serve all, suspending and moving runs as they like.

    Times are whole milliseconds, so each run takes some of them, one lane in each: a matching.
    """
    held = {}  # millisecond: who has a lane then

    def takes_one(who, seen):
        """Find a millisecond for the run, moving others if need be."""
        for at in range(who.task.arrived_ns // MS, who.task.due_ns // MS):
            there = held.setdefault(at, [])
            if at in seen or who in there:
                continue
            seen.add(at)
            if len(there) < slots:
                there.append(who)
                return True
            for other in list(there):
                there.remove(other)
                there.append(who)
                if takes_one(other, seen):
                    return True
                there.remove(who)
                there.append(other)
        return False

    return all(takes_one(who, set()) for who in chosen for _ in range(who.run_ns // MS))


def fewest_late(given, slots):
    for late in range(len(given) + 1):
        for chosen in itertools.combinations(given, len(given) - late):
            if on_time_together(chosen, slots):
                return late
    raise AssertionError("none chosen are on time")


ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=8
)


@given(rows=ROWS, slots=st.integers(1, 3))
@settings(max_examples=120)
def test_it_is_what_the_best_choice_loses(rows, slots):
    given = requests(rows)
    assert unavoidable_violations(given, slots, FREE) == fewest_late(given, slots)


@given(rows=ROWS, slots=st.integers(1, 3))
@settings(max_examples=60)
def test_the_choice_it_knows_of_is_one_and_the_best(rows, slots):
    given = requests(rows)
    kept = most_on_time(given, slots, FREE)
    assert on_time_together([one for one in given if one.task.task_id in kept], slots)
    assert len(kept) == len(given) - fewest_late(given, slots)


@given(rows=ROWS, slots=st.integers(1, 3), chunk=st.integers(1, 4))
@settings(max_examples=40)
def test_cut_anywhere_it_is_still_a_bound(rows, slots, chunk):
    given = requests(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "CHUNK", chunk)
        patch.setattr(bound, "LEAST", 1)
        assert unavoidable_violations(given, slots, FREE) <= fewest_late(given, slots)


@given(
    rows=ROWS,
    policy=st.sampled_from(sorted(POLICIES)),
    discipline=st.sampled_from(sorted(DISCIPLINES)),
    slots=st.integers(1, 2),
)
@settings(max_examples=60)
def test_no_schedule_does_better(rows, policy, discipline, slots):
    given = requests(rows)
    chosen = params(
        policy=policy, discipline=discipline, lanes=2 * slots, parallelism=slots, can_suspend=True
    )
    report = simulate(given, chosen, FREE)
    assert unavoidable_violations(given, slots, FREE) <= report.violations


@pytest.mark.parametrize("rho", [0.8, 1.2, 2.0])
def test_no_schedule_of_many_does_better(rho):
    given = mixed(rho, 1200, 2, seed=4)
    chosen = params(
        policy="slack", discipline="preemptive", lanes=6, parallelism=2, can_suspend=True,
        max_queue=10**6,
    )  # fmt: skip
    violations = simulate(given, chosen).violations
    assert 0 < unavoidable_violations(given, 2) <= violations


@pytest.mark.parametrize(
    ("rows", "late"),
    [
        ([(0, 4, 8)], 0),
        ([(0, 4, 3)], 1),  # shorter than its run
        ([(0, 4, 5), (0, 4, 5)], 1),
        ([(0, 1, 1)] * 5, 4),
        # One of two overlapping pairs each, far apart: rounded up by period.
        ([(0, 4, 5), (0, 4, 5), (50, 4, 5), (50, 4, 5)], 2),
        # The long one gives way to the three short ones.
        ([(0, 6, 6), (0, 1, 2), (2, 1, 2), (4, 1, 2)], 1),
    ],
)
def test_by_hand(rows, late):
    assert unavoidable_violations(requests(rows), 1, FREE) == late


def test_two_lanes_do_twice_as_much_and_preparing_takes_from_the_time():
    pair = requests([(0, 4, 5), (0, 4, 5)])
    assert unavoidable_violations(pair, slots=2) == 0
    # One run gets no more than one lane: a machine twice as fast would serve these three.
    three = requests([(0, 4, 5), (0, 4, 6), (1, 4, 5)])
    assert unavoidable_violations(three, slots=2) == 1
    slow = [Offered(r.task, r.run_ns, Nanos(MS), Nanos(MS)) for r in pair]
    assert unavoidable_violations(slow, slots=2) == 2


def test_lanes_that_speed_each_other_up_count_as_that_fast():
    pair = requests([(0, 4, 5), (0, 4, 5)])
    assert unavoidable_violations(pair, 1, DeviceModel(slowdown=(0.5, 1.0))) == 0
    assert (
        unavoidable_violations(pair, 1, DeviceModel(slowdown=(0.5, 1.0), launch_ns=Nanos(2 * MS)))
        == 1
    )
