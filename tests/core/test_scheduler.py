"""The scheduler by example: what it commands, event by event."""

import pytest

from serve.core.commands import (
    AnswerTask,
    LaunchTask,
    PrepareTask,
    ReleaseTask,
    ResumeTask,
    SuspendTask,
)
from serve.core.events import (
    BudgetChanged,
    DrainStarted,
    LaneLost,
    LaneReady,
    PrepareFailed,
    TaskArrived,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskPrepared,
)
from serve.core.invariants import check_invariants
from serve.core.scheduler import Scheduler
from serve.core.types import (
    Bytes,
    Completed,
    Expired,
    Failed,
    FailReason,
    GroupId,
    LaneId,
    Nanos,
    Rejected,
    RejectReason,
    TaskId,
    Withdrawn,
)
from serve.errors import InvariantViolation
from tests.builders import MS, US, params, task, usage
from tests.core.world import World

L0, L1, L2, L3 = (LaneId(lane) for lane in range(4))


@pytest.fixture
def start():
    """Make a world with its lanes up; everything is finished and checked at the end."""
    worlds = []

    def make(lanes_ready=True, **choices):
        world = World(params(**choices))
        worlds.append(world)
        for lane_id in world.params.device.lane_ids if lanes_ready else ():
            world.lane_ready(lane_id)
        return world

    yield make
    for world in worlds:
        world.finish_everything()


def launches(commands):
    return [c.task_id for c in commands if isinstance(c, LaunchTask)]


def prepares(commands):
    return [c.task_id for c in commands if isinstance(c, PrepareTask)]


def test_an_idle_device_prepares_and_launches_in_the_same_call(start):
    world = start()
    assert world.arrive(task(0)) == [PrepareTask(TaskId(0))]
    world.advance(40 * US)
    assert world.prepare(0) == [LaunchTask(TaskId(0), L0, GroupId(0), 1, Bytes(1024))]
    world.advance(MS)
    answer, release = world.end(L0)
    assert release == ReleaseTask(TaskId(0))
    assert isinstance(answer.outcome, Completed)
    timeline, placement = answer.outcome.timeline, answer.outcome.placement
    assert timeline.prepared_ns == timeline.launched_ns == 40 * US
    assert timeline.finished_ns == 40 * US + MS
    assert timeline.prepare_exposed_ns == 40 * US, "an idle lane waited for all of it"
    assert timeline.backlog_ns == timeline.suspended_ns == 0
    assert (placement.lane_id, placement.co_runners, placement.attempt) == (L0, 0, 1)


def test_the_next_tasks_are_prepared_while_the_device_is_busy(start):
    world = start(lanes=1, policy="fifo", prepare_ahead=2)
    world.arrive(task(0))
    world.prepare(0)
    assert prepares(world.arrive(task(1))) == [1]
    assert prepares(world.arrive(task(2))) == [2]
    assert world.arrive(task(3)) == [], "two are prepared ahead"
    world.advance(200 * US)
    assert world.prepare(1) == []
    world.advance(200 * US)
    commands = world.end(L0)
    assert launches(commands) == [1]
    assert prepares(commands) == [3]
    world.advance(MS)
    (answer, *_) = world.end(L0)
    assert answer.outcome.timeline.prepare_exposed_ns == 0, "hidden behind task 0"


def test_exposed_is_only_the_part_a_free_lane_waited_for(start):
    world = start(lanes=1, policy="fifo")
    world.arrive(task(0))
    world.prepare(0)
    world.advance(100 * US)
    world.arrive(task(1))
    world.advance(100 * US)
    world.end(L0)
    world.advance(30 * US)
    world.prepare(1)
    world.advance(MS)
    (answer, *_) = world.end(L0)
    assert answer.outcome.timeline.prepare_exposed_ns == 30 * US


def test_under_a_barrier_a_prepare_is_not_exposed_while_the_group_before_runs(start):
    world = start(lanes=2, discipline="barrier", policy="fifo")
    world.arrive(task(0))
    world.prepare(0)
    world.arrive(task(1))  # lane 1 is idle all the time, and may not be used
    world.advance(500 * US)
    world.end(L0)
    world.advance(20 * US)
    world.prepare(1)
    world.advance(MS)
    (answer, *_) = world.end(L0)
    assert answer.outcome.timeline.prepare_exposed_ns == 20 * US


