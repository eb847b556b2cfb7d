"""The contract of every registered policy, and the known failures of the published ones."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.policies import POLICIES, get_policy
from serve.core.rules.packing import balance_threshold
from serve.core.state.ordered import SortedKeys
from serve.core.types import Bytes, Capacity, Nanos
from serve.errors import ConfigError
from tests.builders import MS, task

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


@st.composite
def pending_and_capacity(draw):
    memory = draw(st.integers(0, 60))
    capacity = Capacity(Bytes(memory), draw(st.integers(1, 5)))
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, memory),  # reserve
                st.integers(1, 20),  # run, ms
                st.integers(0, 50),  # arrival, ms
                st.integers(0, 4),  # priority
                st.one_of(st.none(), st.integers(1, 40)),  # target, ms
            ),
            max_size=24,
        )
    )
    tasks = [
        task(
            index,
            reserve=reserve,
            run_ns=run * MS,
            arrived_ns=arrived * MS,
            priority=priority,
            target_ns=None if target is None else target * MS,
        )
        for index, (reserve, run, arrived, priority, target) in enumerate(rows)
    ]
    return tasks, capacity, Nanos(draw(st.integers(0, 60)) * MS)


@every_policy
@given(case=pending_and_capacity(), seed=st.integers(0, 5))
@settings(max_examples=60)
def test_contract(name, case, seed):
    tasks, capacity, now = case
    policy = get_policy(name)
    before = list(tasks)
    groups = policy.plan(tasks, capacity, now)
    assert tasks == before, "the input is left alone"
    planned = [member.task_id for group in groups for member in group.tasks]
    assert sorted(planned) == [member.task_id for member in tasks], "each exactly once"
    for group in groups:
        assert group.reserve_bytes <= capacity.memory_bytes
        assert len(group.tasks) <= capacity.slots
    shuffled = random.Random(seed).sample(tasks, len(tasks))
    assert policy.plan(shuffled, capacity, now) == groups, "order of input does not matter"


@every_policy
@given(case=pending_and_capacity(), limit=st.integers(2, 8))
@settings(max_examples=40)
def test_horizon_picks_known_keys_within_its_limit(name, case, limit):
    tasks, _, now = case
    policy = get_policy(name)
    keys = SortedKeys()
    for member in tasks:
        assert policy.key(member)[-1] == member.task_id
        keys.add(policy.key(member))
    if len(tasks) <= limit:
        return
    picked = policy.horizon(keys, limit, now)
    assert 0 < len(picked) <= limit
    assert len(set(picked)) == len(picked)
    assert set(picked) <= {policy.key(member) for member in tasks}


def sizes(groups):
    return [[member.reserve_bytes for member in group.tasks] for group in groups]


def rising(needs):
    """Tasks of these needs with targets in the given order."""
    return [task(i, reserve=need, run_ns=(i + 1) * MS) for i, need in enumerate(needs)]


@every_policy
@pytest.mark.parametrize("needs", [(12, 12, 9, 8), (12, 12, 9, 7), (10, 10, 10, 10), (20, 20)])
def test_no_group_passes_the_budget_by_one_task(name, needs):
    groups = get_policy(name).plan(rising(needs), Capacity(Bytes(20), 4), Nanos(0))
    assert all(sum(group) <= 20 for group in sizes(groups))
    assert sorted(size for group in sizes(groups) for size in group) == sorted(needs)


def test_sqtf_on_the_published_failures():
    plan = get_policy("sqtf").plan
    capacity = Capacity(Bytes(20), 4)
    assert sizes(plan(rising((12, 12, 9, 8)), capacity, Nanos(0))) == [[12], [12], [9, 8]]
    assert sizes(plan(rising((12, 12, 9, 7)), capacity, Nanos(0))) == [[12], [12], [9, 7]]
    # The sum is a multiple of the limit: the published code fails on its first append.
    assert sizes(plan(rising((10, 10, 10, 10)), capacity, Nanos(0))) == [[10, 10], [10, 10]]


@every_policy
def test_one_over_the_budget_is_refused_not_grouped(name):
    with pytest.raises(ValueError, match="21 bytes, capacity 20"):
        get_policy(name).plan(rising((5, 21)), Capacity(Bytes(20), 4), Nanos(0))


def test_threshold_balances_groups():
    tasks = rising((4,) * 6)
    capacity = Capacity(Bytes(20), 8)
    assert balance_threshold(tasks, capacity) == 12
    assert balance_threshold([], capacity) == 20
    # A group closes once it has passed the threshold: 4 × 4 > 12.
    assert sizes(get_policy("sqtf").plan(tasks, capacity, Nanos(0))) == [[4] * 4, [4] * 2]
    assert sizes(get_policy("fifo").plan(tasks, capacity, Nanos(0))) == [[4] * 5, [4]]


def order(name, tasks, slots=1):
    groups = get_policy(name).plan(tasks, Capacity(Bytes(100), slots), Nanos(0))
    return [[member.task_id for member in group.tasks] for group in groups]


def test_orders():
    tasks = [
        task(0, reserve=1, run_ns=9 * MS, arrived_ns=0),
        task(1, reserve=1, run_ns=2 * MS, arrived_ns=1),
        task(2, reserve=1, run_ns=5 * MS, arrived_ns=2),
        task(3, reserve=1, run_ns=1 * MS, arrived_ns=3),
    ]
    assert order("fifo", tasks) == [[0], [1], [2], [3]]
    assert order("sqtf", tasks) == [[3], [1], [2], [0]]
    assert order("bqt", tasks, slots=2) == [[3, 0], [1, 2]]


def test_orders_by_memory():
    tasks = [
        task(number, reserve=need, run_ns=(9 - number) * MS, arrived_ns=number)
        for number, need in enumerate((40, 10, 30, 20))
    ]
    assert order("base", tasks, slots=2) == [[0, 1], [2, 3]]
    assert order("lmcf", tasks, slots=2) == [[1, 3], [2, 0]]
    assert order("bmc", tasks, slots=2) == [[1, 0], [3, 2]]


def test_a_group_by_memory_may_use_the_capacity_up():
    capacity = Capacity(Bytes(20), 4)
    assert sizes(get_policy("bmc").plan(rising((12, 8, 3, 16)), capacity, Nanos(0))) == [
        [3, 16],
        [8, 12],
    ]
    assert sizes(get_policy("lmcf").plan(rising((12, 8, 3, 16)), capacity, Nanos(0))) == [
        [3, 8],
        [12],
        [16],
    ]


@every_policy
def test_priority_comes_first_and_zero_counts_as_two(name):
    tasks = [
        task(0, reserve=1, priority=3),
        task(1, reserve=1, priority=2),
        task(2, reserve=1, priority=0),
        task(3, reserve=1, priority=1, run_ns=3 * MS),
    ]
    assert order(name, tasks) == [[3], [1], [2], [0]]


def test_unknown_policy_lists_the_choices():
    with pytest.raises(ConfigError, match=r"unknown policy 'sqft'; known: .*fifo.*sqtf"):
        get_policy("sqft")


def test_a_second_policy_of_the_same_name_is_refused():
    with pytest.raises(ValueError, match="'fifo'"):
        POLICIES.register(type(get_policy("fifo")))


def test_slack_looks_at_those_that_can_make_it_before_the_late():
    policy, keys, now = get_policy("slack"), SortedKeys(), Nanos(10 * MS)
    late = [task(i, run_ns=MS, target_ns=(i + 2) * MS) for i in range(4)]
    hopeful = [task(i, run_ns=MS, target_ns=(i + 20) * MS) for i in range(4, 8)]
    relaxed = [task(i, run_ns=MS, target_ns=90 * MS, priority=3) for i in range(8, 10)]
    for member in late + hopeful + relaxed:
        keys.add(policy.key(member))
    picked = [key[-1] for key in policy.horizon(keys, 8, now)]
    assert picked == [4, 5, 6, 7, 8, 9, 0, 1]
    assert [key[-1] for key in policy.horizon(keys, 3, now)] == [4, 5, 6]
    order_now = policy.plan(late + hopeful + relaxed, Capacity(Bytes(1 << 20), 16), now)
    ids = [member.task_id for group in order_now for member in group.tasks]
    assert ids == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
