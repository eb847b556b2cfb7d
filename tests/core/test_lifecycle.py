"""The table by itself, and the scheduler against the table for every state and event."""

import pytest

from serve.core import events
from serve.core.commands import AnswerTask, ReleaseTask
from serve.core.invariants import check_invariants
from serve.core.lifecycle import TRANSITIONS, State, mermaid
from serve.core.scheduler import Scheduler
from serve.core.types import Expired, FailReason, LaneId, Nanos, TaskId
from serve.errors import InvariantViolation
from tests.builders import MS, params, task, usage

T0, LANE = TaskId(0), LaneId(0)


def test_an_answer_is_final_and_done_is_the_end():
    for (state, _), target in TRANSITIONS.items():
        assert target.answered or not state.answered
        assert state is not State.DONE or target is State.DONE


def test_every_state_is_reached_and_leads_to_done():
    steps = {(state, target) for (state, _), target in TRANSITIONS.items()}
    reached = {State.QUEUED}
    for _ in State:
        reached |= {target for state, target in steps if state in reached}
    assert reached == set(State)
    ending = {State.DONE}
    for _ in State:
        ending |= {state for state, target in steps if target in ending}
    assert ending == set(State)


def test_flags_exclude_each_other():
    for state in State:
        assert not (state.pending and (state.on_lane or state.answered))


def test_diagram_shows_each_move_and_no_idle_one():
    text = mermaid()
    assert text.startswith("stateDiagram-v2\n")
    assert "    queued --> preparing: PrepareTask\n" in text
    assert "running --> queued: LaneLost" in text
    assert "done --> done" not in text


def scheduler_with_task_in(state):
    """Task 0 in `state`, on lane 0 where it is on one; its time limit is 100 ms."""
    stopped = state in (State.SUSPENDED, State.PARKED)
    scheduler = Scheduler(
        params(
            policy="slack",
            discipline="preemptive",
            lanes=2 if stopped else 1,
            parallelism=1,
            can_suspend=True,
            budget=4096,
            prepare_ahead=1 if stopped else 0,
        )
    )
    now = Nanos(0)

    def tell(*given):
        for event in given:
            scheduler.handle(event, now)

    arrived = events.TaskArrived(task(0, timeout_ns=100 * MS))
    prepared = events.TaskPrepared(T0)
    cancelled = events.TaskCancelled(T0)
    ready = events.LaneReady(LANE)
    if state is State.QUEUED:
        tell(arrived)  # no lane is up, and nothing is prepared ahead
    elif state is State.PREPARING:
        tell(ready, arrived, events.LaneLost(LANE))
    elif state is State.READY:
        tell(ready, arrived, events.LaneLost(LANE), prepared)
    elif state is State.RUNNING:
        tell(ready, arrived, prepared)
    elif state is State.WITHDRAWN:
        tell(ready, arrived, cancelled)
    elif state is State.ABANDONED:
        tell(ready, arrived, prepared, cancelled)
    elif stopped:
        tell(ready, events.LaneReady(LaneId(1)), arrived, prepared)
        tell(events.TaskArrived(task(1, run_ns=100_000)), events.TaskPrepared(TaskId(1)))
        if state is State.PARKED:
            tell(cancelled)
    elif state is State.DONE:
        tell(ready, arrived, prepared, events.TaskFinished(T0, LANE, usage()))
    assert scheduler.state(T0) is state
    return scheduler


EVENTS = {
    events.TaskPrepared: events.TaskPrepared(T0),
    events.PrepareFailed: events.PrepareFailed(T0, FailReason.INVALID_INPUT, "NaN in x"),
    events.TaskFinished: events.TaskFinished(T0, LANE, usage()),
    events.TaskFailed: events.TaskFailed(T0, LANE, FailReason.MODEL_ERROR, "raised"),
    events.TaskOverran: events.TaskOverran(T0, LANE, "asked for more"),
    events.TaskCancelled: events.TaskCancelled(T0),
    events.LaneLost: events.LaneLost(LANE),
    Expired: events.Tick(),
}


@pytest.mark.parametrize("cause", EVENTS)
@pytest.mark.parametrize("state", list(State))
def test_every_state_meets_every_event(state, cause):
    scheduler = scheduler_with_task_in(state)
    target = TRANSITIONS.get((state, cause))
    now = Nanos(100 * MS if cause is Expired else MS)
    touches_task = cause is not events.LaneLost or state.on_lane
    if target is None and touches_task and cause is not Expired:
        with pytest.raises(InvariantViolation, match="task 0"):
            scheduler.handle(EVENTS[cause], now)
        target, commands = state, []
    else:
        commands = scheduler.handle(EVENTS[cause], now)
        target = target or state
    answers = [c for c in commands if isinstance(c, AnswerTask)]
    releases = [c for c in commands if isinstance(c, ReleaseTask)]
    assert len(answers) == (target.answered and not state.answered)
    assert len(releases) == (target is State.DONE and state is not State.DONE)
    overran = cause is events.TaskOverran and state is State.RUNNING  # its lane is free again
    if target is State.QUEUED and (state is State.SUSPENDED or overran):
        target = State.PREPARING  # told to, in the same call
    assert scheduler.state(T0) is target
    check_invariants(scheduler)


def test_a_violation_tells_the_story():
    scheduler = scheduler_with_task_in(State.RUNNING)
    with pytest.raises(InvariantViolation) as caught:
        scheduler.handle(events.TaskPrepared(T0), Nanos(MS))
    assert "TaskPrepared while running" in str(caught.value)
    assert "new → queued (TaskArrived)" in str(caught.value)
    assert "ready → running (LaunchTask)" in str(caught.value)


@pytest.mark.parametrize("event", [events.TaskCancelled(TaskId(9)), events.TaskPrepared(TaskId(9))])
def test_events_for_a_task_that_never_arrived(event):
    with pytest.raises(InvariantViolation, match=r"task 9: .* before it arrived"):
        scheduler_with_task_in(State.DONE).handle(event, Nanos(0))
