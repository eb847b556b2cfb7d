"""Training jobs on the virtual clock: what requests notice of them, and what they get."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from serve.core.disciplines import DISCIPLINES
from serve.core.invariants import check_invariants
from serve.core.jobs.events import JobSlowdownChanged
from serve.core.jobs.types import Job, JobEnd, JobId, JobNeeds, JobRules
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Completed, Nanos
from serve.estimate.slowdown import Slowdowns
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation
from serve.sim.jobs import OfferedJob
from tests.builders import MS, US, params, task

AT_ONCE = DeviceModel(switch_ns=Nanos(0))
FREE = JobRules(workers=2, memory_bytes=Bytes(100), switch_ns=Nanos(0), slack="governed")


def request(task_id, run_ns, at_ns, prepare_ns=0, **fields):
    """A request that takes just what is estimated."""
    made = task(task_id, run_ns=run_ns, prepare_ns=prepare_ns, arrived_ns=at_ns, **fields)
    return Offered(made, Nanos(run_ns), Nanos(prepare_ns // 2))


def job(job_id, work_ns, *, reserve=40, at_ns=0):
    needs = JobNeeds(Bytes(0), Bytes(reserve), Nanos(MS))
    return OfferedJob(Job(JobId(job_id), "gcn", "community", work_ns // MS), needs, at_ns)


def play(requests, jobs, rules, model=AT_ONCE, *, checked=False, **choices):
    simulation = Simulation(Scheduler(params(jobs=rules, **choices)), model, tuple(jobs))
    for one in requests:
        simulation.advance(one.task.arrived_ns)
        simulation.offer(one)
        if checked:
            check_invariants(simulation.scheduler)
    while simulation.next_ns() is not None:
        simulation.step()
        if checked:
            check_invariants(simulation.scheduler)
    return simulation


def noticed(simulation):
    """What requests notice: their answers, with all times but those of jobs beside them."""
    rows = []
    for row in simulation.answered:
        outcome = row.outcome
        if isinstance(outcome, Completed):
            timeline = structs.replace(outcome.timeline, job_run_ns=Nanos(0))
            outcome = structs.replace(outcome, timeline=timeline)
        rows.append((row.task, outcome, row.answered_ns))
    return rows


requests_of_any_kind = st.lists(
    st.tuples(
        st.integers(0, 3 * MS),  # after the one before
        st.sampled_from([100 * US, MS, 5 * MS]),
        st.sampled_from([0, 200 * US]),
        st.integers(1, 30),
        st.sampled_from([0, 1, 3]),
        st.sampled_from([None, 4 * MS]),
    ),
    min_size=1,
    max_size=25,
)
jobs_of_any_kind = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 100), st.integers(0, 40 * MS)),
    min_size=1,
    max_size=5,
)


@given(
    rows=requests_of_any_kind,
    jobs=jobs_of_any_kind,
    policy=st.sampled_from(sorted(POLICIES)),
    discipline=st.sampled_from(sorted(DISCIPLINES)),
    window=st.sampled_from(["adaptive", "fixed"]),
    parallelism=st.integers(1, 3),
    can_suspend=st.booleans(),
    jobs_policy=st.sampled_from(["fifo", "lmcf", "bmc"]),
    jobs_discipline=st.sampled_from(["rolling", "barrier"]),
    slack=st.sampled_from(["governed", "strict"]),
    slowdown=st.sampled_from([(1.0,), (1.0, 1.3, 2.0)]),
)
def test_requests_notice_nothing_of_jobs_that_cost_nothing(
    rows, jobs, policy, discipline, window, parallelism, can_suspend, jobs_policy,
    jobs_discipline, slack, slowdown,
):  # fmt: skip
    """Whatever the scheduler expects of jobs; here they cost nothing."""
    requests, now = [], 0
    for number, (gap, run_ns, prepare_ns, reserve, priority, timeout_ns) in enumerate(rows):
        now += gap
        requests.append(
            request(
                number, run_ns, now, prepare_ns,
                reserve=reserve, priority=priority, timeout_ns=timeout_ns,
            )
        )  # fmt: skip
    choices = {
        "policy": policy, "discipline": discipline, "window": window, "window_ns": 2 * MS,
        "budget": 64, "lanes": 3, "parallelism": parallelism, "can_suspend": can_suspend,
    }  # fmt: skip
    rules = replace(
        FREE, policy=jobs_policy, discipline=jobs_discipline, slack=slack, slowdown=slowdown
    )
    by_time = enumerate(sorted(jobs, key=lambda row: row[2]))
    offered = [job(n, steps * MS, reserve=r, at_ns=at) for n, (steps, r, at) in by_time]
    without = play(requests, [], JobRules(), **choices)
    beside = play(requests, offered, rules, checked=True, **choices)
    assert noticed(beside) == noticed(without)
    ended = beside.jobs.ended
    assert {job_id for job_id, (_, how) in ended.items() if how.end is JobEnd.DONE} == {
        one.job.job_id for one in offered
    }
    assert beside.jobs.trained_ns == sum(steps * MS for steps, *_ in jobs)


@given(
    gaps=st.lists(st.integers(0, 4 * MS), min_size=1, max_size=30),
    pause_ns=st.sampled_from([30 * US, 500 * US]),
)
def test_on_one_slot_no_request_is_later_than_one_pause(gaps, pause_ns):
    """A job runs only while the slot is empty: it stops at most once in a busy period."""
    requests, now = [], 0
    for number, gap in enumerate(gaps):
        now += gap
        requests.append(request(number, MS, now))
    rules = replace(FREE, switch_ns=Nanos(pause_ns))
    model = DeviceModel(switch_ns=Nanos(0), pause_ns=Nanos(pause_ns))
    choices = {"policy": "fifo", "discipline": "rolling", "lanes": 1}
    without = play(requests, [], JobRules(), **choices)
    beside = play(requests, [job(0, 500 * MS)], rules, model, **choices)
    late = [
        after.answered_ns - before.answered_ns
        for before, after in zip(without.answered, beside.answered, strict=True)
    ]
    assert min(late) >= 0
    assert max(late) <= pause_ns


@pytest.mark.parametrize("rho", [0.2, 0.5, 0.8])
def test_a_job_gets_what_requests_leave_of_one_slot(rho):
    """An M/G/1 queue is idle for 1 - rho of the time."""
    rng = random.Random(1)
    requests, now = [], 0.0
    for number in range(20_000):
        now += rng.expovariate(rho / MS)
        requests.append(request(number, int(rng.uniform(0.2, 1.8) * MS), int(now)))
    simulation = Simulation(
        Scheduler(params(jobs=FREE, lanes=1, policy="fifo", max_queue=1000)),
        AT_ONCE,
        (job(0, 10**6 * MS),),
    )
    for one in requests:
        simulation.advance(one.task.arrived_ns)
        simulation.offer(one)
    simulation.jobs.stand_at(simulation.now_ns)
    busy_ns = sum(one.run_ns for one in requests)
    share = simulation.jobs.trained_ns / simulation.now_ns
    assert share == pytest.approx(1 - busy_ns / simulation.now_ns, abs=0.002)
    assert share == pytest.approx(1 - rho, abs=0.01)


def in_time(simulation):
    return [
        isinstance(row.outcome, Completed) and row.answered_ns <= row.task.due_ns
        for row in simulation.answered
    ]


def test_the_governor_keeps_the_targets_that_jobs_would_cost():
    """Beside a job a run takes twice as long, which half of the targets do not allow."""
    requests = [
        request(n, 4 * MS, 20 * n * MS, target_ns=(6 if n % 2 else 40) * MS) for n in range(20)
    ]
    model = DeviceModel(switch_ns=Nanos(0), beside_jobs=(1.0, 2.0))
    choices = {"policy": "slack", "discipline": "rolling", "lanes": 2}

    def beside(**rules):
        made = replace(FREE, workers=1, **rules)
        return play(requests, [job(0, 700 * MS)], made, model, **choices)

    careless = beside()
    assert in_time(careless).count(False) == 10
    governed = beside(slowdown=(1.0, 2.0))
    strict = beside(slack="strict")
    assert all(in_time(governed))
    assert all(in_time(strict))
    # Beside a request whose target allows it the job goes on; strictly it never does.
    assert governed.jobs.pauses == 10
    # The first request is there when the job comes.
    assert strict.jobs.pauses == 19


def test_what_a_job_costs_is_learned_from_the_first_run_beside_it():
    """As in the server: a run tells how long jobs ran beside it, and its time what they did."""
    requests = [
        request(n, 4 * MS, 20 * n * MS, target_ns=(40 if n % 2 else 6) * MS) for n in range(20)
    ]
    model = DeviceModel(switch_ns=Nanos(0), beside_jobs=(1.0, 2.0))
    rules = replace(FREE, workers=1)
    scheduler = Scheduler(params(jobs=rules, policy="slack", discipline="rolling", lanes=2))
    simulation = Simulation(scheduler, model, (job(0, 700 * MS),))
    learned, shares = Slowdowns(), []
    for one in requests:
        simulation.advance(one.task.arrived_ns)
        for row in simulation.answered[len(shares) :]:
            when, run_ns = row.outcome.timeline, row.outcome.usage.run_ns
            jobs = when.job_run_ns / (when.finished_ns - when.launched_ns)
            shares.append(round(jobs, 2))
            if jobs:
                learned.observe(0.0, jobs, run_ns / row.task.estimate.run_ns)
                simulation._tell(JobSlowdownChanged(learned.by_jobs.table))
        simulation.offer(one)
    while simulation.next_ns() is not None:
        simulation.step()
    assert learned.by_jobs.table == (1.0, pytest.approx(2.0, rel=0.01))
    # The first was late; those with as little time had no job beside them from then on.
    assert in_time(simulation) == [False] + 19 * [True]
    assert shares == [1.0] + [1.0 if n % 2 else 0.0 for n in range(1, 19)]
    assert simulation.jobs.ended[JobId(0)][1].end is JobEnd.DONE
