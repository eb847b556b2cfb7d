"""Waiting tasks of one model run as one disjoint union where that saves time and targets allow."""

from dataclasses import replace

import pytest

from serve.core.commands import LaunchTask, ReleaseTask, ResumeTask, StopTask
from serve.core.events import TaskCancelled, TaskFailed, TaskOverran
from serve.core.params import SchedulerParams
from serve.core.types import Bytes, Completed, FailReason, GroupId, LaneId, TaskId, Withdrawn
from tests.builders import MS, US, device, params, task, unions_saving
from tests.core.world import World, ready

L0, L1 = LaneId(0), LaneId(1)
T0, T1, T2 = TaskId(0), TaskId(1), TaskId(2)
SAVED = 400 * US


@pytest.fixture
def start():
    """Make a world whose lanes are not up yet; everything is finished and checked at the end."""
    worlds = []

    def make(saved_ns=SAVED, **choices):
        defaults = {"policy": "fifo", "lanes": 1, "prepare_ahead": 9}
        world = World(params(unions=unions_saving(saved_ns), **(defaults | choices)))
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.finish_everything()


def tolerant(task_id, **choices):
    """A task of 1 ms with time to wait."""
    return task(task_id, **({"target_ns": 100 * MS} | choices))


def unions(world):
    return sorted(world.members.values())


def test_those_that_wait_join_and_each_gets_its_answer(start):
    world = start()
    ready(world, *(tolerant(i) for i in range(3)))
    assert world.lane_ready(L0) == [LaunchTask(T0, L0, GroupId(0), 1, Bytes(3 * 1024), (T1, T2))]
    world.advance(2200 * US)
    commands = world.end(L0)
    assert [c.task_id for c in commands if isinstance(c, ReleaseTask)] == [0, 1, 2]
    for task_id in range(3):
        outcome = world.answers[task_id]
        assert isinstance(outcome, Completed)
        assert (outcome.placement.merged, outcome.placement.group_id) == (3, task_id)
        assert outcome.timeline.finished_ns == 2200 * US


def test_without_an_estimate_of_unions_or_for_a_model_that_has_none_all_run_alone(start):
    world = World(params(lanes=1, prepare_ahead=9))
    ready(world, tolerant(0), tolerant(1))
    world.lane_ready(L0)
    assert unions(world) == [(0,)]
    world = World(params(lanes=1, prepare_ahead=9, unions=lambda model, sizes: None))
    ready(world, tolerant(0), tolerant(1))
    world.lane_ready(L0)
    assert unions(world) == [(0,)]


def test_a_model_of_its_own_does_not_join(start):
    world = start()
    ready(world, tolerant(0), tolerant(1, model="gat:1"), tolerant(2))
    world.lane_ready(L0)
    assert unions(world) == [(0, 2)]


@pytest.mark.parametrize(("saved_ns", "joined"), [(-MS, 1), (0, 1), (90 * US, 1), (110 * US, 2)])
def test_only_what_saves_a_tenth_of_its_own_time_joins(start, saved_ns, joined):
    world = start(saved_ns=saved_ns)
    ready(world, tolerant(0), tolerant(1))
    world.lane_ready(L0)
    assert len(world.members[0]) == joined


def test_a_launch_less_is_saved_time_too(start):
    costly = replace(device(lanes=1), launch_ns=110 * US)
    world = World(SchedulerParams(device=costly, prepare_ahead=9, unions=unions_saving(0)))
    ready(world, tolerant(0), tolerant(1))
    world.lane_ready(L0)
    assert unions(world) == [(0, 1)]


def test_no_member_is_made_late(start):
    """Each ends with the union, of 1.6 and 2.2 ms; 0.1 ms of a target are the server's."""
    world = start()
    ready(world, tolerant(0, target_ns=1650 * US), tolerant(1))
    world.lane_ready(L0)
    assert unions(world) == [(0,)], "the first one must be done after 1.55 ms"
    world.end(L0)
    ready(world, tolerant(2, target_ns=1750 * US), tolerant(3))
    world.end(L0)
    assert unions(world) == [(2, 3)]


