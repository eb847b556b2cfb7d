"""Several devices behind one door: where tasks go, when they move, what is counted together."""

from dataclasses import replace

import pytest

from serve.core.commands import LaunchTask
from serve.core.disciplines import DISCIPLINES
from serve.core.events import DrainStarted, TaskPrepared
from serve.core.fleet.fleet import Fleet, make_scheduler
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Expired, LaneId, Rejected, RejectReason, TaskId
from serve.errors import InvariantViolation
from tests.builders import MS, device, params, sized, task
from tests.core.world import World


def world_of(**given):
    """Two devices with two lanes each unless given otherwise, all up: lanes 0, 1 and 2, 3."""
    found = World(params(**{"devices": 2, "policy": "slack", "prepare_ahead": 0, **given}))
    for lane_id in found.device_of:
        found.lane_ready(lane_id)
    return found


def arrive(world, count=1, *, prepare=True, **given):
    """That many more tasks, prepared when asked for."""
    for _ in range(count):
        world.arrive(task(len(world.tasks), arrived_ns=world.now, **given))
        if prepare:
            prepare_all(world)


def prepare_all(world):
    """Every prepare under way ends."""
    while world.preparing:
        world.prepare(min(world.preparing))


def end(world, lane_id):
    """The lane's run ends, and so do the prepares it sets off."""
    world.end(LaneId(lane_id))
    prepare_all(world)


def devices_of(world):
    """How many tasks execute, by device."""
    counts = [0] * len(world.budgets)
    for lane_id in world.on_lane:
        counts[world.device_of[lane_id]] += 1
    return counts


def unequal(*budgets):
    """A world of devices with one lane and such memory each, all up."""
    first, *more = (replace(device(budget=b), lane_ids=(LaneId(i),)) for i, b in enumerate(budgets))
    found = World(replace(params(), device=first, more_devices=tuple(more)))
    for lane_id in found.device_of:
        found.lane_ready(lane_id)
    return found


def test_one_device_needs_no_fleet():
    assert isinstance(make_scheduler(params()), Scheduler)
    assert isinstance(make_scheduler(params(devices=2)), Fleet)


def test_a_lane_is_of_one_device():
    facts = device()
    with pytest.raises(ValueError, match="no lane is of two devices"):
        replace(params(), device=facts, more_devices=(facts,))
    with pytest.raises(InvariantViolation, match="lane 9 is not one of"):
        world_of().lane_ready(LaneId(9))


def test_work_is_spread():
    world = world_of()
    arrive(world, 4)
    assert devices_of(world) == [2, 2]


def test_a_task_goes_where_less_work_is_ahead_of_it():
    world = world_of(lanes=1)
    arrive(world, run_ns=50 * MS)
    arrive(world, run_ns=2 * MS)
    arrive(world, run_ns=2 * MS)
    end(world, 1)
    assert world.on_lane[LaneId(1)] == 2
    # What has run already is no longer ahead of anybody.
    arrive(world, run_ns=40 * MS)
    world.advance(49 * MS)
    arrive(world, run_ns=MS)
    end(world, 0)
    assert world.on_lane[LaneId(0)] == 4


def test_only_devices_that_can_ever_hold_it_are_asked():
    world = unequal(1024, 8192)
    arrive(world, reserve=4096)
    arrive(world, reserve=8192)
    assert devices_of(world) == [0, 1]
    end(world, 1)
    assert devices_of(world) == [0, 1]
    arrive(world, reserve=8193)
    refused = world.answers[TaskId(2)]
    assert isinstance(refused, Rejected)
    assert (refused.reason, "has 8192" in refused.message) == (RejectReason.TOO_BIG, True)


@pytest.mark.parametrize("discipline", sorted(DISCIPLINES))
@pytest.mark.parametrize("window", ["adaptive", "fixed"])
def test_a_device_that_falls_idle_takes_what_waits_for_another(discipline, window):
    world = world_of(lanes=1, discipline=discipline, window=window, window_ns=MS)
    # Both believed to be short, so that two wait for each; lane 0's then does not end.
    arrive(world, 6)
    world.advance(MS)
    prepare_all(world)
    for _ in range(5):
        end(world, 1)
    assert len(world.answers) == 5
    assert world.scheduler.queued_count == 0
    assert devices_of(world) == [1, 0]


def test_a_prepared_task_moves_and_is_not_prepared_again():
    world = world_of(lanes=1, prepare_ahead=4)
    arrive(world, 4)
    assert world.prepared == {0, 1, 2, 3}
    end(world, 1)
    end(world, 1)
    assert devices_of(world) == [1, 1]
    assert not world.preparing


def test_a_task_moves_while_it_is_prepared():
    world = world_of(lanes=1, prepare_ahead=4)
    arrive(world, 2)
    arrive(world, 2, prepare=False)
    world.end(LaneId(1))
    world.prepare(TaskId(2))
    world.prepare(TaskId(3))
    world.end(LaneId(1))
    assert devices_of(world) == [1, 1]


