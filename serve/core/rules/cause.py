"""Cause of a late answer: the one stage to look at first."""

from serve.core.types import Completed, Task

#: Every cause, as the report counts them.
CAUSES = ("queue", "prepare", "interference", "estimate", "overload", "network")


def violation_cause(
    task: Task, outcome: Completed, answered_ns: int, front_ns: int = 0, rows_ns: int = 0
) -> str | None:
    """Return why the answer at `answered_ns` missed the target; None if it did not.

    `network`: it was in time from the task's arrival here, and is not from `front_ns` before, when
    a front got the request; or `prepare` took too long, and most of it was waiting for `rows_ns`
    for features that other servers hold.
    `overload`: there was more work than the lanes could do (``demand``), so someone had to be late.
    A long task in front of a short one is no overload: another order would have helped.
    Otherwise the stage that took most more than the estimate assumed: `queue` (waiting, assumed
    none), `prepare` (the host's part: prepare as far as a lane waited for it, and answering), or
    the run: `interference` when it shared the device, also with a training job, was merged or
    suspended, or lost more time between host and lane, where only other programs can keep it, than
    on the lane; else `estimate`.
    An answer as fast as one alone is late only by a target below that: `estimate`, however much
    work there was. So is a target below the estimated solo time, missed with no stage over its
    share, and so is all that a run which overran its memory came to wait for.
    """
    latency_ns = answered_ns - task.arrived_ns
    if latency_ns <= task.qos.target_ns:
        late = latency_ns + front_ns > task.qos.target_ns
        return "network" if front_ns and late else None
    when, estimate = outcome.timeline, task.estimate
    if latency_ns <= estimate.solo_ns:
        return "estimate"
    if when.overloaded:
        return "overload"
    where = outcome.placement
    if where.overran:
        return "estimate"
    queue_ns = when.launched_ns - when.arrived_ns - when.prepare_exposed_ns
    host_ns = when.prepare_exposed_ns + answered_ns - when.finished_ns
    out_ns = when.finished_ns - when.launched_ns
    handover_ns = out_ns - outcome.usage.run_ns
    disturbed = (
        where.co_runners > 0
        or when.job_run_ns > 0
        or where.merged > 1
        or when.suspended_ns > 0
        or handover_ns > outcome.usage.run_ns - estimate.run_ns
    )
    excess_ns = {
        "interference" if disturbed else "estimate": out_ns - estimate.run_ns,
        "queue": queue_ns,
        "prepare": host_ns - (estimate.solo_ns - estimate.run_ns),
    }
    worst = max(excess_ns, key=lambda cause: excess_ns[cause])
    if worst == "prepare" and 2 * rows_ns > host_ns:
        worst, excess_ns = "network", {"network": excess_ns[worst]}
    return worst if excess_ns[worst] > 0 else "estimate"
