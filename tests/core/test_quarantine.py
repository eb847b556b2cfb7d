"""A model whose runs keep ending their lanes: counted, rejected, failed, forgiven, forgotten."""

import pytest

from serve.core.commands import LaunchTask, QuarantineModel, SuspendTask
from serve.core.events import TaskFailed
from serve.core.rules.quarantine import Quarantine
from serve.core.types import Failed, FailReason, LaneId, Rejected, RejectReason
from tests.builders import MS, params, task
from tests.core.world import World, ready

SECOND_NS = 1_000_000_000
BAD = "bad:1"
L0 = LaneId(0)


APART_NS = 100 * MS


def lose(found, count, now_ns=0):
    """Lose lanes one after the other, the last of them at `now_ns`."""
    return [found.lane_lost(BAD, now_ns - left * APART_NS) for left in reversed(range(count))]


def test_lanes_that_end_together_count_once():
    """As they do when the process ends that they come from."""
    found = Quarantine()
    for at in range(4):
        assert [found.lane_lost(BAD, at * APART_NS + n) for n in range(8)] == [False] * 8
    assert found.lane_lost(BAD, 4 * APART_NS)
    assert found.reason(BAD, 4 * APART_NS).startswith("its runs ended 33 lanes")


def test_several_lost_lanes_in_a_row_begin_a_quarantine_and_time_ends_it():
    found = Quarantine()
    assert lose(found, 5) == [False] * 4 + [True]
    assert found.left_ns(BAD, 0) == 30 * SECOND_NS
    words = "its runs ended 5 lanes; it is not run for another 30 s"
    assert found.reason(BAD, SECOND_NS // 2) == words
    assert found.reason(BAD, 29 * SECOND_NS + 1).endswith("for another 1 s")
    assert found.reason(BAD, 30 * SECOND_NS) == ""
    assert found.reason("good:1", 0) == ""


def test_afterwards_one_more_is_enough_and_lasts_twice_as_long():
    found = Quarantine()
    lose(found, 5)
    now_ns, lengths = 30 * SECOND_NS, []
    for _ in range(6):
        assert lose(found, 1, now_ns) == [True]
        lengths.append(found.left_ns(BAD, now_ns) // SECOND_NS)
        now_ns += lengths[-1] * SECOND_NS
    assert lengths == [60, 120, 240, 480, 600, 600]


def test_runs_that_keep_their_lane_outweigh_a_bad_request_now_and_then():
    found = Quarantine()
    for _ in range(100):
        assert lose(found, 2) == [False, False]
        for _ in range(4):
            found.lane_kept(BAD)
    assert not found.left_ns(BAD, 0)


def test_a_model_that_is_well_again_starts_anew():
    found = Quarantine()
    lose(found, 5)
    for _ in range(8):
        found.lane_kept(BAD)
    now_ns = 100 * SECOND_NS
    assert lose(found, 5, now_ns) == [False] * 4 + [True]
    assert found.left_ns(BAD, now_ns) == 30 * SECOND_NS


def test_lanes_lost_by_runs_under_way_do_not_make_it_longer():
    found = Quarantine()
    lose(found, 5)
    assert lose(found, 1, SECOND_NS) == [False]
    assert found.left_ns(BAD, SECOND_NS) == 29 * SECOND_NS


def bad(number, **fields):
    return task(number, model=BAD, **fields)


def lose_a_lane(world, lane_id):
    """Lose a lane long enough after the one before."""
    world.advance(APART_NS)
    return world.lane_lost(lane_id)


def lose_lanes(world, count):
    """Launch tasks of the bad model on lane 0 and lose the lane under each, `count` times."""
    told = []
    for _ in range(count):
        if L0 not in world.on_lane:
            ready(world, bad(len(world.tasks), arrived_ns=world.now))
        told += lose_a_lane(world, L0)
        world.lane_ready(L0)
        while world.preparing:
            world.prepare(min(world.preparing))
    return [command for command in told if isinstance(command, QuarantineModel)]


@pytest.fixture
def world():
    made = World(params(lanes=1, policy="fifo"))
    made.lane_ready(L0)
    return made


def test_the_scheduler_rejects_and_says_so_once(world):
    reason = "its runs ended 5 lanes; it is not run for another 30 s"
    assert lose_lanes(world, 5) == [QuarantineModel(BAD, reason)]
    assert world.scheduler.quarantine_reason(BAD, world.now) == reason
    world.arrive(bad(50))
    rejected = Rejected(RejectReason.QUARANTINED, reason, 30 * SECOND_NS)
    assert world.answers[50] == rejected
    world.advance(30 * SECOND_NS)
    ready(world, bad(51, arrived_ns=world.now))
    assert world.on_lane == {L0: 51}


def test_those_that_wait_already_fail_when_it_is_their_turn_and_others_run(world):
    lose_lanes(world, 4)
    if L0 not in world.on_lane:
        ready(world, bad(10))
    ready(world, bad(11), task(12, model="good:1"), bad(13))
    lose_a_lane(world, L0)
    world.lane_ready(L0)
    while world.preparing:
        world.prepare(min(world.preparing))
    assert world.on_lane == {L0: 12}
    assert world.answers[11] == Failed(
        FailReason.QUARANTINED, "its runs ended 5 lanes; it is not run for another 30 s"
    )
    world.end(L0)
    assert world.answers[13].reason is FailReason.QUARANTINED


def test_more_than_the_moves_of_one_call_fail_in_one_call(world):
    lose_lanes(world, 4)
    if L0 not in world.on_lane:
        ready(world, bad(10))
    for number in range(20, 60):
        world.arrive(bad(number), prepared_since_ns=world.now)
    lose_a_lane(world, L0)
    world.lane_ready(L0)
    world.finish_everything()
    failed = [world.answers[number].reason for number in range(20, 60)]
    assert failed == [FailReason.QUARANTINED] * 40


def test_no_run_is_suspended_for_a_task_that_is_not_launched():
    choices = {"policy": "slack", "discipline": "preemptive", "can_suspend": True}
    world = World(params(lanes=2, parallelism=1, **choices))
    world.lane_ready(L0)
    lose_lanes(world, 4)
    world.lane_ready(LaneId(1))
    waiting = bad(30, arrived_ns=world.now, run_ns=MS, target_ns=4 * MS)
    world.arrive(waiting)  # before the quarantine begins, prepared only after it
    if not world.on_lane:
        ready(world, bad(31, arrived_ns=world.now))
    lose_a_lane(world, min(world.on_lane))
    ready(world, task(32, model="good:1", run_ns=100 * MS, arrived_ns=world.now))
    commands = world.prepare(30) if 30 in world.preparing else []
    assert not any(isinstance(command, LaunchTask | SuspendTask) for command in commands)
    assert world.answers[30].reason is FailReason.QUARANTINED


def test_errors_are_forgiven_as_answers_are(world):
    for _ in range(20):
        told = lose_lanes(world, 1)
        assert told == []
        while world.on_lane or world.preparing:
            if world.preparing:
                world.prepare(min(world.preparing))
            else:
                run = world.on_lane[L0]
                world.end(L0, TaskFailed(run, L0, FailReason.MODEL_ERROR, "raised"))
        for number in range(3):
            ready(world, bad(1000 + number + 10 * len(world.tasks), arrived_ns=world.now))
            world.end(L0)


def test_it_is_that_of_all_devices_and_ends_when_the_model_is_unloaded():
    world = World(params(lanes=1, devices=2))
    for lane_id in world.device_of:
        world.lane_ready(lane_id)
    lost = 0
    while lost < 5:
        if not world.on_lane:
            ready(world, bad(len(world.tasks), arrived_ns=world.now))
        lane_id = min(world.on_lane)
        lose_a_lane(world, lane_id)
        world.lane_ready(lane_id)
        while world.preparing:
            world.prepare(min(world.preparing))
        lost += 1
    world.arrive(bad(90))
    assert world.answers[90].reason is RejectReason.QUARANTINED
    world.unload(BAD)
    ready(world, bad(91, arrived_ns=world.now))
    assert 91 in world.on_lane.values()
