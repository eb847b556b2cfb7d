"""Workloads on the virtual clock: baselines, targets, and what is known of the load."""

import pytest

from serve.core.types import Bytes, Nanos, TaskEstimate, align_bytes
from serve.errors import ConfigError
from serve.sim.engine import simulate
from serve.sim.workload import BASELINES, make_system, mean_solo_ns, offered
from serve.workload import GraphRef, TraceHeader, WorkloadTask, build_trace, rate_for_rho

CORES = 2
BUDGET = 1 << 30


def estimator(model: str, num_nodes: int, num_edges: int) -> TaskEstimate:
    """1 µs a node, 1 KiB a node, 0.3 ms of the server's own."""
    run_ns = Nanos(1_000 * num_nodes)
    size = Bytes(1024 * num_nodes)
    return TaskEstimate(size, align_bytes(size), run_ns, Nanos(run_ns + 300_000))


def requests(rho: float, count: int = 400):
    tasks = [
        WorkloadTask("gcn", GraphRef("random", index, nodes, 10 * nodes))
        for index, nodes in enumerate((200, 1_000, 5_000, 40_000))
    ]
    shapes = [(task.model, task.graph.num_nodes, task.graph.num_edges) for task in tasks]
    rate_hz = rate_for_rho(rho, mean_solo_ns(shapes, estimator) / 1e9, CORES)
    header = TraceHeader(workload="gcn", seed=1, rate_hz=rate_hz)
    return offered(build_trace(header, tasks, count=count), estimator, qos_factor=2.0)


def late(policy: str, discipline: str, rho: float, devices: int = 1) -> float:
    cores = CORES // devices
    system = make_system(policy, discipline, cores=cores, budget_bytes=BUDGET, devices=devices)
    report = simulate(requests(rho), system.params, system.device)
    assert report.completed == report.requests == 400
    return report.violation_rate


def test_targets_are_the_factor_times_solo():
    for request in requests(0.5):
        assert request.task.qos.target_ns == 2 * request.task.estimate.solo_ns
        assert request.prepare_ns + request.answer_ns == 300_000


def test_the_truth_differs_from_the_estimate_and_is_the_same_again():
    first, again = requests(0.5), requests(0.5)
    assert first == again
    ratios = [request.run_ns / request.task.estimate.run_ns for request in first]
    assert len(set(ratios)) > 300
    assert 0.95 < sorted(ratios)[200] < 1.05


def test_hardly_anyone_is_late_when_there_is_hardly_any_load():
    assert late("slack", "preemptive", rho=0.01) <= 0.01


def test_suspending_keeps_more_targets_than_a_barrier_and_than_one_at_a_time():
    ours = late("slack", "preemptive", rho=0.5)
    assert ours < late("bqt", "barrier", rho=0.5) / 2
    assert ours < late("default", "rolling", rho=0.5) / 2


def test_two_devices_of_a_core_serve_about_as_well_as_one_of_two_cores():
    system = make_system("slack", "preemptive", cores=1, budget_bytes=BUDGET, devices=2)
    lanes = [set(facts.lane_ids) for facts in system.params.devices]
    assert len(lanes) == 2
    assert not lanes[0] & lanes[1]
    apart, together = (late("slack", "preemptive", 0.5, devices) for devices in (2, 1))
    assert together <= apart <= together + 0.1
    assert apart < late("slack", "preemptive", rho=1.0) / 2


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_run_as_many_at_once_as_they_say(name):
    params = make_system(name, "rolling", cores=CORES, budget_bytes=BUDGET).params
    assert params.policy == "fifo"
    assert params.device.budget_bytes > 1 << 60
    assert params.device.slots == {"default": 1, "mps_base": 4, "mps_aggr": 64}[name]


@pytest.mark.parametrize(("policy", "discipline"), [("best", "rolling"), ("default", "best")])
def test_unknown_names_list_the_choices(policy, discipline):
    with pytest.raises(ConfigError, match="'best'"):
        make_system(policy, discipline, cores=CORES, budget_bytes=BUDGET)