def test_waiting_for_memory_is_not_waiting_for_the_prepare(start):
    world = start(lanes=2, budget=10, policy="fifo")
    world.arrive(task(0, reserve=6))
    world.prepare(0)
    world.arrive(task(1, reserve=6))
    world.advance(300 * US)
    world.end(L0)
    world.advance(50 * US)
    world.prepare(1)
    (answer, *_) = world.end(L0)
    assert answer.outcome.timeline.prepare_exposed_ns == 50 * US


def test_co_runners_is_the_most_at_any_time(start):
    world = start(lanes=3)
    for task_id in range(3):
        world.arrive(task(task_id))
        world.prepare(task_id)
    first, *_ = world.end(L0)
    assert first.outcome.placement.co_runners == 2
    world.arrive(task(3))
    world.prepare(3)
    world.end(L1)
    world.end(L2)
    last, *_ = world.end(L0)
    assert last.outcome.placement.co_runners == 2


def test_backlog_is_the_work_ahead_per_slot(start):
    world = start(lanes=4, parallelism=2)
    for task_id in range(3):
        world.arrive(task(task_id, run_ns=MS, prepare_ns=100 * US))
    world.prepare(0)
    world.end(L0)
    world.arrive(task(3))
    world.finish_everything()
    assert world.answers[2].timeline.backlog_ns == 1100 * US
    assert world.answers[3].timeline.backlog_ns == 1100 * US, "task 0 is done"


# Refusals.


def test_too_big_names_both_numbers(start):
    world = start(budget=4096)
    answer, release = world.arrive(task(0, reserve=4608))
    assert answer.outcome == Rejected(
        RejectReason.TOO_BIG, "needs 4608 bytes, the device has 4096 for tasks"
    )
    assert release == ReleaseTask(TaskId(0))


def test_queue_full_hints_when_to_come_back(start):
    world = start(lanes=2, max_queue=2)
    world.arrive(task(0, run_ns=30 * MS, prepare_ns=0))
    world.arrive(task(1, run_ns=10 * MS, prepare_ns=0))
    answer, _ = world.arrive(task(2))
    assert answer.outcome.reason is RejectReason.QUEUE_FULL
    assert answer.outcome.retry_after_ns == 20 * MS
    assert "at most 2" in answer.outcome.message
    world.tell(TaskCancelled(TaskId(0)))
    assert prepares(world.arrive(task(3))) == [3], "an answered task does not count"


def test_draining_refuses_new_ones_and_finishes_the_accepted(start):
    world = start()
    world.arrive(task(0))
    world.tell(DrainStarted())
    assert not world.scheduler.drained
    answer, _ = world.arrive(task(1))
    assert answer.outcome.reason is RejectReason.DRAINING
    world.prepare(0)
    answer, _ = world.end(L0)
    assert isinstance(answer.outcome, Completed)
    assert world.scheduler.drained


# Disciplines.


def prepared_tasks(world, *tasks):
    """All of `tasks` arrived and READY, none launched: the lanes come up last."""
    for given in tasks:
        world.arrive(given)
    while world.preparing:
        world.prepare(min(world.preparing))


def test_barrier_starts_the_next_group_when_all_of_one_has_ended(start):
    world = start(lanes_ready=False, discipline="barrier", policy="fifo", prepare_ahead=4)
    prepared_tasks(world, *(task(i) for i in range(4)))
    world.lane_ready(L0)
    assert launches(world.lane_ready(L1)) == [], "a group of one is under way"
    assert launches(world.end(L0)) == [1, 2]
    assert launches(world.end(L1)) == []
    assert launches(world.end(L0)) == [3]


def test_rolling_fills_a_lane_at_once(start):
    world = start(lanes_ready=False, discipline="rolling", policy="fifo", prepare_ahead=4)
    prepared_tasks(world, *(task(i) for i in range(4)))
    assert launches(world.lane_ready(L0)) == [0]
    assert launches(world.lane_ready(L1)) == [1]
    assert launches(world.end(L0)) == [2]
    assert launches(world.end(L0)) == [3]


def test_a_task_that_does_not_fit_is_bypassed_a_bounded_number_of_times(start):
    world = start(lanes_ready=False, policy="fifo", budget=10, prepare_ahead=9, bypass_limit=2)
    small = [task(i, reserve=3) for i in range(2, 8)]
    prepared_tasks(world, task(0, reserve=6), task(1, reserve=9), *small)
    assert launches(world.lane_ready(L0)) == [0]
    assert launches(world.lane_ready(L1)) == [2], "task 1 does not fit beside task 0"
    assert launches(world.end(L1)) == [3]
    assert launches(world.end(L1)) == [], "the memory drains for task 1"
    assert launches(world.end(L0)) == [1]


