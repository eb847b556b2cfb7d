"""What a run of one model may take at most: its memory and its time, less than the device has."""

import pytest

from serve.core.commands import LookAtLane, PrepareTask, StopTask
from serve.core.events import LaneSeen, Tick
from serve.core.types import (
    Bytes,
    FailReason,
    LaneId,
    LaneLook,
    LaneState,
    Nanos,
    Rejected,
    RejectReason,
    RunLimits,
    TaskId,
)
from tests.builders import MS, US, params, sized, task, unions_saving
from tests.core.world import World, ready

L0, L1 = LaneId(0), LaneId(1)
SECOND = 1000 * MS
BUDGET, MOST = 100, 40
NARROW = RunLimits(memory_bytes=Bytes(MOST))
MAY_TAKE = f"its model may take {MOST} (model.max_memory)"


def world(**options):
    made = World(params(**({"policy": "fifo", "budget": BUDGET} | options)))
    for lane_id in made.device_of:
        made.lane_ready(lane_id)
    return made


def test_a_task_that_needs_more_than_its_model_may_take_is_refused_with_both_numbers():
    made = world()
    made.arrive(task(0, reserve=MOST + 1, limits=NARROW))
    made.arrive(task(1, reserve=MOST + 1))
    assert made.answers == {
        0: Rejected(RejectReason.TOO_BIG, f"needs {MOST + 1} bytes, {MAY_TAKE}")
    }
    made.finish_everything()


def test_a_run_that_overran_gets_what_its_model_may_take_and_leaves_the_rest_to_others():
    made = world()
    ready(made, task(0, reserve=10, limits=NARROW), task(1, reserve=50, run_ns=9 * MS))
    assert made.overrun(L0) == [PrepareTask(TaskId(0))]
    made.prepare(0)
    assert made.on_lane == {L0: 0, L1: 1}, "beside another"
    assert made.held[0] == MOST
    made.overrun(L0)
    outcome = made.answers[0]
    assert outcome.reason is FailReason.OUT_OF_MEMORY
    assert outcome.message == f"asked for more; {MAY_TAKE}"
    made.finish_everything()


def test_a_limit_above_the_budget_gives_no_more_than_the_budget():
    made = world()
    ready(made, task(0, reserve=10, limits=RunLimits(Bytes(2 * BUDGET))))
    made.overrun(L0)
    made.prepare(0)
    assert made.held[0] == BUDGET
    (lane,) = made.on_lane
    made.overrun(lane)
    assert made.answers[0].message.endswith(f"the device has {BUDGET} bytes for tasks")


def test_a_task_that_turns_out_to_need_more_fails():
    made = world()
    made.arrive(task(0, reserve=10, limits=NARROW))
    made.prepare(0, sized(reserve=MOST + 1))
    assert made.answers[0].reason is FailReason.OUT_OF_MEMORY
    assert made.answers[0].message == f"needs {MOST + 1} bytes, {MAY_TAKE}"


def test_no_more_are_merged_than_the_model_may_take():
    made = World(params(lanes=1, budget=BUDGET, policy="fifo", prepare_ahead=9,
                        unions=unions_saving(400 * US)))  # fmt: skip
    ready(made, *(task(i, reserve=15, target_ns=SECOND, limits=NARROW) for i in range(4)))
    made.lane_ready(L0)
    assert list(made.members.values()) == [(0, 1)]
    made.finish_everything()


@pytest.mark.parametrize(
    ("of_any", "of_model", "most"),
    [(None, 2, 2), (None, 90, 90), (5, 2, 2), (2, 5, 2), (3, None, 3), (None, None, 60)],
)
def test_a_run_is_stopped_after_what_its_model_or_any_may_take(of_any, of_model, most):
    limit_ns = None if of_any is None else Nanos(of_any * SECOND)
    own = RunLimits(run_ns=None if of_model is None else Nanos(of_model * SECOND))
    made = world(watched=True, run_limit_ns=limit_ns)
    stops = []

    def look(commands):
        stops.extend(made.now for command in commands if isinstance(command, StopTask))
        return commands

    ready(made, task(0, reserve=10, limits=own))
    while not stops and made.now < 100 * SECOND:
        made.now = made.scheduler.next_wakeup()
        for command in look(made.tell(Tick())):
            if isinstance(command, LookAtLane):
                seen = LaneLook(LaneState.BUSY, Nanos(made.now), 3)
                look(made.tell(LaneSeen(command.task_id, command.lane_id, seen)))
    (stopped_ns,) = stops
    # The first look begins the count.
    assert most * SECOND <= stopped_ns <= 1.3 * most * SECOND
    made.finish_everything()
