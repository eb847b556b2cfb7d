import pytest

from serve.core.rules.cause import CAUSES, violation_cause
from serve.core.types import Completed, GroupId, LaneId, Nanos, Placement, Timeline
from tests.builders import MS, US, task, usage

#: run 10 ms, prepare and answer 1 ms, target 22 ms.
TASK = task(0, run_ns=10 * MS, prepare_ns=MS, arrived_ns=5 * MS)


def ending(
    queue=0,
    exposed=0,
    run=10 * MS,
    handover=0,
    overloaded=False,
    co_runners=0,
    suspended=0,
    jobs=0,
    overran=False,
):
    launched = TASK.arrived_ns + queue + exposed
    timeline = Timeline(
        arrived_ns=TASK.arrived_ns,
        prepare_started_ns=Nanos(TASK.arrived_ns + queue),
        prepared_ns=Nanos(launched),
        launched_ns=Nanos(launched),
        finished_ns=Nanos(launched + run + handover),
        prepare_exposed_ns=Nanos(exposed),
        backlog_ns=Nanos(0),
        suspended_ns=Nanos(suspended),
        job_run_ns=Nanos(jobs),
        overloaded=overloaded,
    )
    placement = Placement(LaneId(0), GroupId(0), 1, co_runners, 1 + overran, overran=overran)
    return Completed(timeline, placement, usage(run))


@pytest.mark.parametrize(
    ("facts", "answer", "cause"),
    [
        ({}, 0, None),
        ({"queue": 12 * MS}, 0, None),  # to the nanosecond in time
        ({"queue": 13 * MS}, 0, "queue"),
        ({"queue": 13 * MS, "overloaded": True}, 0, "overload"),
        ({"overloaded": True}, 0, None),
        ({"queue": 13 * MS, "overran": True}, 0, "estimate"),
        ({"queue": 13 * MS, "overran": True, "overloaded": True}, 0, "overload"),
        ({"overran": True}, 0, None),
        ({"exposed": 13 * MS}, 0, "prepare"),
        ({}, 13 * MS, "prepare"),
        ({"run": 23 * MS}, 0, "estimate"),
        ({"run": 23 * MS, "jobs": MS}, 0, "interference"),
        ({"run": 23 * MS, "co_runners": 1}, 0, "interference"),
        ({"run": 23 * MS, "suspended": 9 * MS}, 0, "interference"),
        ({"handover": 13 * MS}, 0, "interference"),
        ({"run": 14 * MS, "handover": 9 * MS}, 0, "interference"),
        ({"run": 19 * MS, "handover": 4 * MS}, 0, "estimate"),
        ({"queue": 13 * MS, "handover": 4 * MS}, 0, "queue"),
        ({"queue": 7 * MS, "run": 16 * MS}, 0, "queue"),
        ({"queue": 6 * MS, "run": 17 * MS}, 0, "estimate"),
    ],
)
def test_the_largest_excess_is_blamed(facts, answer, cause):
    outcome = ending(**facts)
    assert violation_cause(TASK, outcome, outcome.timeline.finished_ns + answer) == cause
    assert cause is None or cause in CAUSES


def test_a_target_below_the_solo_time_is_the_estimates_doing():
    hurried = task(0, run_ns=10 * MS, prepare_ns=MS, arrived_ns=5 * MS, target_ns=3 * MS)
    outcome = ending(run=9 * MS)
    assert violation_cause(hurried, outcome, outcome.timeline.finished_ns + US) == "estimate"


@pytest.mark.parametrize("queue", [0, MS])
def test_an_answer_as_fast_as_alone_is_late_by_its_target_however_much_work_there_was(queue):
    hurried = task(0, run_ns=10 * MS, prepare_ns=MS, arrived_ns=5 * MS, target_ns=US)
    outcome = ending(run=MS, queue=queue, overloaded=True)
    answered_ns = outcome.timeline.finished_ns
    assert violation_cause(hurried, outcome, answered_ns) == "estimate"
    slow = ending(run=12 * MS, queue=queue, overloaded=True)
    assert violation_cause(hurried, slow, slow.timeline.finished_ns) == "overload"


def test_the_network_is_blamed_for_what_was_in_time_from_its_arrival_here_alone():
    outcome = ending(queue=6 * MS)
    answered_ns = TASK.arrived_ns + 17 * MS
    assert violation_cause(TASK, outcome, answered_ns, front_ns=5 * MS) is None
    assert violation_cause(TASK, outcome, answered_ns, front_ns=5 * MS + 1) == "network"
    late = ending(queue=13 * MS)
    assert violation_cause(TASK, late, late.timeline.finished_ns, front_ns=MS) == "queue"


@pytest.mark.parametrize(
    ("facts", "rows_ns", "cause"),
    [
        ({"exposed": 13 * MS}, 7 * MS, "network"),
        ({"exposed": 13 * MS}, 6 * MS, "prepare"),
        ({"queue": 13 * MS, "exposed": MS}, MS, "queue"),
        ({"exposed": MS}, MS, None),
    ],
)
def test_the_network_is_blamed_where_most_of_the_preparation_was_waiting_for_others(
    facts, rows_ns, cause
):
    late = ending(**facts)
    found = violation_cause(TASK, late, late.timeline.finished_ns, rows_ns=rows_ns)
    assert found == cause
