"""The run of a placed job keeps the paper's bounds, as they are proved."""

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.placement.critical import (
    competitive_ratio,
    critical_path_s,
    link_counts,
    lower_bound_s,
    settled_path_s,
)
from serve.core.placement.job import (
    DistributedJob,
    JobLink,
    JobMachine,
    JobRole,
    JobTask,
    drawn_volumes,
    mean_volumes,
)
from serve.core.placement.play import played
from serve.core.placement.sharing import SHARINGS, ActiveFlow, due_first, equal, max_min
from tests.core.placement.made_up import random_assignment, random_job

#: Times are sums of fractions.
CLOSE = 1 + 1e-9
INSTANCES = 1000


def instances(count, seed):
    for number in range(count):
        rng = Random(f"{seed} {number}")
        job = random_job(rng)
        yield job, random_assignment(rng, job), drawn_volumes(job, rng.randint(1, 5), rng)


def chain(run_s, volumes, rates=(1.0, 1.0)):
    """Two tasks on two machines, the first of which sends the second something."""
    machines = tuple(JobMachine(f"m{n}", (), rate, rate) for n, rate in enumerate(rates))
    tasks = (
        JobTask("first", JobRole.STORE, (), (run_s,) * 2, fixed=0),
        JobTask("second", JobRole.WORKER, (), (run_s,) * 2),
    )
    return DistributedJob((), machines, tasks, (JobLink(0, 1, 0, volumes),))


def test_runs_and_flows_overlap():
    job = chain(1.0, (2.0,))
    volumes = mean_volumes(job, 3)
    found = played(job, (0, 1), volumes)
    # Runs of the first end at 1, 2, 3; flows at 3, 5, 7; so the last run of the second at 8.
    assert found.makespan_s == pytest.approx(8)
    assert [flow.ended_s for flow in found.flows] == pytest.approx([3, 5, 7])
    assert played(job, (0, 0), volumes).makespan_s == pytest.approx(4)
    # Two iterations ahead at most: the third run of the first waits for the first of the second.
    held = played(job, (0, 1), volumes, window=1)
    assert held.makespan_s == pytest.approx(12)


def test_the_bounds_hold_on_random_jobs():
    """Lemma 1, Theorem 3, and more than Theorem 1: Δ times a bound from below."""
    crossing = 0
    for job, where, volumes in instances(INSTANCES, "bounds"):
        found = played(job, where, volumes)
        coming, going = link_counts(job, where)
        assert all(a <= b for a, b in zip(found.most_in, coming, strict=True))
        assert all(a <= b for a, b in zip(found.most_out, going, strict=True))
        ratio = competitive_ratio(job, where)
        alone_s = critical_path_s(job, where, volumes, shared=False)
        least_s = lower_bound_s(job, where, volumes)
        assert found.makespan_s <= critical_path_s(job, where, volumes) * CLOSE
        assert found.makespan_s <= ratio * alone_s * CLOSE
        assert alone_s <= least_s * CLOSE <= found.makespan_s * CLOSE**2
        crossing += bool(found.flows)
    assert crossing > INSTANCES / 2


