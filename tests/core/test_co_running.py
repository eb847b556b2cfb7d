"""Runs that disturb one another: what is expected of them, and when one more is launched."""

import pytest

from serve.core.events import SlowdownChanged
from serve.core.policies import get_policy
from serve.core.rules.co_running import leaves_room
from serve.core.slowdown import ends_ns
from serve.core.state.device_state import Board
from serve.core.state.plan import Plan
from serve.core.state.record import Record
from serve.core.types import LaneId, Nanos, TaskId
from tests.builders import MS, US, device, params, task
from tests.core.world import World, ready

STRONG = (1.0, 1.6, 2.2, 2.9)


@pytest.fixture
def start():
    """Make a world with all lanes up; everything is finished and checked at the end."""
    worlds = []

    def make(slowdown=STRONG, *, lanes=4, **choices):
        world = World(params(lanes=lanes, slowdown=slowdown, **{"policy": "slack"} | choices))
        for lane in sorted(world.device_of):
            world.lane_ready(lane)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.finish_everything()


def run_of(task_id, run_ms, factor=2.0, **others):
    """A task that takes so long, with a target of `factor` times that."""
    run_ns = int(run_ms * MS)
    return task(task_id, run_ns=run_ns, prepare_ns=0, target_ns=int(factor * run_ns), **others)


def test_ends_of_runs_that_share_a_device():
    assert ends_ns([], STRONG) == []
    assert ends_ns([5], STRONG) == [5]
    # Side by side at 1.6 until the short one ends, then alone.
    assert ends_ns([2, 5], STRONG) == pytest.approx([3.2, 6.2])
    # More than the table knows: as its last.
    assert ends_ns([1, 1, 1], (1.0, 1.5)) == pytest.approx([1.5, 1.5, 1.5])


def test_expected_ends_count_the_company_that_was():
    board = Board(device(lanes=3, slowdown=(1.0, 2.0, 4.0)), Plan(False), get_policy("slack"))
    board.lane_up(LaneId(0))
    board.lane_up(LaneId(1))

    def occupy(task_id, run_ms, at_ms):
        one = run_of(task_id, run_ms)
        record = Record(one, (0,), Nanos(0), 1, 0, one.estimate.solo_ns)
        return board.occupy((record,), one.estimate, Nanos(at_ms * MS))

    first = occupy(0, 10, 0)
    second = occupy(1, 10, 4)
    now = Nanos(8 * MS)
    # 4 ms alone and 4 ms at half speed; 4 ms at half speed.
    assert (board.left_ns(first, now), board.left_ns(second, now)) == (4 * MS, 8 * MS)
    assert (board.co_run_ns(first, now), board.co_run_ns(second, now)) == (4 * MS, 4 * MS)
    board.suspend(second, now)
    now = Nanos(11 * MS)
    assert (board.left_ns(first, now), board.left_ns(second, now)) == (MS, 8 * MS)
    board.resume(second, now)
    board.set_slowdown((1.0, 4.0), Nanos(13 * MS))
    now = Nanos(17 * MS)
    # 2 ms at half speed and 4 ms at a quarter.
    assert board.left_ns(second, now) == 6 * MS
    board.vacate(first, now)
    assert board.left_ns(second, Nanos(20 * MS)) == 3 * MS
    assert board.co_run_ns(second, Nanos(20 * MS)) == 4 * MS + 6 * MS


def test_what_would_be_late_beside_others_ranks_as_late():
    board = Board(device(lanes=2, slowdown=(1.0, 2.0)), Plan(False), get_policy("slack"))
    ranks = []
    for task_id, factor in ((0, 2.1), (1, 1.9)):
        one = run_of(task_id, 10, factor)
        record = Record(one, (0,), Nanos(0), 1, 0, one.estimate.solo_ns)
        ranks.append(board.rank(record, one.estimate.run_ns, Nanos(0)))
    # Alone both would be in time; at half speed the second is not.
    assert [is_late for _, (is_late, *_) in ranks] == [False, True]


@pytest.mark.parametrize(("executing", "room"), [(0, True), (1, True), (2, False), (3, False)])
def test_room_is_left_for_the_next_one_beside_all_that_execute_then(executing, room):
    late = run_of(0, 10, 2.0)
    # One that joins later runs beside those that execute and the late one.
    assert leaves_room(late, (1.0, 1.2, 1.4, 3.0), executing) is room