def test_a_lane_is_held_for_a_task_that_will_be_prepared_soon(start):
    world = start(lanes_ready=False, policy="sqtf", lanes=1, prepare_ahead=2)
    prepared_tasks(world, task(0, run_ns=50 * MS))
    world.arrive(task(1, run_ns=MS, prepare_ns=200 * US))
    assert launches(world.lane_ready(L0)) == [], "200 µs are nothing beside 50 ms"
    assert world.scheduler.next_wakeup() == 200 * US
    world.advance(199 * US)
    assert not world.on_lane
    assert launches(world.prepare(1)) == [1]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_lane_held_with_nobody_behind_needs_no_timer(start, lanes):
    world = start(policy="sqtf", lanes=lanes)
    world.arrive(task(0, run_ns=MS, prepare_ns=200 * US))
    assert world.scheduler.next_wakeup() is None
    assert launches(world.prepare(0)) == [0]


def test_a_held_lane_is_given_up_when_the_prepare_takes_too_long(start):
    world = start(lanes_ready=False, policy="sqtf", lanes=1, prepare_ahead=2)
    prepared_tasks(world, task(0, run_ns=50 * MS))
    world.arrive(task(1, run_ns=MS, prepare_ns=200 * US))
    world.lane_ready(L0)
    world.advance(200 * US)
    assert world.on_lane == {L0: 0}


def test_parallelism_bounds_what_executes_not_the_lanes(start):
    world = start(lanes=4, parallelism=2, discipline="rolling")
    for task_id in range(3):
        world.arrive(task(task_id))
        world.prepare(task_id)
    assert len(world.on_lane) == 2


def preemptive(start, **choices):
    defaults = {"policy": "slack", "discipline": "preemptive", "can_suspend": True}
    return start(**(defaults | {"lanes": 3, "parallelism": 1} | choices))


def test_a_running_task_is_suspended_for_a_more_urgent_one_and_resumed(start):
    world = preemptive(start)
    world.arrive(task(0, run_ns=50 * MS))
    world.prepare(0)
    world.advance(10 * MS)
    world.arrive(task(1, run_ns=2 * MS, arrived_ns=10 * MS))
    assert world.prepare(1) == [
        SuspendTask(TaskId(0), L0),
        LaunchTask(TaskId(1), L1, GroupId(1), 1, Bytes(1024)),
    ]
    assert world.scheduler.reserved_bytes == 2048, "suspended memory stays reserved"
    world.advance(2 * MS)
    assert world.end(L1)[2:] == [ResumeTask(TaskId(0), L0)]
    world.advance(40 * MS)
    answer, _ = world.end(L0)
    assert answer.outcome.timeline.suspended_ns == 2 * MS


def test_a_less_urgent_task_waits(start):
    world = preemptive(start)
    world.arrive(task(0, run_ns=2 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=50 * MS))
    assert world.prepare(1) == []


def test_a_late_task_never_pushes_out_one_that_can_make_it(start):
    world = preemptive(start)
    world.arrive(task(0, run_ns=50 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=2 * MS, target_ns=MS))  # late whatever happens
    assert world.prepare(1) == []
    assert world.end(L0)[2:] == [LaunchTask(TaskId(1), L0, GroupId(1), 1, Bytes(1024))]


