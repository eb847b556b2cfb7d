"""Versions in the simulator: shares, a canary that is slow, and shadows that disturb nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from serve.core.commands import AnswerTask, StopTask
from serve.core.events import DrainStarted, LaneReady, TaskArrived
from serve.core.invariants import check_invariants
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Completed, Nanos, Rejected, RejectReason, RunLimits, Withdrawn
from serve.core.versions.router import VersionRouter
from serve.core.versions.rules import VersionRules
from serve.sim.device import DeviceModel, Offered
from serve.sim.versions import VersionedRequest, VersionedSimulation
from tests.builders import MS, US, params, task

INSTANT = DeviceModel(switch_ns=Nanos(0), stop_ns=Nanos(0))
CHOICES = {"policy": "slack", "discipline": "preemptive", "lanes": 8, "parallelism": 2,
           "can_suspend": True}  # fmt: skip


def request(number, at_ns, run_ns, true_ns=None, **fields):
    """A request whose versions take these true times."""
    by_version = {
        version: Offered(
            task(0, model=f"m:{version}", run_ns=run_ns, prepare_ns=0, arrived_ns=at_ns, **fields),
            Nanos(true or run_ns),
            Nanos(0),
        )
        for version, true in (true_ns or {1: 0, 2: 0, 3: 0}).items()
    }
    return VersionedRequest(f"r{number}", by_version)


def played(requests, rules, model=INSTANT, **choices):
    router = VersionRouter()
    router.set_rules("m", rules)
    simulation = VersionedSimulation(Scheduler(params(**CHOICES | choices)), model, router, "m")
    simulation.ask(requests)
    check_invariants(simulation.scheduler)
    assert simulation.scheduler.reserved_bytes == 0
    return simulation


def timeline(simulation):
    """What the clients see, in the order in which they see it: id, version, end and when."""
    return [
        (name, version, type(outcome), answered_ns)
        for name, (version, outcome, answered_ns) in simulation.ends.items()
    ]


@st.composite
def loads(draw):
    """Up to 40 requests with gaps, sizes, targets and memory of their own.

    No two arrive at one instant: the first would start and be suspended for the second where
    no shadow runs, and both would wait for the shadow's stop where one does.
    """
    found, at_ns = [], 0
    for number in range(draw(st.integers(1, 40))):
        at_ns += draw(st.sampled_from((1, 10 * US, MS, 3 * MS, 20 * MS)))
        run_ns = draw(st.integers(100 * US, 5 * MS))
        target_ns = run_ns * draw(st.integers(1, 4)) + MS
        reserve = draw(st.sampled_from((1, 1000, 60_000)))
        found.append(request(number, at_ns, run_ns, target_ns=target_ns, reserve=reserve))
    return found


@given(loads(), st.sampled_from(("slack", "sqtf", "fifo")), st.sampled_from((1, 2, 4)))
def test_with_stops_that_take_no_time_shadows_change_nothing(requests, policy, slots):
    """The same requests get the same answers at the same nanosecond, in the same order."""
    split = ((1, 60.0), (2, 40.0))
    choices = {"policy": policy, "parallelism": slots, "budget": 100_000}
    without = played(requests, VersionRules(split), **choices)
    with_shadows = played(requests, VersionRules(split, shadow=3), **choices)
    assert timeline(with_shadows) == timeline(without)
    # Each request was shadowed in the end, as sooner or later nothing else was there.
    done = [name for name, outcome in with_shadows.shadow_ends if isinstance(outcome, Completed)]
    assert sorted(done) == sorted(name for name, _, _, _ in timeline(without))


@given(loads())
def test_shadows_delay_an_answer_by_no_more_than_a_stop_a_busy_period(requests):
    """One slot, so every arrival meets the shadow's run; its stop takes 0.2 ms."""
    model = DeviceModel(switch_ns=Nanos(0), stop_ns=Nanos(200 * US))
    choices = {"policy": "fifo", "discipline": "rolling", "parallelism": 1}
    without = played(requests, VersionRules(((1, 100.0),)), model, **choices)
    beside = played(requests, VersionRules(((1, 100.0),), shadow=3), model, **choices)
    ends = {name: at for name, _, _, at in timeline(without)}
    for name, _, kind, at in timeline(beside):
        assert kind is Completed
        assert at <= ends[name] + 200 * US


