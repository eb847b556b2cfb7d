"""Tasks whose inputs were staged before they arrived."""

import pytest

from serve.core.commands import LaunchTask, PrepareTask
from serve.core.events import DrainStarted
from serve.core.types import Bytes, GroupId, LaneId, TaskId
from tests.builders import US, params, task
from tests.core.world import World

L0 = LaneId(0)


def world_of(**choices):
    """A world with all its lanes up."""
    world = World(params(**choices))
    for lane_id in world.device_of:
        world.lane_ready(lane_id)
    return world


def prepares(commands):
    return [c.task_id for c in commands if isinstance(c, PrepareTask)]


def test_a_task_that_comes_prepared_is_launched_in_the_same_call():
    world = world_of(lanes=1)
    world.advance(50 * US)
    assert world.arrive(task(0), prepared_since_ns=10 * US) == [
        LaunchTask(TaskId(0), L0, GroupId(0), 1, Bytes(1024))
    ]
    assert world.arrive(task(1), prepared_since_ns=20 * US) == []
    assert prepares(world.lane_lost(L0)) == [TaskId(0)], "what a lane lost is prepared again"
    world.finish_everything()
    first, second = world.answers[0].timeline, world.answers[1].timeline
    assert (first.prepare_started_ns, first.prepared_ns) == (50 * US, 50 * US)
    assert (second.prepare_started_ns, second.prepared_ns) == (20 * US, 50 * US)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_would_be_prepared_at_once_may_as_well_come_prepared(devices):
    world = world_of(lanes=1, devices=devices, prepare_ahead=1)
    for number in range(9):
        at_once = world.scheduler.prepares_at_once
        assert at_once is (number < 2 * devices)
        assert (prepares(world.arrive(task(number))) == [TaskId(number)]) is at_once
    world.tell(DrainStarted())
    assert not world.scheduler.prepares_at_once
    world.finish_everything()
