"""A clairvoyant lower bound on the violations of these requests on these lanes.

Claim: ``unavoidable_violations`` is at most the number of late or unanswered requests of any
schedule that runs each by itself, however it suspends, even if it knows all arrivals and true run
times in advance, and moves runs between lanes. (Merged runs save work, so for them it is no bound.)

1. A request that is on time does all its work, its true run time and what a launch costs, between
   the end of its prepare (`release`) and its due time less what answering takes (`deadline`). Where
   that interval is shorter than the work, it is late in every schedule.
2. Cut time at all releases and deadlines. Between two cuts a request gets at most their distance,
   as it never executes on two lanes at once, and all together get at most m times that. Memory,
   interference and the cost of switching only take more time.
3. Conversely, amounts within these limits can be scheduled on m lanes, by McNaughton's rule
   ("Scheduling with deadlines and loss functions", 1959). So what is left is to choose the most
   requests that all get their work: a mixed-integer program with one yes or no for each request,
   solved exactly; where the time runs out, what the solver has proved until then counts.
4. Requests on time in a schedule of all are a choice for any part of them too, so the bounds of
   parts add up. Requests are cut into parts where one machine m times as fast would be idle, and
   else after `CHUNK`, which is still a bound and usually a lower one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from serve.core.types import TaskId
from serve.sim.device import DeviceModel, Offered

#: Requests in one part, at most; parts smaller than `LEAST` are not cut off.
CHUNK, LEAST = 200, 50
#: For one part, at most.
TIME_LIMIT_S = 2.0

#: Less than this part of a request counts as none: it is rounding.
_EPSILON = 1e-6
#: Times are given to the solver in this unit, which keeps its numbers near 1.
_UNIT_NS = 100_000


@dataclass(frozen=True, slots=True)
class SlotJob:
    """The work of one request, in ns."""

    release: int
    deadline: int
    work: float
    task_id: TaskId


def unavoidable_violations(
    requests: Sequence[Offered], slots: int, model: DeviceModel | None = None
) -> int:
    """Return a lower bound on the requests that are late or unanswered on `slots` lanes."""
    jobs = _jobs(requests, model or DeviceModel())
    hopeless = len(requests) - len(jobs)
    return hopeless + sum(_fewest_late(part, slots) for part in _parts(jobs, slots))


def most_on_time(
    requests: Sequence[Offered], slots: int, model: DeviceModel | None = None
) -> frozenset[TaskId]:
    """Return the largest set of requests that the solver keeps on time, knowing all."""
    jobs = _jobs(requests, model or DeviceModel())
    return frozenset(
        job.task_id for part in _parts(jobs, slots) for job in _kept_on_time(part, slots)
    )


def _jobs(requests: Sequence[Offered], model: DeviceModel) -> list[SlotJob]:
    """Return the requests that could be on time alone, in order of release."""
    pace = min(1.0, *model.slowdown)
    jobs: list[SlotJob] = []
    for offered in requests:
        release = offered.task.arrived_ns + offered.prepare_ns
        deadline = offered.task.due_ns - offered.answer_ns
        work_ns = (offered.run_ns + model.launching_ns) * pace
        if deadline - release >= work_ns:
            jobs.append(SlotJob(release, deadline, work_ns, offered.task.task_id))
    jobs.sort(key=lambda job: job.release)
    return jobs


def _parts(jobs: Sequence[SlotJob], slots: int) -> Iterator[list[SlotJob]]:
    """Yield jobs in order of release, cut where lanes could be idle or parts grow too large."""
    part: list[SlotJob] = []
    free = -math.inf
    for job in jobs:
        if (job.release >= free and len(part) >= LEAST) or len(part) == CHUNK:
            yield part
            part = []
        free = max(free, job.release) + job.work / slots
        part.append(job)
    yield part


def _fewest_late(jobs: Sequence[SlotJob], slots: int) -> int:
    """Return the bound for the jobs of one part."""
    if len(jobs) <= slots:
        return 0  # each alone is in time, else it were hopeless
    solved = _solved(jobs, slots)
    if solved.mip_dual_bound is None:
        return 0  # nothing was proved in time
    on_time = -float(solved.mip_dual_bound)
    return max(0, len(jobs) - math.floor(on_time + _EPSILON))


def _kept_on_time(jobs: Sequence[SlotJob], slots: int) -> list[SlotJob]:
    """Return the jobs that a solution keeps on time; all where none was found in time."""
    solved = None if len(jobs) <= slots else _solved(jobs, slots)
    if solved is None or solved.x is None:
        return list(jobs)
    chosen = solved.x[-len(jobs) :] > 0.5
    return [job for job, yes in zip(jobs, chosen, strict=True) if yes]


def _solved(jobs: Sequence[SlotJob], slots: int) -> Any:
    """Return the program's solution; its last values say for each job if it is on time."""
    cuts = np.unique([time for job in jobs for time in (job.release, job.deadline)])
    spans = np.diff(cuts) / _UNIT_NS
    first = np.searchsorted(cuts, [job.release for job in jobs])
    last = np.searchsorted(cuts, [job.deadline for job in jobs])
    # Variables: what each job gets in each span of its time, then whether it is on time.
    job_of = np.repeat(np.arange(len(jobs)), last - first)
    span_of = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
    shares, count = len(job_of), len(jobs)
    work = np.array([job.work for job in jobs]) / _UNIT_NS
    rows = np.concatenate([job_of, np.arange(count), count + span_of])
    columns = np.concatenate([np.arange(shares), shares + np.arange(count), np.arange(shares)])
    values = np.concatenate([np.ones(shares), -work, np.ones(shares)])
    limits = coo_array((values, (rows, columns)), shape=(count + len(spans), shares + count))
    return milp(
        np.concatenate([np.zeros(shares), -np.ones(count)]),
        integrality=np.concatenate([np.zeros(shares), np.ones(count)]),
        bounds=Bounds(0, np.concatenate([spans[span_of], np.ones(count)])),
        constraints=LinearConstraint(
            limits.tocsr(),
            np.concatenate([np.zeros(count), np.full(len(spans), -np.inf)]),
            np.concatenate([np.zeros(count), slots * spans]),
        ),
        options={"time_limit": TIME_LIMIT_S},
    )
