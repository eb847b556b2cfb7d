"""A device learned from one run is like the one it was learned from."""

import random

import pytest
from msgspec.structs import replace

from bench.kit.open_loop import LoadRun, Seen
from bench.kit.solo import Solo
from bench.live.twin import Learned, Twin
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.journal import decode, encode_header, encode_left, encode_step
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation
from serve.sim.host import HostModel
from serve.sim.report import summarize
from serve.sim.workload import make_system
from serve.workload import PoolSpec, Trace, TraceHeader, TraceItem
from tests.builders import MS, US

CORES, RHO, OWN_SEED, COUNT = 2, 0.45, 9, 400
#: Of the device that serves "live".
PREPARE_NS, ANSWER_NS = 200 * US, 150 * US
HOST = HostModel(CORES, 150 * US, 150 * US, 250 * US, 100 * US, 250 * US)
LIVE = DeviceModel(slowdown=(1.0, 1.3), launch_ns=Nanos(200 * US), host=HOST)


class Traces:
    """Requests of 1 to 30 ms, whose solo times are known."""

    def make(self, rho, seed):
        rng, at_ns, items = random.Random(seed), 0.0, []
        for _ in range(COUNT):
            nodes = int(100 * 2.0 ** rng.uniform(0, 5))
            at_ns += rng.expovariate(rho * CORES / (8 * MS))
            item = TraceItem(
                offset_ns=int(at_ns), seed=rng.randrange(1 << 30), model="gcn", dataset="pubmed",
                index=0, num_nodes=nodes, num_edges=nodes, qos_target_us=0,
            )  # fmt: skip
            items.append(replace(item, qos_target_us=2 * self.solo_of(item).solo_ns // 1000))
        header = TraceHeader(workload="gcn", seed=seed, rate_hz=1.0, rho=rho, pool=PoolSpec())
        return Trace(header, tuple(items)), None

    def solo_of(self, item):
        run_ns = item.num_nodes * 10 * US
        return Solo(run_ns, run_ns + MS, run_ns + 2 * MS, 1 << 20, 1 << 20)


class Journaling(Scheduler):
    def __init__(self, params):
        super().__init__(params)
        self.lines = [encode_header(params)]

    def handle(self, event, now_ns):
        commands = super().handle(event, now_ns)
        self.lines.append(encode_step(now_ns, event, commands))
        return commands


def offered(number, item, solo):
    """It truly takes 0.7 to 1.1 times its solo time, as warm as cores are at that load."""
    estimate = TaskEstimate(Bytes(1 << 20), Bytes(1 << 20), Nanos(solo.run_ns), Nanos(solo.solo_ns))
    task = Task(
        TaskId(number), "gcn", item.num_nodes, item.num_edges, Nanos(item.offset_ns), estimate,
        QoS(Nanos(item.qos_target_us * 1000)),
    )  # fmt: skip
    run_ns = round(solo.run_ns * random.Random(item.seed).uniform(0.7, 1.1))
    return Offered(task, Nanos(run_ns), Nanos(PREPARE_NS), Nanos(ANSWER_NS))


def live_run(traces, seed, policy, discipline):
    system = make_system(policy, discipline, cores=CORES, budget_bytes=1 << 40)
    scheduler = Journaling(system.params)
    simulation = Simulation(scheduler, LIVE)
    trace, _ = traces.make(RHO, seed)
    items = enumerate(trace.items, 1)
    simulation.run([offered(number, item, traces.solo_of(item)) for number, item in items])
    return trace, scheduler, simulation.answered


def late(answered):
    return summarize(answered).violations / COUNT


@pytest.fixture(scope="module")
def twin():
    traces = Traces()
    trace, scheduler, answered = live_run(traces, OWN_SEED, "slack", "preemptive")
    left = [encode_left(row.answered_ns, row.task.task_id) for row in answered]
    kept = {
        str(row.task.task_id): {
            "run_ns": row.outcome.usage.run_ns - row.outcome.timeline.suspended_ns,
            "run_estimate_ns": row.task.estimate.run_ns,
            "co_runners": row.outcome.placement.co_runners,
            "merged": 1,
            "queue_ns": 0,
        }
        for row in answered
    }
    seen = tuple(Seen(0, 0, "", str(number)) for number in range(1, COUNT + 1))
    client_s = COUNT * (HOST.send_ns + HOST.read_ns) / 1e9
    of_server = (HOST.receive_ns, HOST.hear_ns, HOST.finish_ns, PREPARE_NS, ANSWER_NS)
    learned = Learned(trace, LoadRun(seen, 1.0, client_s), COUNT * sum(of_server) / 1e9, 0, 1 << 62)
    journal = decode([*scheduler.lines, *left])
    return Twin(traces, journal, learned, kept, CORES)


@pytest.mark.parametrize("system", ["slack+preemptive", "slack+rolling", "bqt+barrier"])
def test_it_is_as_late_as_the_device_itself_with_other_requests_and_systems(twin, system):
    policy, discipline = system.split("+")
    seeds = range(3)
    live = [late(live_run(Traces(), seed, policy, discipline)[2]) for seed in seeds]
    simulated = [twin.late(system, RHO, seed) for seed in seeds]
    assert sum(live) > 0.01
    # Where half is late, a tenth of it: the twin takes the middle of what it saw for all runs.
    assert sum(simulated) / 3 == pytest.approx(sum(live) / 3, abs=0.03, rel=0.1)


def test_what_the_host_takes_is_not_taken_for_slower_runs(twin):
    assert twin.facts["slowdown"][1] == pytest.approx(1.3, rel=0.1)
    assert twin.facts["host"]["receive_ns"] == pytest.approx(HOST.receive_ns, rel=0.3)
