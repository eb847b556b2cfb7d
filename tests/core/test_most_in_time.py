"""Which of those that compete for slots are in time together, and in which order."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from serve.core.policies import get_policy
from serve.core.policies.base import Contender
from serve.core.rules.most_in_time import SlotJob, most_in_time
from serve.core.types import Nanos
from tests.builders import MS, params, task
from tests.core.world import World

NOW = Nanos(100)


def job(number, need, due, level=2):
    """Due so long after now."""
    return SlotJob(level, NOW + due, need, number)


def by_due(jobs):
    return sorted(jobs, key=lambda one: (one.level, one.due_ns, one.holder))


def all_in_time(order, slots):
    """Whether all are, each started in turn on the slot that comes free first."""
    free = [NOW] * slots
    for one in order:
        free.sort()
        free[0] += one.need_ns
        if free[0] > one.due_ns:
            return False
    return True


def test_four_are_given_up_for_others_in_one_go():
    """Each pair has a long one in time, and a short one due with it that takes its place."""
    pairs = [(job(2 * n, 100, 10 * n + 100), job(2 * n + 1, 10, 10 * n + 100)) for n in range(5)]
    order, given_up = most_in_time([one for pair in pairs for one in pair], 1, NOW)
    assert order == [1, 3, 5, 7, 8]
    assert given_up == [0, 2, 4, 6, 9]


@st.composite
def hopeful(draw, levels=(1, 2, 2, 3)):
    """Some that are in time if they start now."""
    made = []
    for number in range(draw(st.integers(0, 5))):
        need = draw(st.integers(1, 12))
        made.append(
            job(number, need, need + draw(st.integers(0, 20)), draw(st.sampled_from(levels)))
        )
    return by_due(made)


@given(made=hopeful(), slots=st.integers(1, 3))
def test_those_kept_are_in_time_and_nobody_is_lost(made, slots):
    kept, given_up = most_in_time(made, slots, NOW)
    assert sorted(kept + given_up) == sorted(one.holder for one in made)
    by_number = {one.holder: one for one in made}
    assert all_in_time([by_number[number] for number in kept], slots)
    if all_in_time(made, slots):
        assert kept == [one.holder for one in made]


@given(made=hopeful(levels=[2]))
def test_on_one_slot_no_choice_keeps_more(made):
    kept, _ = most_in_time(made, 1, NOW)
    most = max(
        size
        for size in range(len(made) + 1)
        for chosen in combinations(made, size)
        if all_in_time(chosen, 1)
    )
    assert len(kept) == most


def test_a_long_one_goes_before_short_ones_that_can_wait():
    made = [job(0, 3, 7), job(1, 3, 7), job(2, 3, 10), job(3, 10, 11)]
    assert not all_in_time(made, 2)
    assert most_in_time(made, 2, NOW) == ([0, 3, 1, 2], [])


def test_the_longest_is_given_up_where_not_all_can_make_it():
    made = [job(0, 8, 9), job(1, 2, 10), job(2, 2, 11), job(3, 2, 11)]
    assert most_in_time(made, 1, NOW) == ([1, 2, 3], [0])


def test_nobody_is_given_up_for_one_that_is_less_urgent():
    made = [job(0, 8, 9, level=1), job(1, 2, 9), job(2, 2, 9)]
    assert most_in_time(made, 1, NOW) == ([0], [1, 2])


def test_the_work_is_bounded_however_many_are_late():
    made = by_due([job(number, 5, 6) for number in range(1000)])
    kept, given_up = most_in_time(made, 2, NOW)
    assert (len(kept), len(given_up)) == (2, 998)


def test_slack_puts_the_late_and_those_given_up_last_shortest_first():
    slack = get_policy("slack")
    found = []
    for number, (left_ms, due_ms) in enumerate([(8, 9), (3, 10), (5, 10), (6, 2)]):
        one = task(number, run_ns=MS, prepare_ns=0, target_ns=due_ms * MS)
        left_ns = Nanos(left_ms * MS)
        found.append(Contender(slack.rank(one, left_ns, Nanos(0)), left_ns, number))
    found.sort(key=lambda one: one.key)
    assert [one.holder for one in slack.arrange(found, 1, Nanos(0))] == [1, 2, 3, 0]


def test_a_long_run_keeps_its_slot_while_short_ones_can_wait():
    world = World(
        params(policy="slack", discipline="preemptive", lanes=6, parallelism=2, can_suspend=True)
    )
    for lane_id in world.device_of:
        world.lane_ready(lane_id)
    for number, (run_ms, target_ms) in enumerate([(10, 13), (3, 7), (3, 8)]):
        coming = task(number, run_ns=run_ms * MS, prepare_ns=0, target_ns=target_ms * MS)
        world.arrive(coming, prepared_since_ns=0)
    assert world.stopped == set(), "task 0 would be late, task 2 can wait"
    world.finish_everything()
