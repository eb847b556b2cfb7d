"""Runs that take far longer than expected: who stands still, who computes, and who is starved."""

import pytest

from serve.core.commands import KillLane, LookAtLane, PrepareTask
from serve.core.events import LaneSeen, LimitsChanged, TaskFailed
from serve.core.types import FailReason, LaneId, LaneLook, LaneState, Nanos, TaskId
from tests.builders import MS, US, params, task, unions_saving
from tests.core.world import World, ready

L0, L1 = LaneId(0), LaneId(1)
T0 = TaskId(0)
SECOND = 1000 * MS
#: Within so much a lane that stands still is noticed, for runs of this estimate.
PATIENCE = {1 * MS: SECOND, 100 * MS: 5 * SECOND}


class Watched(World):
    """Looks at lanes whenever it is asked to: `look` says what is seen of each."""

    def __init__(self, *, up=True, **options):
        super().__init__(params(**({"policy": "fifo", "watched": True} | options)))
        self.look = {}
        self.killed = []
        if up:
            for lane_id in self.device_of:
                self.lane_ready(lane_id)

    def tell(self, event):
        commands = super().tell(event)
        for command in commands:
            if isinstance(command, LookAtLane) and command.lane_id in self.look:
                look = self.look[command.lane_id](self.now)
                self.tell(LaneSeen(command.task_id, command.lane_id, look))
        self.killed += [c.lane_id for c in commands if isinstance(c, KillLane)]
        return commands

    def start(self, **options):
        self.arrive(task(0, **options))
        self.prepare(0)
        assert self.on_lane == {L0: 0}


def stopped(now_ns):
    return LaneLook(LaneState.STOPPED, Nanos(0), 3)


def asleep(now_ns):
    return LaneLook(LaneState.ASLEEP, Nanos(5), 3)


def idle(now_ns):
    return LaneLook(LaneState.IDLE, Nanos(5), 3)


def starved(now_ns):
    """Would compute, and never gets a core."""
    return LaneLook(LaneState.BUSY, Nanos(5), 3)


def napping(now_ns):
    return LaneLook(LaneState.ASLEEP, Nanos(5), now_ns)


def computing(now_ns):
    return LaneLook(LaneState.BUSY, now_ns, 3)


@pytest.mark.parametrize("look", [stopped, asleep])
@pytest.mark.parametrize("run_ns", PATIENCE)
def test_a_lane_that_stands_still_is_ended_and_its_task_handed_over_once(look, run_ns):
    world = Watched()
    world.start(run_ns=run_ns)
    world.look = {L0: look, L1: look}
    world.advance(PATIENCE[run_ns] - 1)
    assert not world.killed
    world.advance(1)
    assert world.killed == [L0]
    assert world.scheduler.overdue_count == 1
    assert world.lane_lost(L0)[-1:] == [PrepareTask(T0)]
    world.prepare(0)
    assert world.on_lane == {L1: 0}
    assert world.scheduler.overdue_count == 0
    world.advance(PATIENCE[run_ns])
    assert world.killed == [L0, L1]
    world.lane_lost(L1)
    assert world.answers[0].reason is FailReason.LANE_LOST
    world.finish_everything()


def test_one_that_stops_later_is_noticed_as_soon():
    world = Watched()
    world.start(run_ns=MS)
    world.look[L0] = computing
    world.advance(7 * SECOND + 1)
    world.look[L0] = stopped
    world.advance(SECOND)
    assert world.killed == [L0]
    world.lane_lost(L0)
    world.finish_everything()


@pytest.mark.parametrize("look", [starved, napping, idle])
def test_a_lane_that_gets_no_core_or_wakes_now_and_then_does_not_stand_still(look):
    world = Watched()
    world.start(run_ns=MS)
    world.look[L0] = look
    world.advance(59 * SECOND)
    assert not world.killed
    assert world.on_lane == {L0: 0}
    world.finish_everything()


def test_a_starved_one_is_never_given_up():
    world = Watched(run_limit_ns=SECOND)
    world.start(run_ns=MS)
    world.look[L0] = starved
    world.advance(600 * SECOND)
    assert (world.killed, world.stopping, world.scheduler.overdue_count) == ([], set(), 0)
    world.finish_everything()