def test_one_that_is_late_already_loses_nothing(start):
    world = start()
    ready(world, tolerant(0, target_ns=MS // 2), tolerant(1, target_ns=MS // 2))
    world.lane_ready(L0)
    assert unions(world) == [(0, 1)]


def test_others_that_wait_are_not_made_late(start):
    """The other takes 1 ms, so it can wait 1.5 ms for the lane, which the union takes for 1.6."""
    for target_ns, expected in ((2600 * US, (0,)), (2750 * US, (0, 1))):
        world = start()
        other = tolerant(2, model="gat:1", target_ns=target_ns)
        ready(world, tolerant(0), tolerant(1), other)
        world.lane_ready(L0)
        assert unions(world) == [expected]


@pytest.mark.parametrize(("target_us", "expected"), [(52_300, (2,)), (53_000, (2, 3))])
def test_nor_are_suspended_ones(start, target_us, expected):
    """Task 0 has 50 ms to go and can stand aside for 1.3 or 2 ms, the union takes 1.6."""
    world = start(policy="slack", discipline="preemptive", lanes=3, parallelism=1, can_suspend=True)
    for lane_id in world.params.device.lane_ids:
        world.lane_ready(lane_id)
    ready(world, task(0, run_ns=50 * MS, target_ns=target_us * US))
    ready(world, tolerant(1, target_ns=5 * MS))
    assert world.stopped == {L0}
    ready(world, tolerant(2, target_ns=10 * MS), tolerant(3, target_ns=10 * MS))
    assert unions(world) == [(0,), (1,)]
    world.advance(MS)
    world.end(L1)
    assert unions(world) == [(0,), expected]


def test_free_slots_are_shared_out_first(start):
    world = start(lanes=2, budget=4096)
    ready(world, tolerant(0, reserve=4096))
    world.lane_ready(L0)
    world.lane_ready(L1)
    ready(world, *(tolerant(i) for i in range(1, 5)))
    assert unions(world) == [(0,)]
    world.end(L0)
    assert unions(world) == [(1, 2), (3, 4)]


def test_no_more_than_the_most(start):
    world = start(most_merged=2)
    ready(world, *(tolerant(i) for i in range(3)))
    world.lane_ready(L0)
    assert unions(world) == [(0, 1)]


def test_the_union_has_its_memory(start):
    world = start(budget=2500)
    ready(world, *(tolerant(i) for i in range(3)))
    world.lane_ready(L0)
    assert unions(world) == [(0, 1)]
    assert world.reserved() == 2048


def test_under_a_barrier_only_the_group_joins(start):
    world = start(discipline="barrier", policy="fifo", budget=2048)
    ready(world, *(tolerant(i) for i in range(3)))
    world.lane_ready(L0)
    assert unions(world) == [(0,)], "on one slot each group is one task"


# When a union does not end well.


@pytest.fixture
def union(start):
    """Tasks 0, 1 and 2 run as one."""
    world = start()
    ready(world, *(tolerant(i, timeout_ns=900 * MS) for i in range(3)))
    world.lane_ready(L0)
    assert unions(world) == [(0, 1, 2)]
    return world


def alone_again(world):
    """Each runs once more, by itself; the tasks in the order they ran in."""
    order = []
    while world.preparing:
        world.prepare(min(world.preparing))
    while world.on_lane:
        (task_id,) = world.on_lane.values()
        assert world.members[task_id] == (task_id,)
        order.append(task_id)
        world.end(L0)
    return order


@pytest.mark.parametrize("ending", [TaskFailed, TaskOverran])
def test_one_that_fails_is_split_and_each_runs_alone(union, ending):
    reason = (FailReason.MODEL_ERROR,) if ending is TaskFailed else ()
    union.end(L0, ending(T0, L0, *reason, "raised"))
    assert not union.answers
    assert alone_again(union) == [0, 1, 2]
    attempts = {union.answers[i].placement.attempt for i in range(3)}
    assert attempts == {2}


def test_the_one_at_fault_fails_by_itself(union):
    union.end(L0, TaskFailed(T0, L0, FailReason.MODEL_ERROR, "raised"))
    union.prepare(0)
    union.prepare(1)
    union.prepare(2)
    assert union.on_lane == {L0: 0}
    union.end(L0, TaskFailed(T0, L0, FailReason.MODEL_ERROR, "raised"))
    assert union.answers[0].reason is FailReason.MODEL_ERROR
    union.end(L0)
    union.end(L0)
    assert isinstance(union.answers[1], Completed)


def test_after_a_split_one_may_overrun_and_run_with_all_the_memory(union):
    union.overrun(L0)
    union.prepare(0)
    union.overrun(L0)
    union.prepare(0)
    while union.preparing:
        union.prepare(min(union.preparing))
    union.finish_everything()
    assert all(isinstance(outcome, Completed) for outcome in union.answers.values())


def test_one_of_a_union_that_failed_joins_no_other_when_its_own_lane_is_lost(union):
    union.end(L0, TaskFailed(T0, L0, FailReason.MODEL_ERROR, "raised"))
    union.prepare(0)
    union.lane_lost(L0)
    union.arrive(tolerant(3))
    while union.preparing:
        union.prepare(min(union.preparing))
    union.lane_ready(L0)
    assert union.members == {0: (0,)}


def test_a_lost_lane_hands_each_over(union):
    union.lane_lost(L0)
    union.lane_ready(L0)
    assert alone_again(union) == [0, 1, 2]


def test_one_member_cancelled_the_others_go_on(union):
    commands = union.tell(TaskCancelled(T0))
    assert not any(isinstance(c, StopTask) for c in commands)
    union.end(L0)
    assert isinstance(union.answers[0], Withdrawn)
    assert isinstance(union.answers[1], Completed)


def test_all_members_cancelled_the_run_is_stopped(union):
    for task_id in (T1, T0):
        union.tell(TaskCancelled(task_id))
    assert union.tell(TaskCancelled(T2))[1:] == [StopTask(T0, L0)]
    assert union.end(L0, TaskFailed(T0, L0, FailReason.STOPPED, "")) == [
        ReleaseTask(task_id) for task_id in (T2, T1, T0)
    ]


def test_a_split_leaves_the_cancelled_ones_out(union):
    union.tell(TaskCancelled(T1))
    union.end(L0, TaskFailed(T0, L0, FailReason.MODEL_ERROR, "raised"))
    assert alone_again(union) == [0, 2]


def test_a_union_is_suspended_and_resumed_as_a_whole(start):
    world = start(policy="slack", discipline="preemptive", lanes=3, parallelism=1, can_suspend=True)
    ready(world, *(task(i, run_ns=20 * MS, target_ns=500 * MS) for i in range(2)))
    world.lane_ready(L0)
    world.lane_ready(L1)
    world.lane_ready(LaneId(2))
    ready(world, task(2, model="gat:1"))
    assert world.stopped == {L0}
    world.tell(TaskCancelled(T1))
    assert world.end(L1)[2:] == [ResumeTask(T0, L0)]
    world.end(L0)
    assert isinstance(world.answers[0], Completed)


def test_a_union_that_others_slow_takes_fewer(start):
    world = start(lanes=2, slowdown=(1.0, 2.0))
    world.lane_ready(L0)
    ready(world, task(0, run_ns=50 * MS, target_ns=500 * MS))
    # Alone a union of all three would take 2.2 ms, beside the other twice that.
    ready(world, *(task(i, target_ns=4 * MS) for i in (1, 2, 3)))
    world.lane_ready(L1)
    assert unions(world) == [(0,), (1, 2)]
