"""Runs far beyond their estimates: the longer they have taken, the more they are expected to."""

import pytest

from serve.core.commands import SuspendTask
from serve.core.types import LaneId, Nanos
from tests.builders import MS, params, task
from tests.core.world import World, ready

SECOND = 1_000_000_000


def held_world(lanes=4):
    """Two slots, both held by runs of an estimated 38 ms."""
    choices = {"policy": "slack", "discipline": "preemptive", "can_suspend": True}
    world = World(params(lanes=lanes, parallelism=2, **choices))
    for lane in range(lanes):
        world.lane_ready(LaneId(lane))
    ready(world, task(0, run_ns=38 * MS), task(1, run_ns=38 * MS))
    return world


def test_a_run_within_twice_its_estimate_may_end_at_any_moment():
    world = held_world()
    board = world.scheduler.parts.board
    run = board.busy[0]
    left = [board.left_ns(run, Nanos(int(age * 38 * MS))) for age in (0.5, 1, 2)]
    assert left == [19 * MS, 1, 1]


def test_beyond_that_it_is_expected_to_take_as_long_again():
    world = held_world()
    board = world.scheduler.parts.board
    run = board.busy[0]
    assert board.left_ns(run, Nanos(3 * 38 * MS)) == 38 * MS
    assert board.left_ns(run, Nanos(SECOND)) == SECOND - 2 * 38 * MS


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("lanes", [3, 4])
def test_a_short_request_does_not_wait_for_late_runs_that_are_held(lanes, is_late):
    """Also when it is late itself, and when it takes the last lane."""
    world = held_world(lanes)
    world.advance(10 * SECOND)
    arrived_ns = world.now - (SECOND if is_late else 0)
    world.arrive(task(2, run_ns=38 * MS, arrived_ns=arrived_ns))
    commands = world.prepare(2)
    assert next(type(command) for command in commands) is SuspendTask
    assert 2 in world.on_lane.values()


def test_a_suspended_run_keeps_what_it_is_expected_to_need():
    world = held_world()
    world.advance(SECOND)
    ready(world, task(2, run_ns=38 * MS, arrived_ns=world.now))
    lane = min(world.stopped)
    board = world.scheduler.parts.board
    left_ns = board.left_ns(board.busy[lane], world.now)
    assert left_ns == SECOND - 2 * 38 * MS
    assert board.left_ns(board.busy[lane], Nanos(world.now + SECOND)) == left_ns
