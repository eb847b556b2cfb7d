"""Runs that nobody waits for any more are stopped."""

import pytest

from serve.core.commands import AnswerTask, ReleaseTask, ResumeTask, StopTask
from serve.core.events import TaskCancelled, TaskFailed
from serve.core.types import Expired, FailReason, LaneId, TaskId, Withdrawn
from tests.builders import MS, params, task
from tests.core.world import World

L0, L1 = LaneId(0), LaneId(1)
T0 = TaskId(0)


@pytest.fixture
def world():
    """One slot, three lanes, and task 0, of 50 ms, running."""
    found = World(
        params(policy="slack", discipline="preemptive", lanes=3, parallelism=1, can_suspend=True)
    )
    for lane_id in found.params.device.lane_ids:
        found.lane_ready(lane_id)
    found.arrive(task(0, run_ns=50 * MS, timeout_ns=70 * MS))
    found.prepare(0)
    yield found
    found.finish_everything()


def stopped(lane_id=L0):
    return TaskFailed(T0, lane_id, FailReason.STOPPED, "nobody waits for it")


def test_when_it_is_cancelled(world):
    assert world.tell(TaskCancelled(T0)) == [
        AnswerTask(T0, Withdrawn("running")),
        StopTask(T0, L0),
    ]
    assert world.tell(TaskCancelled(T0)) == []
    assert world.scheduler.reserved_bytes == 1024, "until the lane says so"
    assert world.end(L0, stopped()) == [ReleaseTask(T0)]


def test_when_its_time_limit_passes(world):
    world.advance(70 * MS)
    assert world.answers[0] == Expired("running")
    assert world.stopping == {0}


def test_it_may_have_ended_just_before(world):
    world.tell(TaskCancelled(T0))
    assert world.end(L0) == [ReleaseTask(T0)]


def test_while_it_stands_suspended(world):
    world.arrive(task(1, run_ns=MS))
    world.prepare(1)
    assert world.stopped == {L0}
    assert world.tell(TaskCancelled(T0))[1:] == [StopTask(T0, L0)]
    assert world.end(L0, stopped()) == [ReleaseTask(T0)], "the driver woke it for that"
    world.end(L1)


def test_a_suspended_one_that_does_not_end_yet_is_resumed_when_there_is_room(world):
    world.arrive(task(1, run_ns=MS))
    world.prepare(1)
    world.tell(TaskCancelled(T0))
    assert world.end(L1)[2:] == [ResumeTask(T0, L0)]


def test_one_on_a_lost_lane_is_stopped_by_that(world):
    world.tell(TaskCancelled(T0))
    assert world.lane_lost(L0) == [ReleaseTask(T0)]
