"""A clairvoyant bound: violations that no scheduler can avoid on these requests and lanes.

Claim: ``unavoidable_violations`` is at most the number of late or unanswered requests of any
schedule, however it suspends, and even if it knows all arrivals and true run times in advance.

1. A request that is on time does all its work, its true run time, between the end of its prepare
   (`release`) and its due time less what answering takes (`deadline`). Where that interval is
   shorter than the work, it is late in every schedule.
2. Whatever m lanes do in a time span, one machine m times as fast does too: it shares every moment
   among them. So the requests on time under some schedule on the lanes are also a set that the
   fast machine can serve on time, with suspending for free. Memory, interference and the cost of
   switching only take more time.
3. The fast machine can serve amounts of work z_j in time if and only if in every span [a, b] those
   released and due within it add up to no more than b − a (earliest due first is optimal there).
   Let z_j be any amount up to the work p_j, and count z_j / p_j of a request: with z_j = p_j for
   those on time and 0 for the others every schedule is such a choice, so the largest Σ z_j / p_j is
   no less than the number on time in any schedule.
4. Work amounts that fit like this form a polymatroid (they are what a flow from requests to moments
   can carry), on which the greedy choice is optimal: requests by rising p_j, each given as much as
   still fits.
5. Requests on time in a schedule of all are a choice for any part of them too, so the bounds of
   parts add up. Cut where the fast machine would be idle anyway this loses nothing: its busy
   periods are the same in any order, and those of fewer requests lie within them. In each part
   the loss is rounded up to whole requests. Periods of more than `CHUNK` requests are cut as well,
   which is still a bound and usually a lower one; so thousands of requests take seconds, in
   overload too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve.sim.device import DeviceModel, Offered

#: Requests solved at once, at most.
CHUNK = 768

#: Less than this part of a request counts as none: it is rounding.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Job:
    """What the fast machine has to do for one request, in ns."""

    release: int
    deadline: int
    #: On the fast machine.
    work: float


def unavoidable_violations(
    requests: Sequence[Offered], slots: int, model: DeviceModel | None = None
) -> int:
    """How many of `requests` are late or unanswered, at least, on `slots` lanes."""
    pace = min(1.0, *(model or DeviceModel()).slowdown)
    hopeless = 0
    jobs: list[Job] = []
    for offered in requests:
        release = offered.task.arrived_ns + offered.prepare_ns
        deadline = offered.task.due_ns - offered.answer_ns
        run_ns = offered.run_ns * pace
        if deadline - release < run_ns:
            hopeless += 1
        else:
            jobs.append(Job(release, deadline, run_ns / slots))
    jobs.sort(key=lambda job: job.release)
    return hopeless + sum(_fewest_late(chunk) for chunk in _chunks(jobs))


def _chunks(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs in order of release, cut into busy periods, and long ones of these into parts."""
    chunks: list[list[Job]] = []
    period: list[Job] = []
    free = -math.inf
    for job in jobs:
        if job.release >= free or len(period) == CHUNK:
            chunks.append(period)
            period = []
        free = max(free, job.release) + job.work
        period.append(job)
    chunks.append(period)
    return chunks


def _fewest_late(jobs: Sequence[Job]) -> int:
    """The bound for the jobs of one part."""
    if len(jobs) < 2:
        return 0  # each alone is in time, else it were hopeless
    starts = np.unique([job.release for job in jobs])
    ends = np.unique([job.deadline for job in jobs])
    # room[a, b]: time left between starts[a] and ends[b] beside the work taken on within.
    room = (ends[None, :] - starts[:, None]).astype(np.float64)
    lost = 0.0
    for job in sorted(jobs, key=lambda job: job.work):
        first = int(np.searchsorted(starts, job.release)) + 1
        last = int(np.searchsorted(ends, job.deadline))
        around = room[:first, last:]
        taken = min(job.work, max(0.0, float(around.min())))
        if taken > 0:
            around -= taken
        lost += 1 - taken / job.work
    return math.ceil(lost - _EPSILON)