def test_what_lacks_memory_on_its_device_takes_it_elsewhere():
    world = world_of(budget=4096, lanes=2)
    arrive(world, 2, reserve=3072, run_ns=10 * MS)
    arrive(world, reserve=3072, run_ns=MS)
    assert devices_of(world) == [1, 1]
    end(world, 2)
    assert devices_of(world) == [1, 1]
    assert world.scheduler.queued_count == 0


def test_a_lost_device_hands_everything_to_the_others():
    world = world_of(prepare_ahead=4)
    arrive(world, 10)
    assert devices_of(world) == [2, 2]
    commands = world.lane_lost(LaneId(0), LaneId(1))
    prepare_all(world)
    assert not any(isinstance(c, LaunchTask) and c.lane_id < 2 for c in commands)
    while world.on_lane:
        end(world, min(world.on_lane))
    assert len(world.answers) == 10
    assert all(isinstance(outcome, Completed) for outcome in world.answers.values())
    assert sum(outcome.placement.attempt == 2 for outcome in world.answers.values()) == 2


def test_arrivals_wait_for_lanes_when_no_device_has_any():
    world = world_of()
    world.lane_lost(LaneId(0), LaneId(1))
    world.lane_lost(LaneId(2), LaneId(3))
    arrive(world, 3)
    assert not world.on_lane
    world.lane_ready(LaneId(3))
    prepare_all(world)
    assert devices_of(world) == [0, 1]


def test_what_a_shrunken_budget_can_no_longer_hold_moves():
    world = unequal(8192, 8192)
    arrive(world, 4, reserve=8000)
    world.change_budget(1024, 0)
    for _ in range(3):
        end(world, 1)
    end(world, 0)
    assert all(isinstance(outcome, Completed) for outcome in world.answers.values())
    assert len(world.answers) == 4


def test_what_turns_out_too_big_for_its_device_moves():
    world = unequal(2048, 8192)
    arrive(world, reserve=1024, run_ns=MS, prepare=False)
    world.prepare(TaskId(0), sized(reserve=4096))
    assert devices_of(world) == [0, 1]


def test_the_queue_is_the_servers():
    world = world_of(lanes=1, max_queue=3)
    arrive(world, 4)
    refused = world.answers[TaskId(3)]
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectReason.QUEUE_FULL


def test_groups_have_numbers_of_their_own():
    world = world_of(discipline="barrier")
    found = set()
    for _ in range(6):
        arrive(world)
    for lane_id in list(world.on_lane):
        end(world, lane_id)
    while world.on_lane:
        end(world, min(world.on_lane))
    lanes = {}
    for outcome in world.answers.values():
        found.add(outcome.placement.group_id)
        device_id = world.device_of[outcome.placement.lane_id]
        lanes.setdefault(outcome.placement.group_id, set()).add(device_id)
    assert len(found) > 2
    assert all(len(devices) == 1 for devices in lanes.values())


def test_stories_and_states_are_the_servers():
    world = world_of()
    arrive(world)
    assert world.scheduler.state(TaskId(0)).label == "running"
    assert "TaskArrived" in world.scheduler.story(TaskId(0))[0]
    assert world.scheduler.state(TaskId(5)) is None
    with pytest.raises(InvariantViolation, match="before it arrived"):
        world.tell(TaskPrepared(TaskId(5)))
    assert [device.budget_bytes for device in world.scheduler.devices] == [1 << 20] * 2
    assert world.scheduler.budget_bytes == 2 << 20


def test_drained_when_all_devices_are():
    world = world_of()
    arrive(world, 6)
    world.tell(DrainStarted())
    assert world.scheduler.draining
    assert not world.scheduler.drained
    world.finish_everything()
    assert world.scheduler.drained


def test_the_most_urgent_of_all_gets_the_lane_that_comes_free():
    world = world_of(lanes=1, prepare_ahead=4)
    arrive(world, 2, run_ns=20 * MS)
    arrive(world, run_ns=15 * MS)
    arrive(world, run_ns=10 * MS)
    # Both wait for the other device than the urgent one, which follows a longer one there.
    arrive(world, run_ns=MS)
    on_first = set(world.scheduler.devices[0].parts.tasks.records)
    lane_id = LaneId(0 if TaskId(4) not in on_first else 1)
    end(world, lane_id)
    assert world.on_lane[lane_id] == 4


def test_what_is_due_on_one_device_is_done_at_any_event_of_another():
    world = world_of(lanes=1)
    arrive(world)
    arrive(world, timeout_ns=3 * MS)
    lanes = {one: lane for lane, one in world.on_lane.items()}
    assert world.device_of[lanes[0]] != world.device_of[lanes[1]]
    world.now += 5 * MS  # the tick for the time limit is late
    world.end(lanes[0])
    assert world.answers[1] == Expired("running")