def test_shares_and_answers_are_those_of_the_router():
    requests = [request(number, number * 10 * MS, MS) for number in range(400)]
    simulation = played(requests, VersionRules(((1, 75.0), (2, 25.0))))
    counts = [version for version, _, _ in simulation.ends.values()]
    assert 70 <= counts.count(2) <= 130


def test_a_canary_slower_than_its_estimate_takes_itself_back():
    requests = [
        request(number, number * 10 * MS, MS, {1: MS, 2: 8 * MS}, target_ns=3 * MS)
        for number in range(400)
    ]
    simulation = played(requests, VersionRules(((1, 70.0), (2, 30.0)), canary=2))
    (event,) = simulation.events
    assert event.version == 2
    assert "were late" in event.reason
    after = [version for version, _, _ in simulation.ends.values()][200:]
    assert set(after) == {1}


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_task_of_best_effort_is_refused_where_others_are(state):
    at_ns = 0 if state == "waiting" else MS
    simulation = played([], VersionRules(shadow=3))
    simulation._asked[0] = (busy := request(0, 0, 5 * MS)), 1
    simulation.offer(busy.by_version[1])
    simulation.now_ns = Nanos(at_ns)
    shadow = request(1, at_ns, MS).by_version[3]
    simulation._shadows.append(busy)
    simulation._shadow_id = 7
    given_task = replace(shadow.task, task_id=7, best_effort=True)
    simulation.offer(Offered(given_task, shadow.run_ns, shadow.prepare_ns))
    assert isinstance(simulation.shadow_ends[0][1], Rejected)


def test_a_run_of_best_effort_is_given_up_when_another_arrives():
    requests = [request(0, 0, MS), request(1, int(1.5 * MS), MS)]
    simulation = played(requests, VersionRules(((1, 100.0),), shadow=3))
    kinds = [(name, type(outcome)) for name, outcome in simulation.shadow_ends]
    assert kinds == [("r0", Withdrawn), ("r0", Completed), ("r1", Completed)]


def test_a_drain_gives_the_run_of_best_effort_up():
    scheduler = Scheduler(params(**CHOICES))
    for lane_id in scheduler.params.device.lane_ids:
        scheduler.handle(LaneReady(lane_id), Nanos(0))
    scheduler.handle(TaskArrived(replace(task(1), best_effort=True), Nanos(0)), Nanos(0))
    assert scheduler.running_count == 1
    ended = [type(command) for command in scheduler.handle(DrainStarted(), Nanos(1))]
    assert ended == [AnswerTask, StopTask]


def test_a_run_of_best_effort_takes_no_more_than_its_model_may():
    scheduler = Scheduler(params(**CHOICES))
    for lane_id in scheduler.params.device.lane_ids:
        scheduler.handle(LaneReady(lane_id), Nanos(0))
    wants = task(1, reserve=2048, limits=RunLimits(memory_bytes=Bytes(1024)))
    answer, _ = scheduler.handle(TaskArrived(replace(wants, best_effort=True), Nanos(0)), Nanos(0))
    assert answer.outcome.reason is RejectReason.TOO_BIG
    assert "its model may take 1024" in answer.outcome.message


def test_best_effort_does_not_count_as_load():
    scheduler = Scheduler(params(**CHOICES))
    for lane_id in scheduler.params.device.lane_ids:
        scheduler.handle(LaneReady(lane_id), Nanos(0))
    scheduler.handle(TaskArrived(replace(task(1), best_effort=True), Nanos(0)), Nanos(0))
    assert scheduler.parts.totals.demand.there_ns(500) == 0
    check_invariants(scheduler)
