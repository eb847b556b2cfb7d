"""Tasks that ask for more memory than was reserved: run again alone, once."""

import pytest

from serve.core.commands import PrepareTask
from serve.core.events import RunTakesLess
from serve.core.types import Bytes, FailReason, LaneId, TaskId
from serve.errors import InvariantViolation
from tests.builders import params, task
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


def run(world, *tasks):
    for one in tasks:
        world.arrive(one)
    while world.preparing:
        world.prepare(min(world.preparing))


#: A barrier would run the two one after the other.
side_by_side = pytest.mark.parametrize("world", ["rolling", "preemptive"], indirect=True)


@side_by_side
def test_it_runs_again_when_it_can_have_all_the_memory(world):
    run(world, task(0, reserve=30), task(1, reserve=30))
    assert world.overrun(L0) == [PrepareTask(TaskId(0))]
    world.prepare(0)
    assert world.on_lane == {L1: 1}, "not beside another"
    world.end(L1)
    assert world.on_lane == {L0: 0}
    assert world.held[0] == BUDGET
    world.end(L0)
    placement = world.answers[0].placement
    assert (placement.attempt, placement.co_runners, placement.overran) == (2, 0, True)
    assert not world.answers[1].placement.overran


def test_it_fails_when_all_the_memory_is_not_enough(world):
    run(world, task(0, reserve=30))
    world.overrun(L0)
    world.prepare(0)
    (lane,) = world.on_lane
    world.overrun(lane)
    outcome = world.answers[0]
    assert outcome.reason is FailReason.OUT_OF_MEMORY
    assert outcome.message == f"asked for more; the device has {BUDGET} bytes for tasks"
    assert 0 in world.released


def test_a_task_that_had_all_the_memory_does_not_run_again(world):
    run(world, task(0, reserve=BUDGET))
    world.overrun(L0)
    assert world.answers[0].reason is FailReason.OUT_OF_MEMORY


def test_one_that_is_answered_already_does_not_run_again(world):
    run(world, task(0, reserve=30, timeout_ns=1000))
    world.advance(1000)
    assert world.on_lane == {L0: 0}
    world.overrun(L0)
    assert 0 in world.released
    assert world.launches[0] == 1


@side_by_side
def test_what_a_run_gives_back_is_anothers(world):
    """A captured run is replayed in memory of its own: the reservation is free meanwhile."""
    run(world, task(0, reserve=80), task(1, reserve=70))
    assert world.on_lane == {L0: 0}
    world.takes_less(L0, 10)
    assert world.on_lane == {L0: 0, L1: 1}
    assert world.reserved() == 80
    # It had less than estimated, so it runs again with that, once the other gave it back.
    assert world.overrun(L0) == [PrepareTask(TaskId(0))]
    world.prepare(0)
    assert world.on_lane == {L1: 1}
    world.end(L1)
    assert (world.held[0], world.reserved()) == (80, 80)
    world.end(world_lane(world))
    assert not world.answers[0].placement.overran


def test_more_than_a_run_has_is_nothing_to_give_back(world):
    run(world, task(0, reserve=30))
    for size_bytes in (40, 30):
        world.takes_less(L0, size_bytes)
        assert world.reserved() == 30
    with pytest.raises(InvariantViolation, match="RunTakesLess from lane 1"):
        world.scheduler.handle(RunTakesLess(TaskId(0), L1, Bytes(1)), world.now)


def world_lane(world):
    (lane,) = world.on_lane
    return lane


@side_by_side
@pytest.mark.parametrize("budget", [BUDGET // 2, 2 * BUDGET])
def test_all_the_memory_is_what_there_is_when_it_runs(world, budget):
    run(world, task(0, reserve=30), task(1, reserve=30))
    world.overrun(L0)
    world.change_budget(budget)
    world.prepare(0)
    world.end(L1)
    assert world.on_lane == {L0: 0}
    assert world.held[0] == budget


def test_a_lane_that_dies_under_it_ends_it(world):
    run(world, task(0, reserve=30))
    world.overrun(L0)
    world.prepare(0)
    (lane,) = world.on_lane
    world.lane_lost(lane)
    assert world.answers[0].reason is FailReason.LANE_LOST
    assert "alone, after it overran" in world.answers[0].message


def test_one_handed_over_by_a_lost_lane_may_still_overrun(world):
    run(world, task(0, reserve=30))
    world.lane_lost(L0)
    world.prepare(0)
    world.overrun(L1)
    world.prepare(0)
    assert world.held[0] == BUDGET
    world.end(L1)
    assert world.answers[0].placement.attempt == 3
