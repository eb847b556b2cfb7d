"""Lanes that hold more memory than they may are started anew, and nothing is lost by it."""

import pytest

from serve.core.commands import LaunchTask, RecycleLane
from serve.core.events import LaneMeasured
from serve.core.types import Bytes, LaneId
from serve.errors import InvariantViolation
from tests.builders import params, task
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
    assert world.measure(L1, LIMIT + 1) == [RecycleLane(L1)]
    assert world.scheduler.lanes_up == 2
    assert world.lane_lost(L1) == []
    assert world.lane_ready(L1) == []
    assert world.scheduler.lanes_up == 3


def test_a_busy_one_when_its_run_has_ended_and_before_it_gets_the_next(world):
    ready(world, *(task(number) for number in range(4)))
    assert set(world.on_lane) == {L0, L1, L2}
    assert world.measure(L1, LIMIT + 1) == []
    told = world.end(L1)
    assert RecycleLane(L1) in told
    assert not any(isinstance(command, LaunchTask) for command in told)
    assert [c.lane_id for c in world.lane_ready(L1) if isinstance(c, LaunchTask)] == [L1]


def test_one_at_a_time(world):
    assert world.measure(L0, LIMIT + 1) == [RecycleLane(L0)]
    assert world.measure(L1, LIMIT + 1) == []
    assert world.measure(L2, LIMIT + 2) == []
    assert world.lane_lost(L0) == []
    assert world.lane_ready(L0) == [RecycleLane(L2)], "which holds more"
    assert world.lane_ready(L2) == [RecycleLane(L1)]


def test_one_that_holds_twice_its_limit_does_not_wait(world):
    assert world.measure(L0, LIMIT + 1) == [RecycleLane(L0)]
    assert world.measure(L1, 2 * LIMIT) == []
    assert world.measure(L1, 2 * LIMIT + 1) == [RecycleLane(L1)]


def test_one_that_gave_memory_back_or_died_by_itself_stays(world):
    ready(world, *(task(number) for number in range(3)))
    world.measure(L0, LIMIT + 1)
    world.measure(L0, LIMIT)
    assert RecycleLane(L0) not in world.end(L0)
    world.measure(L1, LIMIT + 1)
    world.lane_lost(L1)
    assert RecycleLane(L1) not in world.lane_ready(L1)


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
    assert world.measure(LaneId(3), LIMIT + 1) == [RecycleLane(LaneId(3))]
    assert world.measure(LaneId(0), LIMIT + 1) == [RecycleLane(LaneId(0))], "of another device"
    world.finish_everything()