@pytest.mark.parametrize("sharing", [max_min, due_first])
def test_sharing_that_gives_no_flow_less_keeps_them_too(sharing):
    for job, where, volumes in instances(INSTANCES // 2, "fair"):
        found = played(job, where, volumes, sharing)
        assert found.makespan_s <= critical_path_s(job, where, volumes) * CLOSE
        alone_s = critical_path_s(job, where, volumes, shared=False)
        assert found.makespan_s <= competitive_ratio(job, where) * alone_s * CLOSE


def test_ways_without_a_promise_break_the_bound_at_times():
    """The bound is no matter of course."""
    broken = 0
    for job, where, volumes in instances(600, "broken"):
        bound_s = critical_path_s(job, where, volumes)
        broken += any(
            played(job, where, volumes, SHARINGS[name]).makespan_s > bound_s * CLOSE
            for name in ("fifo", "least_left", "coflow")
        )
    assert broken


def test_flows_that_nothing_changed_beside_keep_their_rates():
    """Those that are shared out anew are as many as need it: the runs are as if all were."""
    for job, where, volumes in instances(200, "beside"):
        found = played(job, where, volumes)
        anew = played(job, where, volumes, lambda flows, machines: equal(flows, machines))
        assert found.makespan_s == pytest.approx(anew.makespan_s)
        assert (found.most_in, found.most_out) == (anew.most_in, anew.most_out)


@pytest.mark.parametrize("name", SHARINGS)
def test_every_way_of_sharing_keeps_the_rules(name):
    """Nothing starts before what it waits for; no interface carries more than it can."""
    for job, where, volumes in instances(120, name):
        found = played(job, where, volumes, SHARINGS[name])
        count = len(volumes[0]) if volumes else 1
        runs = {(run.task, run.iteration): run for run in found.runs}
        assert len(runs) == len(found.runs) == len(job.tasks) * count
        flows = {(flow.link, flow.iteration): flow for flow in found.flows}
        carried = defaultdict(float)
        for number, link in enumerate(job.links):
            last_s = 0.0
            for n in range(count - link.shift):
                source, target = runs[link.source, n], runs[link.target, n + link.shift]
                arrived_s = source.ended_s
                if job.crosses(link, where):
                    flow = flows.pop((number, n))
                    assert flow.began_s >= max(last_s, source.ended_s)
                    last_s = arrived_s = flow.ended_s
                    carried[where[link.source], "out"] += volumes[number][n]
                    carried[where[link.target], "in"] += volumes[number][n]
                assert target.began_s >= arrived_s
        assert not flows
        assert found.makespan_s == max(run.ended_s for run in found.runs)
        for (task, n), run in runs.items():
            assert run.ended_s - run.began_s == pytest.approx(job.tasks[task].run_s[where[task]])
            assert not n or run.began_s >= runs[task, n - 1].ended_s
        for (machine, way), sent in carried.items():
            host = job.machines[machine]
            rate = host.out_bytes_s if way == "out" else host.in_bytes_s
            assert sent / rate <= found.makespan_s * CLOSE


def test_the_ratio_is_reached():
    """A chain over machines whose every hop shares its way out with flows nobody waits for."""
    hops, others = 12, 7
    machines = tuple(JobMachine(f"m{n}", (), 1.0, 1.0) for n in range(hops + 1))
    wide = tuple(JobMachine(f"o{n}", (), 100.0, 100.0) for n in range(hops))
    nothing = (0.0,) * (2 * hops + 1)
    tasks = [JobTask(f"t{n}", JobRole.SAMPLER, (), nothing, fixed=n) for n in range(hops + 1)]
    links = [JobLink(n, n + 1, 0, (1.0,)) for n in range(hops)]
    for hop in range(hops):
        for _ in range(others):
            tasks.append(JobTask("sink", JobRole.WORKER, (), nothing, fixed=hops + 1 + hop))
            links.append(JobLink(hop, len(tasks) - 1, 0, (1.0,)))
    job = DistributedJob((), machines + wide, tuple(tasks), tuple(links))
    where = job.assigned({})
    volumes = mean_volumes(job, 1)
    found = played(job, where, volumes, equal)
    assert competitive_ratio(job, where) == others + 1
    assert found.makespan_s == pytest.approx(hops * (others + 1))
    # The best schedule sends the chain's flows first.
    best_s = hops + others
    assert found.makespan_s / best_s > 0.6 * (others + 1)


def test_the_settled_path_is_that_of_all_iterations():
    exact = 0
    for job, where, _ in instances(100, "settled"):
        whole_s = critical_path_s(job, where, mean_volumes(job, 30))
        short_s = settled_path_s(job, where, mean_volumes(job, 5), 30)
        exact += short_s == pytest.approx(whole_s)
    assert exact >= 80


def test_the_same_is_played_the_same():
    for job, where, volumes in instances(20, "same"):
        assert played(job, where, volumes) == played(job, where, volumes)


@st.composite
def active_flows(draw):
    """Machines and flows between them, each with a due time."""
    rate = st.floats(0.5, 100)
    machines = [JobMachine(f"m{n}", (), draw(rate), draw(rate)) for n in range(4)]
    ends = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])
    flows = [
        ActiveFlow(n, 0, *draw(ends), (n, 0), 1.0, (0.0, n), 0.0, 0.0, due_s=draw(st.floats(0, 9)))
        for n in range(draw(st.integers(1, 9)))
    ]
    return flows, machines


@pytest.mark.parametrize("sharing", [due_first, max_min])
@given(active_flows())
def test_no_flow_gets_less_than_the_papers_rate_and_no_interface_sends_more(sharing, given):
    flows, machines = given
    rates = sharing(flows, machines)
    for rate, least in zip(rates, equal(flows, machines), strict=True):
        assert rate * CLOSE >= least
    out = [sum(r for r, f in zip(rates, flows, strict=True) if f.source == m) for m in range(4)]
    into = [sum(r for r, f in zip(rates, flows, strict=True) if f.target == m) for m in range(4)]
    full = [
        (out[m] >= one.out_bytes_s / CLOSE, into[m] >= one.in_bytes_s / CLOSE)
        for m, one in enumerate(machines)
    ]
    for m, one in enumerate(machines):
        assert out[m] <= one.out_bytes_s * CLOSE
        assert into[m] <= one.in_bytes_s * CLOSE
    # Nothing is left that a flow could use.
    assert all(full[flow.source][0] or full[flow.target][1] for flow in flows)


def test_what_is_left_goes_to_the_flow_that_is_due_first():
    # Two flows from a fast machine, one of them to a slow one.
    machines = [JobMachine(f"m{n}", (), rate, rate) for n, rate in enumerate((10.0, 1.0, 10.0))]
    flows = [
        ActiveFlow(n, 0, 0, target, (n, 0), 1.0, (0.0, n), 0.0, 0.0, due_s=due_s)
        for n, (target, due_s) in enumerate([(1, 1.0), (2, 3.0), (2, 2.0)])
    ]
    assert due_first(flows, machines) == pytest.approx([1.0, 10 / 3, 17 / 3])