@pytest.mark.parametrize("since_ms", [0, 500])
def test_one_that_makes_two_late_waits_for_an_end(start, since_ms):
    world = start()
    world.advance(since_ms * MS)
    now = {"arrived_ns": world.now}
    ready(world, run_of(0, 10, 1.8, **now), run_of(1, 10, 1.8, **now))
    assert sorted(world.on_lane.values()) == [0, 1]
    # All three at 2.2: it would be in time, and both others late.
    ready(world, run_of(2, 10, 3.0, **now))
    assert sorted(world.on_lane.values()) == [0, 1]
    world.advance(16 * MS)
    world.end(LaneId(0))
    assert sorted(world.on_lane.values()) == [1, 2]


def test_one_for_one_is_no_reason_to_wait(start):
    world = start()
    ready(world, run_of(0, 10, 1.5), run_of(1, 10, 2.9))
    assert sorted(world.on_lane.values()) == [0, 1]


def test_those_that_stay_in_time_run_together(start):
    world = start()
    ready(world, run_of(0, 10), run_of(1, 10), run_of(2, 1))
    # At 1.6 two are in time; a third takes 2.2 times as long, and only the last has time for it.
    assert sorted(world.on_lane.values()) == [0, 1]
    ready(world, run_of(3, 1, 4.0))
    assert sorted(world.on_lane.values()) == [0, 1, 3]


def test_a_late_one_does_not_take_the_place_of_those_to_come(start):
    world = start()
    ready(world, run_of(0, 10, 9.0), run_of(1, 10, 0.5))
    assert list(world.on_lane.values()) == [0]
    # Where one more costs little there is room for both.
    world.tell(SlowdownChanged((1.0, 1.05, 1.1)))
    # It targets half of its run time, so nothing of its kind can ever be in time.
    assert list(world.on_lane.values()) == [0]
    ready(world, run_of(2, 10, 2.0, arrived_ns=-11 * MS))
    assert sorted(world.on_lane.values()) == [0, 2]


@pytest.mark.parametrize("policy", ["fifo", "sqtf"])
def test_policies_that_order_by_something_else_launch_what_is_next(start, policy):
    world = start(policy=policy)
    ready(world, run_of(0, 10, 1.5), run_of(1, 11, 1.5), run_of(2, 12, 0.5))
    assert sorted(world.on_lane.values()) == [0, 1, 2]


def test_no_slowdown_means_no_question_asked(start):
    world = start((1.0,))
    ready(world, run_of(0, 10, 1.0), run_of(1, 10, 1.0), run_of(2, 10, 0.1))
    assert sorted(world.on_lane.values()) == [0, 1, 2]


def test_what_has_waited_too_long_joins_whoever_is_there(start):
    world = start(lanes=2, patience=2)
    ready(world, run_of(0, 10, 0.5), run_of(1, 10, 0.5))
    for number in range(2, 6):
        ready(world, run_of(number, 0.1, 500.0, arrived_ns=world.now))
    while 1 not in world.launches and world.on_lane:
        world.advance(100 * US)
        world.end(max(world.on_lane))
    assert world.launches[TaskId(1)] == 1


def test_a_device_with_company_gives_to_one_without(start):
    world = start(lanes=4, devices=2)
    ready(world, *(run_of(number, 10, 1.8) for number in range(4)))
    assert sorted(world.device_of[lane] for lane in world.on_lane) == [0, 0, 1, 1]
    # Beside two it would make both late; a device where nothing executes takes it.
    ready(world, run_of(4, 10, 3.0))
    assert len(world.on_lane) == 4
    for lane in [lane for lane in world.on_lane if world.device_of[lane] == 1]:
        world.end(lane)
    assert 4 in world.on_lane.values()


def test_a_table_must_make_sense():
    for wrong in ((), (0.9,), (1.0, 0.8), (1.2, 1.5)):
        with pytest.raises(ValueError, match="slowdown must start at 1 and never fall"):
            device(slowdown=wrong)
        with pytest.raises(ValueError, match="slowdown must"):
            SlowdownChanged(wrong)
