"""The simulator against hand-computed schedules and against queueing theory."""

import random

import pytest

from serve.core.invariants import check_invariants
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Nanos
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation, simulate
from tests.builders import MS, US, params, task, unions_saving

INSTANT = DeviceModel(switch_ns=Nanos(0))


def offered(task_id, run_ms, at_ms=0.0, **fields):
    """A request that takes just what is estimated, and no time to prepare."""
    run_ns = int(run_ms * MS)
    given = task(task_id, run_ns=run_ns, prepare_ns=0, arrived_ns=int(at_ms * MS), **fields)
    return Offered(given, Nanos(run_ns), Nanos(0))


def latencies_ms(requests, model=INSTANT, **choices):
    simulation = Simulation(Scheduler(params(**choices)), model)
    simulation.run(requests)
    check_invariants(simulation.scheduler)
    assert simulation.scheduler.reserved_bytes == 0
    rows = sorted(simulation.answered, key=lambda row: row.task.task_id)
    return [(row.answered_ns - row.task.arrived_ns) / MS for row in rows]


def test_one_lane_in_order():
    requests = [offered(0, 4), offered(1, 2, 1), offered(2, 1, 1.5)]
    assert latencies_ms(requests, policy="fifo", lanes=1) == [4, 5, 5.5]
    assert latencies_ms(requests, policy="sqtf", lanes=1) == [4, 6, 3.5]


def test_preemption_serves_the_short_one_at_once():
    requests = [offered(0, 10), offered(1, 2, 1)]
    choices = {"policy": "slack", "discipline": "preemptive", "lanes": 2, "parallelism": 1}
    assert latencies_ms(requests, can_suspend=True, **choices) == [12, 2]
    assert latencies_ms(requests, can_suspend=False, **choices) == [10, 11]


@pytest.mark.parametrize("suspended", [False, True])
def test_a_run_nobody_waits_for_is_stopped(suspended):
    model = DeviceModel(switch_ns=Nanos(0), stop_ns=Nanos(MS))
    first = offered(0, 100, timeout_ns=10 * MS)
    others = [offered(1, 20, 5)] if suspended else [offered(1, 1, 10.5)]
    choices = {"policy": "slack", "discipline": "preemptive", "parallelism": 1, "can_suspend": True}
    # The run ends 1 ms after the time limit, beside another if it was suspended.
    assert latencies_ms([first, *others], model, **choices) == [10, 20 if suspended else 1.5]


def test_a_union_takes_what_is_estimated_as_far_off_as_its_members_are():
    requests = [offered(0, 4, target_ns=MS), *(offered(i, 4, 1, target_ns=MS) for i in (1, 2))]
    requests = [Offered(o.task, Nanos(o.run_ns * 3 // 2), o.prepare_ns) for o in requests]
    choices = {"policy": "fifo", "lanes": 1, "unions": unions_saving(2 * MS), "prepare_ahead": 4}
    assert latencies_ms(requests, **choices) == [6, 6 + 9 - 1, 6 + 9 - 1]


def test_barrier_waits_for_the_whole_group():
    requests = [offered(i, run) for i, run in enumerate((1, 4, 9, 3))]
    # The first is alone in its group; then {4, 9} and {3}.
    choices = {"policy": "fifo", "lanes": 2, "window": "fixed", "window_ns": MS}
    assert latencies_ms(requests, discipline="barrier", **choices) == [2, 5, 14, 8]
    assert latencies_ms(requests, discipline="rolling", **choices) == [2, 5, 11, 8]


def test_interference_slows_runs_while_they_share_the_device():
    model = DeviceModel(slowdown=(1.0, 2.0), switch_ns=Nanos(0))
    requests = [offered(0, 4), offered(1, 4, 2)]
    # Alone for 2 ms, then both at half speed until the first ends at 6, the other alone to 8.
    assert latencies_ms(requests, model=model, lanes=2) == [6, 6]


def test_switching_costs_time():
    model = DeviceModel(switch_ns=Nanos(100 * US))
    assert latencies_ms([offered(0, 1)], model=model, lanes=1) == [1.1]


def test_usage_is_the_time_on_the_lane_and_suspension_is_told_apart():
    chosen = params(
        policy="slack", discipline="preemptive", lanes=2, parallelism=1, can_suspend=True
    )
    simulation = Simulation(Scheduler(chosen), INSTANT)
    simulation.run([offered(0, 10), offered(1, 2, 1)])
    outcome = next(r.outcome for r in simulation.answered if r.task.task_id == 0)
    assert isinstance(outcome, Completed)
    assert outcome.usage.run_ns == 12 * MS
    assert outcome.timeline.suspended_ns == 2 * MS


def test_mean_wait_agrees_with_queueing_theory():
    """M/D/1 at ρ = 0.5 waits ρ / (2 (1 − ρ)) = half a service time on average."""
    rng, now = random.Random(5), 0.0
    requests = []
    for task_id in range(20_000):
        now += rng.expovariate(0.5)
        requests.append(offered(task_id, 1, now))
    report = simulate(requests, params(policy="fifo", lanes=1, max_queue=10**6), INSTANT)
    assert report.completed == report.requests == 20_000
    assert report.quet_mean_ns / MS == pytest.approx(0.5, rel=0.05)


def mixed(rho, count, slots, seed):
    rng, now = random.Random(seed), 0.0
    requests = []
    for task_id in range(count):
        run_ms = rng.choice((1, 2, 5, 20))
        now += rng.expovariate(rho * slots / 7)
        requests.append(offered(task_id, run_ms, now, reserve=rng.choice((100, 300, 900))))
    return requests


@pytest.mark.parametrize("discipline", ["barrier", "rolling", "preemptive"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_answered_and_the_same_again(policy, discipline):
    requests = mixed(0.7, 300, 2, seed=3)
    chosen = params(
        policy=policy, discipline=discipline, lanes=4, parallelism=2, can_suspend=True, budget=1000
    )
    first = simulate(requests, chosen)
    assert first.completed == 300
    assert sum(first.by_cause.values()) == first.violations
    assert first == simulate(requests, chosen)


def test_preemption_keeps_more_targets_than_the_papers_way():
    requests = mixed(0.5, 2000, 2, seed=1)
    rates = {
        (policy, discipline): simulate(
            requests,
            params(
                policy=policy, discipline=discipline, lanes=6, parallelism=2, can_suspend=True,
                max_queue=10**6,
            ),
        ).violation_rate
        for policy, discipline in (("slack", "preemptive"), ("bqt", "barrier"))
    }  # fmt: skip
    assert rates["bqt", "barrier"] > 0.2
    assert rates["slack", "preemptive"] < 0.02


def test_refused_requests_are_counted_by_reason():
    requests = [offered(0, 5), offered(1, 5), offered(2, 1, reserve=1 << 30)]
    report = simulate(requests, params(lanes=1, max_queue=1))
    assert report.without_result == {"queue_full": 1, "too_big": 1}
    assert (report.requests, report.completed) == (3, 1)


def test_a_device_model_needs_positive_slowdowns():
    with pytest.raises(ValueError, match="positive"):
        DeviceModel(slowdown=(1.0, 0.0))
