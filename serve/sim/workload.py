"""The workloads of the load generator, as requests for a simulation.

What a request takes is its calibrated time, spread a little at random by the request's own seed:
the scheduler sees the estimate, the simulated device the truth.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serve.core.disciplines import get_discipline
from serve.core.params import LANES_PER_CORE, DeviceFacts, SchedulerParams
from serve.core.policies import POLICIES
from serve.core.types import Bytes, LaneId, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.errors import ConfigError
from serve.sim.device import DeviceModel, Offered
from serve.workload import Trace, TraceItem

#: How a run differs from its estimate: standard deviation of the logarithm.
RUN_SPREAD = 0.1
#: Share of the server's own part of the solo time that goes into preparing; the rest answers.
PREPARE_SHARE = 0.5

Estimator = Callable[[str, int, int], TaskEstimate]


@dataclass(frozen=True, slots=True)
class System:
    """Simulated server: one of our policies under a discipline, or a baseline."""

    params: SchedulerParams
    device: DeviceModel


#: Baselines of the paper: how many tasks run at once, memory unchecked. None: all there are.
BASELINES: dict[str, int | None] = {"default": 1, "mps_base": 4, "mps_aggr": None}

#: As many at once as a simulation keeps apart.
_ALL_AT_ONCE = 64
_UNCHECKED = Bytes(1 << 62)


def make_system(
    policy: str,
    discipline: str,
    *,
    cores: int,
    budget_bytes: int,
    lanes_per_core: int = LANES_PER_CORE,
    devices: int = 1,
) -> System:
    """Return a policy or baseline on `devices` alike devices of `cores` cores each.

    A baseline is first-in first-out with memory unchecked; tasks beyond the cores share them.
    Raises ConfigError for an unknown name.
    """
    if min(cores, budget_bytes, devices) < 1:
        raise ConfigError(
            f"cores {cores}, memory {budget_bytes} bytes and devices {devices} must be at least 1"
        )
    get_discipline(discipline)
    if policy in BASELINES:
        lanes = BASELINES[policy] or _ALL_AT_ONCE
        facts = DeviceFacts(_UNCHECKED, _lane_ids(lanes))
        shared = tuple(max(1.0, count / cores) for count in range(1, lanes + 1))
        policy, discipline, model = "fifo", "rolling", DeviceModel(slowdown=shared)
    else:
        if policy not in POLICIES:
            known = f"known: {', '.join(POLICIES)}; baselines: {', '.join(BASELINES)}"
            raise ConfigError(f"unknown policy '{policy}'; {known}")
        lanes = lanes_per_core * cores
        facts = DeviceFacts(
            Bytes(budget_bytes), _lane_ids(lanes), parallelism=cores, can_suspend=True
        )
        model = DeviceModel()
    first, *others = (
        replace(facts, lane_ids=_lane_ids(lanes, number * lanes)) for number in range(devices)
    )
    params = SchedulerParams(first, tuple(others), policy=policy, discipline=discipline)
    return System(params, model)


def mean_solo_ns(tasks: Sequence[tuple[str, int, int]], estimator: Estimator) -> float:
    """Return the mean estimated solo time over (model, nodes, edges)."""
    return sum(estimator(*task).solo_ns for task in tasks) / len(tasks)


def task_of(number: int, item: TraceItem, estimate: TaskEstimate, target_ns: int) -> Task:
    """Return the request of a trace as the scheduler sees it."""
    return Task(
        task_id=TaskId(number),
        model=item.model,
        num_nodes=item.num_nodes,
        num_edges=item.num_edges,
        arrived_ns=Nanos(item.offset_ns),
        estimate=estimate,
        qos=QoS(Nanos(target_ns), priority=item.priority),
        tenant=item.tenant,
    )


def offered(
    trace: Trace,
    estimator: Estimator,
    qos_factor: float,
    run_ratios: Sequence[float] | None = None,
) -> list[Offered]:
    """Return the requests of `trace`, each with a target of `qos_factor` × its solo time.

    True run times are the estimates times one of `run_ratios`, such as a recording has, picked by
    the request's seed; without them, times a lognormal factor of spread `RUN_SPREAD`.
    """
    requests = []
    for number, item in enumerate(trace.items, 1):
        estimate = estimator(item.model, item.num_nodes, item.num_edges)
        target_ns = int(qos_factor * estimate.solo_ns)
        if item.qos_target_us is not None:
            target_ns = item.qos_target_us * 1000
        task = task_of(number, item, estimate, target_ns)
        rng = random.Random(item.seed)
        ratio = rng.choice(run_ratios) if run_ratios else rng.lognormvariate(0.0, RUN_SPREAD)
        true_ns = estimate.run_ns * ratio
        host_ns = estimate.solo_ns - estimate.run_ns
        prepare_ns = int(PREPARE_SHARE * host_ns)
        requests.append(
            Offered(
                task,
                run_ns=Nanos(max(1, round(true_ns))),
                prepare_ns=Nanos(prepare_ns),
                answer_ns=Nanos(host_ns - prepare_ns),
            )
        )
    return requests


def _lane_ids(count: int, first: int = 0) -> tuple[LaneId, ...]:
    return tuple(LaneId(lane) for lane in range(first, first + count))