def test_a_late_task_takes_no_lane_while_another_stands_suspended(start):
    world = preemptive(start)
    world.arrive(task(0, run_ns=50 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=2 * MS))
    world.prepare(1)
    world.arrive(task(2, run_ns=MS, target_ns=MS // 2))  # late whatever happens
    world.prepare(2)
    assert world.end(L1)[2:] == [ResumeTask(TaskId(0), L0)], "a lane is idle all the same"
    assert world.end(L0)[2:] == [LaunchTask(TaskId(2), L0, GroupId(2), 1, Bytes(1024))]


def test_the_last_lane_is_for_a_task_that_cannot_wait(start):
    world = preemptive(start, lanes=2)
    world.arrive(task(0, run_ns=10 * MS, target_ns=90 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=10 * MS, target_ns=50 * MS))
    assert world.prepare(1) == [], "due first, and 10 + 10 ms are in time"
    world.advance(MS)
    world.arrive(task(2, run_ns=10 * MS, target_ns=15 * MS))
    world.advance(MS)
    assert world.prepare(2)[0] == SuspendTask(TaskId(0), L0)


def test_without_suspension_preemptive_is_rolling(start):
    world = preemptive(start, can_suspend=False)
    world.arrive(task(0, run_ns=50 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=2 * MS))
    assert world.prepare(1) == []


def test_a_task_that_finished_before_its_suspension_landed(start):
    world = preemptive(start)
    world.arrive(task(0, run_ns=50 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=2 * MS))
    world.prepare(1)
    answer, release = world.end(L0)
    assert isinstance(answer.outcome, Completed)
    assert release == ReleaseTask(TaskId(0))
    assert world.on_lane == {L1: 1}


def test_an_answered_task_is_stopped_not_suspended(start):
    world = preemptive(start)
    world.arrive(task(0, run_ns=2 * MS))
    world.prepare(0)
    world.tell(TaskCancelled(TaskId(0)))
    world.arrive(task(1, run_ns=50 * MS))
    assert world.prepare(1) == [], "its slot will be free in a moment"
    (_, launch) = world.end(L0, TaskFailed(TaskId(0), L0, FailReason.STOPPED, "stopped"))
    assert launch == LaunchTask(TaskId(1), L0, GroupId(1), 1, Bytes(1024))


# Things that go wrong.


def test_a_lost_lane_hands_its_task_over_once(start):
    world = start(lanes=2)
    world.arrive(task(0))
    world.prepare(0)
    assert world.lane_lost(L0) == [PrepareTask(TaskId(0))]
    assert launches(world.prepare(0)) == [0]
    assert world.on_lane == {L1: 0}
    answer, release = world.lane_lost(L1)
    assert answer.outcome.reason is FailReason.LANE_LOST
    assert "lane 1 died" in answer.outcome.message
    assert release == ReleaseTask(TaskId(0))


def test_a_handed_over_task_that_no_longer_fits_the_device_fails(start):
    world = start(lanes=1, discipline="barrier", budget=10)
    world.arrive(task(0, reserve=9))
    world.prepare(0)
    world.change_budget(5)
    answer, release = world.lane_lost(L0)
    assert answer.outcome.reason is FailReason.OUT_OF_MEMORY
    assert release == ReleaseTask(TaskId(0))


def test_a_handed_over_task_says_so(start):
    world = start(lanes=2)
    world.arrive(task(0))
    world.prepare(0)
    world.lane_lost(L0)
    world.prepare(0)
    answer, _ = world.end(L1)
    assert answer.outcome.placement.attempt == 2


def test_a_handed_over_task_goes_first(start):
    world = start(lanes=1, policy="fifo")
    for task_id in range(3):
        world.arrive(task(task_id))
    world.prepare(0)
    world.prepare(1)
    assert world.lane_lost(L0) == [PrepareTask(TaskId(0))]
    world.prepare(0)
    assert launches(world.lane_ready(L0)) == [0]


def test_without_lanes_tasks_wait_and_still_expire(start):
    world = start(lanes=1, prepare_ahead=0)
    world.lane_lost(L0)
    assert world.arrive(task(0, timeout_ns=5 * MS)) == []
    assert world.scheduler.next_wakeup() <= 5 * MS
    world.advance(5 * MS)
    assert world.answers[0] == Expired("queued")
    assert 0 in world.released


def test_expired_while_running_is_answered_at_once_and_released_later(start):
    world = start()
    world.arrive(task(0, timeout_ns=5 * MS))
    world.prepare(0)
    world.advance(6 * MS)
    assert world.answers == {0: Expired("running")}
    assert not world.released
    assert world.scheduler.reserved_bytes == 1024
    assert world.end(L0) == [ReleaseTask(TaskId(0))]


def test_expired_on_arrival_is_never_prepared(start):
    world = start()
    world.advance(10 * MS)
    assert world.arrive(task(0, arrived_ns=0, timeout_ns=MS)) == [
        AnswerTask(TaskId(0), Expired("queued")),
        ReleaseTask(TaskId(0)),
    ]


def test_cancelled_while_prepared_keeps_the_buffers_until_the_host_is_done(start):
    world = start()
    world.arrive(task(0))
    assert world.tell(TaskCancelled(TaskId(0))) == [AnswerTask(TaskId(0), Withdrawn("preparing"))]
    assert world.prepare(0) == [ReleaseTask(TaskId(0))]


def test_failures_are_answered_with_their_reason(start):
    world = start()
    world.arrive(task(0))
    world.preparing.remove(0)
    answer, _ = world.tell(PrepareFailed(TaskId(0), FailReason.INVALID_INPUT, "x: NaN"))
    assert answer.outcome == Failed(FailReason.INVALID_INPUT, "x: NaN")
    world.arrive(task(1))
    world.prepare(1)
    answer, _ = world.end(L0, TaskFailed(TaskId(1), L0, FailReason.MODEL_ERROR, "boom"))
    assert answer.outcome == Failed(FailReason.MODEL_ERROR, "boom")


def test_a_lowered_budget_fails_what_it_can_never_hold(start):
    world = start(lanes_ready=False, budget=10, policy="fifo")
    prepared_tasks(world, task(0, reserve=4), task(1, reserve=9))
    commands = world.change_budget(5)
    assert isinstance(world.answers[1], Failed)
    assert world.answers[1].reason is FailReason.OUT_OF_MEMORY
    assert "needs 9 bytes, the device has 5" in world.answers[1].message
    assert 0 not in world.answers
    assert AnswerTask(TaskId(1), world.answers[1]) in commands


def test_a_budget_below_what_is_in_use_takes_effect_as_tasks_end(start):
    world = start(budget=10)
    world.arrive(task(0, reserve=8))
    world.prepare(0)
    world.change_budget(6)
    assert world.scheduler.reserved_bytes == 8
    world.arrive(task(1, reserve=5))
    assert world.prepare(1) == []
    assert launches(world.end(L0)) == [1]


def test_impossible_events_name_what_is_wrong():
    scheduler = Scheduler(params(lanes=1))
    scheduler.handle(LaneReady(L0), Nanos(0))
    with pytest.raises(InvariantViolation, match="lane 0 is ready and was up already"):
        scheduler.handle(LaneReady(L0), Nanos(0))
    with pytest.raises(InvariantViolation, match="lane 7 is not one of"):
        scheduler.handle(LaneLost(L0, (LaneId(7),)), Nanos(0))
    assert scheduler.lanes_up == 1, "nothing has changed"
    scheduler.handle(TaskArrived(task(0)), Nanos(0))
    with pytest.raises(InvariantViolation, match="task 0: arrived twice"):
        scheduler.handle(TaskArrived(task(0)), Nanos(0))
    scheduler.handle(TaskPrepared(TaskId(0)), Nanos(0))
    with pytest.raises(InvariantViolation, match="from lane 3 while on lane 0"):
        scheduler.handle(TaskFinished(TaskId(0), L3, usage()), Nanos(0))
    check_invariants(scheduler)
    assert scheduler.running_count == 1


def test_time_never_runs_backwards(start):
    world = start()
    world.advance(5 * MS)
    world.arrive(task(0))
    world.scheduler.handle(BudgetChanged(Bytes(1 << 20)), Nanos(MS))
    world.prepare(0)
    answer, _ = world.end(L0)
    assert answer.outcome.timeline.launched_ns == 5 * MS


# Windows.


def test_a_fixed_window_plans_a_slot_at_its_end(start):
    world = start(window="fixed", window_ns=10 * MS, policy="sqtf", lanes=1, prepare_ahead=3)
    world.advance(3 * MS)
    assert world.arrive(task(0, run_ns=9 * MS, arrived_ns=3 * MS)) == []
    assert world.arrive(task(1, run_ns=MS, arrived_ns=3 * MS)) == []
    assert world.scheduler.next_wakeup() == 10 * MS
    world.advance(7 * MS)
    assert world.preparing == {0, 1}
    assert launches(world.prepare(0)) == []
    assert launches(world.prepare(1)) == [1]


def test_slots_of_a_fixed_window_stay_in_order(start):
    world = start(window="fixed", window_ns=10 * MS, policy="sqtf", lanes=1, prepare_ahead=3)
    world.arrive(task(0, run_ns=90 * MS))
    world.advance(10 * MS)
    world.prepare(0)
    world.arrive(task(1, run_ns=80 * MS))
    world.advance(10 * MS)
    world.prepare(1)
    world.arrive(task(2, run_ns=MS))
    world.advance(10 * MS)
    world.prepare(2)
    assert launches(world.end(L0)) == [1], "shorter ones of later slots do not overtake"


def test_an_adaptive_window_plans_newcomers_together_with_what_waits(start):
    world = start(policy="sqtf", lanes=1, prepare_ahead=1)
    world.arrive(task(0, run_ns=20 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=20 * MS))
    world.prepare(1)
    assert world.arrive(task(2, run_ns=MS)) == [], "the window gathers"
    world.advance(10 * MS)
    assert world.preparing == {2}, "planned before the lane is free"
    world.prepare(2)
    assert launches(world.end(L0)) == [2]
