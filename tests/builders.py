"""Domain objects with every field defaulted, for tests that care about one or two of them."""

from collections.abc import Sequence
from dataclasses import replace

from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.slowdown import NO_SLOWDOWN
from serve.core.types import (
    NO_LIMITS,
    Bytes,
    LaneId,
    Nanos,
    QoS,
    RunLimits,
    Sized,
    Task,
    TaskEstimate,
    TaskId,
    UnionEstimate,
    Usage,
)

US = 1_000
MS = 1_000_000


def task(
    task_id: int = 0,
    *,
    reserve: int = 1024,
    run_ns: int = MS,
    prepare_ns: int = 100 * US,
    arrived_ns: int = 0,
    target_ns: int | None = None,
    timeout_ns: int | None = None,
    priority: int = 0,
    model: str = "gcn:1",
    tenant: str = "",
    domain: str = "",
    limits: RunLimits = NO_LIMITS,
) -> Task:
    """A task whose solo time is `run_ns` + `prepare_ns` and whose target is twice that."""
    solo_ns = run_ns + prepare_ns
    estimate = TaskEstimate(
        peak_bytes=Bytes(reserve), reserve_bytes=Bytes(reserve),
        run_ns=Nanos(run_ns), solo_ns=Nanos(solo_ns),
    )  # fmt: skip
    return Task(
        task_id=TaskId(task_id),
        model=model,
        # So that what a union takes follows from its members' sizes; see `unions_saving`.
        num_nodes=run_ns,
        num_edges=reserve,
        arrived_ns=Nanos(arrived_ns),
        estimate=estimate,
        qos=QoS(
            target_ns=Nanos(2 * solo_ns if target_ns is None else target_ns),
            timeout_ns=None if timeout_ns is None else Nanos(timeout_ns),
            priority=priority,
        ),
        tenant=tenant,
        domain=domain,
        limits=limits,
    )


def sized(*, reserve: int = 1024, run_ns: int = MS, prepare_ns: int = 100 * US) -> Sized:
    """What preparing may find a task to be."""
    found = task(reserve=reserve, run_ns=run_ns, prepare_ns=prepare_ns)
    return Sized(found.num_nodes, found.num_edges, found.estimate)


def unions_saving(saved_ns: int) -> UnionEstimate:
    """Of tasks made here: a union takes what its members take, less `saved_ns` for each but one."""

    def together(model: str, sizes: Sequence[tuple[int, int]]) -> TaskEstimate | None:
        run_ns = max(1, sum(run for run, _ in sizes) - saved_ns * (len(sizes) - 1))
        reserve = Bytes(sum(reserve for _, reserve in sizes))
        return TaskEstimate(reserve, reserve, Nanos(run_ns), Nanos(run_ns))

    return together


def device(
    *,
    budget: int = 1 << 20,
    lanes: int = 2,
    parallelism: int | None = None,
    can_suspend: bool = False,
    slowdown: tuple[float, ...] = NO_SLOWDOWN,
) -> DeviceFacts:
    """A device with lanes 0, 1, …"""
    lane_ids = tuple(LaneId(lane) for lane in range(lanes))
    return DeviceFacts(Bytes(budget), lane_ids, parallelism, can_suspend, slowdown=slowdown)


def params(
    *,
    budget: int = 1 << 20,
    lanes: int = 2,
    parallelism: int | None = None,
    can_suspend: bool = False,
    slowdown: tuple[float, ...] = NO_SLOWDOWN,
    devices: int = 1,
    lane_limit: int | None = None,
    lane_requests: int | None = None,
    **others,
) -> SchedulerParams:
    """Scheduler parameters for as many `device(...)`, each with lanes of its own."""
    facts = device(
        budget=budget,
        lanes=lanes,
        parallelism=parallelism,
        can_suspend=can_suspend,
        slowdown=slowdown,
    )
    facts = replace(facts, lane_limit_bytes=lane_limit, lane_requests=lane_requests)
    more = tuple(
        replace(facts, lane_ids=tuple(LaneId(number * lanes + lane) for lane in range(lanes)))
        for number in range(1, devices)
    )
    return SchedulerParams(device=facts, more_devices=more, **others)


def usage(run_ns: int = MS, peak: int | None = 512) -> Usage:
    """What a lane measured."""
    return Usage(Nanos(run_ns), None if peak is None else Bytes(peak))
