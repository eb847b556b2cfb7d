"""Lanes that hold too much or ran enough are started anew, and nothing is lost by it."""

import pytest

from serve.core.commands import LaunchTask, RecycleLane
from serve.core.events import LaneMeasured, TaskFailed
from serve.core.types import Bytes, FailReason, LaneId, TaskId
from serve.errors import InvariantViolation
from tests.builders import MS, US, params, task, unions_saving
from tests.core.world import World, ready

L0, L1, L2 = map(LaneId, range(3))
LIMIT = 100


@pytest.fixture
def world():
    found = World(params(lanes=3, lane_limit=LIMIT))
    for lane_id in (L0, L1, L2):
        found.lane_ready(lane_id)
    yield found
    found.finish_everything()


def test_an_idle_one_at_once(world):
    assert world.measure(L1, LIMIT) == []
    assert world.measure(L1, LIMIT + 1) == [RecycleLane(L1, "memory")]
    assert world.scheduler.lanes_up == 2
    assert world.lane_lost(L1) == []
    assert world.lane_ready(L1) == []
    assert world.scheduler.lanes_up == 3


def test_a_busy_one_when_its_run_has_ended_and_before_it_gets_the_next(world):
    ready(world, *(task(number) for number in range(4)))
    assert set(world.on_lane) == {L0, L1, L2}
    assert world.measure(L1, LIMIT + 1) == []
    told = world.end(L1)
    assert RecycleLane(L1, "memory") in told
    assert not any(isinstance(command, LaunchTask) for command in told)
    assert [c.lane_id for c in world.lane_ready(L1) if isinstance(c, LaunchTask)] == [L1]


def test_one_at_a_time(world):
    assert world.measure(L0, LIMIT + 1) == [RecycleLane(L0, "memory")]
    assert world.measure(L1, LIMIT + 1) == []
    assert world.measure(L2, LIMIT + 2) == []
    assert world.lane_lost(L0) == []
    assert world.lane_ready(L0) == [RecycleLane(L2, "memory")], "which holds more"
    assert world.lane_ready(L2) == [RecycleLane(L1, "memory")]


def test_one_that_holds_twice_its_limit_does_not_wait(world):
    assert world.measure(L0, LIMIT + 1) == [RecycleLane(L0, "memory")]
    assert world.measure(L1, 2 * LIMIT) == []
    assert world.measure(L1, 2 * LIMIT + 1) == [RecycleLane(L1, "memory")]


def test_one_that_gave_memory_back_or_died_by_itself_stays(world):
    ready(world, *(task(number) for number in range(3)))
    world.measure(L0, LIMIT + 1)
    world.measure(L0, LIMIT)
    assert RecycleLane(L0, "memory") not in world.end(L0)
    world.measure(L1, LIMIT + 1)
    world.lane_lost(L1)
    assert RecycleLane(L1, "memory") not in world.lane_ready(L1)


def test_without_a_limit_nothing_is_too_much():
    world = World(params(lanes=1))
    world.lane_ready(L0)
    assert world.measure(L0, 1 << 60) == []


@pytest.mark.parametrize("devices", [1, 2])
def test_a_lane_that_is_not_there_is_a_bug(devices):
    world = World(params(lanes=1, devices=devices, lane_limit=LIMIT))
    with pytest.raises(InvariantViolation, match="lane 7 is not one of"):
        world.scheduler.handle(LaneMeasured(LaneId(7), Bytes(1)), world.now)


def test_on_one_of_several_devices():
    world = World(params(lanes=2, devices=2, lane_limit=LIMIT))
    for lane_id in range(4):
        world.lane_ready(LaneId(lane_id))
    assert world.measure(LaneId(3), LIMIT + 1) == [RecycleLane(LaneId(3), "memory")]
    assert world.measure(LaneId(0), LIMIT + 1) == [RecycleLane(LaneId(0), "memory")], (
        "of another device"
    )
    world.finish_everything()


def run(world, lane_id, tasks):
    """Have the lane, the only one, run tasks one by one; return what each end has restarted."""
    told = []
    for _ in range(tasks):
        ready(world, task(len(world.tasks)))
        assert set(world.on_lane) == {lane_id}
        told.append([c for c in world.end(lane_id) if isinstance(c, RecycleLane)])
    return told


@pytest.fixture
def counting():
    found = World(params(lanes=1, lane_limit=LIMIT, lane_requests=3))
    found.lane_ready(L0)
    yield found
    found.finish_everything()


def test_one_that_ran_enough(counting):
    for _ in range(2):
        assert run(counting, L0, 3) == [[], [], [RecycleLane(L0, "requests")]]
        assert counting.scheduler.lanes_up == 0
        counting.lane_ready(L0)


def test_those_that_fail_or_ask_for_more_memory_count(counting):
    ready(counting, task(0))
    counting.end(L0, TaskFailed(TaskId(0), L0, FailReason.MODEL_ERROR, "raised"))
    ready(counting, task(1))
    assert RecycleLane(L0, "requests") not in counting.overrun(L0)
    counting.prepare(TaskId(1))
    assert RecycleLane(L0, "requests") in counting.end(L0)


@pytest.mark.parametrize("how", ["replace", "lane_lost"])
def test_a_new_process_counts_from_the_beginning(counting, how):
    run(counting, L0, 2)
    getattr(counting, how)(L0)
    if how == "lane_lost":
        counting.lane_ready(L0)
    assert run(counting, L0, 3) == [[], [], [RecycleLane(L0, "requests")]]


def test_a_new_process_holds_nothing(counting):
    ready(counting, task(0))
    counting.measure(L0, LIMIT + 1)
    counting.replace(L0)
    assert RecycleLane(L0, "memory") not in counting.end(L0)


def test_each_task_of_a_union_counts():
    world = World(params(lanes=1, lane_requests=3, unions=unions_saving(800 * US)))
    ready(world, *(task(number, target_ns=100 * MS) for number in range(3)))
    world.lane_ready(L0)
    assert len(world.members[world.on_lane[L0]]) == 3
    assert RecycleLane(L0, "requests") in world.end(L0)
    world.finish_everything()


def test_one_that_holds_too_much_comes_before_one_that_ran_enough():
    world = World(params(lanes=3, lane_limit=LIMIT, lane_requests=1))
    for lane_id in (L0, L1, L2):
        world.lane_ready(lane_id)
    ready(world, *(task(number) for number in range(3)))
    world.measure(L1, LIMIT + 1)
    assert [c for c in world.end(L0) if isinstance(c, RecycleLane)] == [RecycleLane(L0, "requests")]
    for lane_id in (L2, L1):
        assert not any(isinstance(c, RecycleLane) for c in world.end(lane_id))
    assert world.lane_ready(L0) == [RecycleLane(L1, "memory")]
    assert world.lane_ready(L1) == [RecycleLane(L2, "requests")]
    world.finish_everything()
