"""Tasks whose size is known only once they are prepared."""

import pytest

from serve.core.events import TaskCancelled
from serve.core.types import Completed, FailReason, LaneId
from tests.builders import MS, params, sized, task
from tests.core.world import World

L0, L1 = LaneId(0), LaneId(1)
BUDGET = 100


@pytest.fixture(params=["rolling", "barrier", "preemptive"])
def world(request):
    world = World(
        params(lanes=2, budget=BUDGET, discipline=request.param, policy="fifo", can_suspend=True)
    )
    for lane in (L0, L1):
        world.lane_ready(lane)
    yield world
    world.finish_everything()


def test_it_reserves_what_it_was_found_to_need(world):
    world.arrive(task(0, reserve=30))
    world.prepare(0, sized(reserve=80))
    assert world.held[0] == 80


def test_one_found_larger_waits_for_the_memory(world):
    world.arrive(task(0, reserve=30))
    world.prepare(0)
    world.arrive(task(1, reserve=30))
    if world.preparing:
        world.prepare(1, sized(reserve=80))
    assert world.on_lane == {L0: 0}
    world.end(L0)
    if world.preparing:
        world.prepare(1, sized(reserve=80))
    assert list(world.on_lane.values()) == [1]
    assert world.held[1] == 80


def test_one_found_larger_than_the_device_fails_with_both_numbers(world):
    world.arrive(task(0, reserve=30))
    world.prepare(0, sized(reserve=BUDGET + 1))
    outcome = world.answers[0]
    assert outcome.reason is FailReason.OUT_OF_MEMORY
    assert "needs 101 bytes, the device has 100" in outcome.message
    assert 0 in world.released


def test_the_target_stays_as_promised(world):
    world.arrive(task(0, reserve=30, run_ns=MS, target_ns=3 * MS))
    world.prepare(0, sized(reserve=30, run_ns=50 * MS))
    now = world.scheduler.parts.tasks.records[0].task
    assert (now.estimate.run_ns, now.qos.target_ns, now.due_ns) == (50 * MS, 3 * MS, 3 * MS)


def test_work_counted_on_arrival_is_taken_back_as_counted(world):
    world.arrive(task(0, reserve=30, run_ns=MS))
    world.prepare(0, sized(reserve=30, run_ns=50 * MS))
    world.end(L0)
    assert world.scheduler.parts.tasks.work_ns == 0


def test_after_an_overrun_it_still_gets_all_the_memory(world):
    world.arrive(task(0, reserve=30))
    world.prepare(0, sized(reserve=40))
    world.overrun(L0)
    world.prepare(0, sized(reserve=40))
    assert world.held[0] == BUDGET


def test_one_cancelled_while_it_was_prepared_stays_cancelled(world):
    world.arrive(task(0, reserve=30))
    world.tell(TaskCancelled(0))
    world.prepare(0, sized(reserve=BUDGET + 1))
    assert 0 in world.released
    assert not isinstance(world.answers[0], Completed)