@pytest.mark.parametrize("look", [computing, napping, idle])
@pytest.mark.parametrize("limit_s", [None, 8])
def test_one_that_takes_longer_than_it_may_is_stopped_and_not_run_again(look, limit_s):
    world = Watched(run_limit_ns=limit_s and Nanos(limit_s * SECOND))
    world.start(run_ns=MS)
    world.look[L0] = look
    limit_s = limit_s or 60
    world.advance(limit_s * SECOND - 1)
    assert not world.stopping
    assert world.scheduler.overdue_count == 1
    # What it did until it was first looked at is not known.
    world.advance(limit_s * SECOND // 8 + 2)
    assert world.stopping == {0}
    world.end(L0, TaskFailed(T0, L0, FailReason.STOPPED, "stopped"))
    outcome = world.answers[0]
    assert outcome.reason is FailReason.TIME_LIMIT
    assert f"a run of it may take {limit_s} s" in outcome.message
    assert world.launches[0] == 1


def test_however_short_the_limit_a_lane_is_not_looked_at_all_the_time():
    world = Watched(run_limit_ns=Nanos(8 * US))
    world.start(run_ns=100 * MS)
    looks = []
    world.look[L0] = lambda now_ns: looks.append(now_ns) or starved(now_ns)
    world.advance(10 * MS)
    assert len(looks) == 10
    world.look[L0] = computing
    world.advance(2 * MS)
    assert world.stopping == {0}


def test_a_run_is_held_to_a_limit_that_is_lowered_meanwhile():
    world = Watched(run_limit_ns=Nanos(600 * SECOND))
    world.start(run_ns=MS)
    world.look[L0] = computing
    world.advance(20 * SECOND)
    assert not world.stopping
    world.tell(LimitsChanged(max_queue=8, shed_late=False, run_limit_ns=Nanos(30 * SECOND)))
    world.advance(5 * SECOND)
    assert not world.stopping
    world.advance(80 * SECOND)
    assert world.stopping == {0}


def test_the_limit_follows_the_estimate_where_none_is_set():
    world = Watched()
    world.start(run_ns=SECOND)
    world.look[L0] = computing
    world.advance(199 * SECOND)
    assert not world.stopping
    world.advance(51 * SECOND)
    assert world.stopping == {0}
    world.end(L0)
    assert world.answers[0].placement.attempt == 1, "it ended all the same"


def test_one_over_its_limit_that_takes_its_lane_with_it_is_answered_so():
    world = Watched(run_limit_ns=SECOND)
    world.start(run_ns=MS)
    world.look[L0] = computing
    world.advance(2 * SECOND)
    world.lane_lost(L0)
    assert world.answers[0].reason is FailReason.TIME_LIMIT
    world.finish_everything()


def test_of_a_union_over_its_limit_each_member_runs_by_itself():
    unions = unions_saving(400 * US)
    world = Watched(up=False, lanes=1, run_limit_ns=SECOND, unions=unions, prepare_ahead=9)
    ready(world, *(task(number, target_ns=100 * MS) for number in range(3)))
    world.look[L0] = computing
    world.lane_ready(L0)
    assert world.members == {0: (0, 1, 2)}
    world.advance(2 * SECOND)
    assert world.stopping == {0}
    world.end(L0, TaskFailed(T0, L0, FailReason.STOPPED, "stopped"))
    world.look.clear()
    world.finish_everything()
    assert {world.answers[number].placement.merged for number in range(3)} == {1}


def test_time_while_suspended_does_not_count():
    world = Watched(
        policy="slack", discipline="preemptive", lanes=3, parallelism=1, can_suspend=True,
        run_limit_ns=SECOND,
    )  # fmt: skip
    world.look = {L0: computing, L1: starved}
    world.start(run_ns=50 * MS)
    world.arrive(task(1, run_ns=MS, priority=1))
    world.prepare(1)
    assert world.stopped == {L0}
    world.advance(100 * SECOND)
    assert not world.stopping
    world.end(L1)
    world.advance(SECOND - 1)
    assert not world.stopping
    world.advance(SECOND)
    assert world.stopping == {0}
    world.finish_everything()


def test_one_that_nobody_waits_for_is_not_looked_at():
    world = Watched()
    world.start(run_ns=MS, timeout_ns=100 * MS)
    world.look[L0] = computing
    world.advance(3600 * SECOND)
    assert world.stopping == {0}
    assert world.scheduler.next_wakeup() is None
    world.finish_everything()


def test_without_a_lane_to_look_at_nothing_is_awaited():
    world = Watched()
    world.start(run_ns=MS)
    world.end(L0)
    assert isinstance(world.scheduler.next_wakeup(), int | None)
    world.advance(10 * SECOND)
    assert world.scheduler.next_wakeup() is None


def test_a_look_that_comes_late_changes_nothing():
    world = Watched()
    world.start(run_ns=MS)
    world.end(L0)
    assert world.tell(LaneSeen(T0, L0, stopped(0))) == []
    world.arrive(task(1))
    world.prepare(1)
    assert world.tell(LaneSeen(T0, L0, stopped(0))) == []
    assert world.tell(LaneSeen(TaskId(1), L1, stopped(0))) == [], "on another lane"
    world.finish_everything()


@pytest.mark.parametrize("end", ["finish", "lane lost"])
def test_a_group_does_not_wait_for_a_run_that_never_ends(end):
    world = Watched(discipline="barrier", lanes=2, run_limit_ns=60 * SECOND)
    world.look = {L0: computing, L1: computing}
    for task_id in (0, 1):
        world.arrive(task(task_id, run_ns=MS))
    while world.preparing:
        world.prepare(min(world.preparing))
    world.end(next(lane for lane, one in world.on_lane.items() if one == 1))
    (endless,) = world.on_lane
    world.arrive(task(2, run_ns=MS))
    while world.preparing:
        world.prepare(min(world.preparing))
    assert 2 not in world.on_lane.values(), "the group is not over"
    until = world.now + 2 * SECOND
    while world.now < until and 2 not in world.on_lane.values():
        world.advance(100 * MS)
    assert 2 in world.on_lane.values()
    if end == "lane lost":
        world.lane_lost(endless)
        world.lane_ready(endless)
        while world.preparing:
            world.prepare(min(world.preparing))
    world.finish_everything()
