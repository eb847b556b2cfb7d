"""What bounds the run of a placed job, without running it."""

from collections.abc import Sequence

from serve.core.placement.job import Assignment, DistributedJob, Volumes

#: Iterations after which the length of one more is taken for that of all that follow.
SETTLED = 5


def link_counts(job: DistributedJob, assignment: Assignment) -> tuple[list[int], list[int]]:
    """Return how many links come into, and go out of, each machine from and to others."""
    coming, going = [0] * len(job.machines), [0] * len(job.machines)
    for link in job.links:
        if job.crosses(link, assignment):
            going[assignment[link.source]] += 1
            coming[assignment[link.target]] += 1
    return coming, going


def competitive_ratio(job: DistributedJob, assignment: Assignment) -> int:
    """Return how many times as long as the best schedule a run takes at most (the paper's Δ)."""
    coming, going = link_counts(job, assignment)
    return max(1, *coming, *going)


def critical_path_s(
    job: DistributedJob, assignment: Assignment, volumes: Volumes, *, shared: bool = True
) -> float:
    """Return the length of the longest chain of runs and flows.

    With `shared` each flow gets its part of the interfaces as if all links were active: no run with
    ``sharing.equal`` takes longer (the paper's Theorem 3). Without, each flow has them to itself:
    no schedule takes less.
    """
    ends = _iteration_ends_s(job, assignment, volumes, shared=shared)
    return ends[-1] if ends else 0.0


def settled_path_s(
    job: DistributedJob,
    assignment: Assignment,
    volumes: Volumes,
    iterations: int,
    *,
    shared: bool = True,
) -> float:
    """Return about how long the critical path of `iterations` is, from the first ones in `volumes`.

    After some iterations each adds the same.
    """
    ends = _iteration_ends_s(job, assignment, volumes, shared=shared)
    if len(ends) < 2:
        return iterations * (ends[-1] if ends else 0.0)
    return ends[-1] + (iterations - len(ends)) * (ends[-1] - ends[-2])


def settled_bound_s(
    job: DistributedJob, assignment: Assignment, volumes: Volumes, iterations: int
) -> float:
    """Return about ``lower_bound_s`` of `iterations`, from the first ones in `volumes`."""
    path_s = settled_path_s(job, assignment, volumes, iterations, shared=False)
    return max(path_s, _network_s(job, assignment, volumes) * iterations / len(volumes[0]))


def lower_bound_s(job: DistributedJob, assignment: Assignment, volumes: Volumes) -> float:
    """Return a time that no schedule of this placement is below."""
    path_s = critical_path_s(job, assignment, volumes, shared=False)
    return max(path_s, _network_s(job, assignment, volumes))


def _network_s(job: DistributedJob, assignment: Assignment, volumes: Volumes) -> float:
    """Return how long the busiest interface is busy."""
    coming, going = [0.0] * len(job.machines), [0.0] * len(job.machines)
    for link, sent in zip(job.links, volumes, strict=True):
        if job.crosses(link, assignment):
            used = sum(sent[: len(sent) - link.shift] if link.shift else sent)
            going[assignment[link.source]] += used
            coming[assignment[link.target]] += used
    return max(
        *(sent / one.in_bytes_s for sent, one in zip(coming, job.machines, strict=True)),
        *(sent / one.out_bytes_s for sent, one in zip(going, job.machines, strict=True)),
    )


def _iteration_ends_s(
    job: DistributedJob, assignment: Assignment, volumes: Volumes, *, shared: bool
) -> list[float]:
    """Return when the last run of each iteration ends on the longest chain."""
    pace = _byte_s(job, assignment, shared=shared)
    run_s = [task.run_s[place] for task, place in zip(job.tasks, assignment, strict=True)]
    sources = [link.source for link in job.links]
    shifts = [link.shift for link in job.links]
    ends: list[list[float]] = [[] for _ in job.tasks]
    flow_ends = [0.0] * len(job.links)
    last_s = 0.0
    found = []
    for n in range(len(volumes[0]) if volumes else 1):
        for task in job.order:
            start_s = ends[task][-1] if n else 0.0
            for number in job.incoming[task]:
                before = n - shifts[number]
                if before < 0:
                    continue
                ready_s = ends[sources[number]][before]
                byte_s = pace[number]
                if byte_s is not None:
                    # One flow of a pair of tasks after the other.
                    ready_s = max(ready_s, flow_ends[number]) + volumes[number][before] * byte_s
                    flow_ends[number] = ready_s
                start_s = max(start_s, ready_s)
            ends[task].append(start_s + run_s[task])
            last_s = max(last_s, ends[task][-1])
        found.append(last_s)
    return found


def _byte_s(job: DistributedJob, assignment: Assignment, *, shared: bool) -> Sequence[float | None]:
    """Return the time for a byte by link; None where nothing is sent between machines."""
    coming, going = link_counts(job, assignment)
    found: list[float | None] = []
    for link in job.links:
        if not job.crosses(link, assignment):
            found.append(None)
            continue
        source, target = assignment[link.source], assignment[link.target]
        parts = (going[source], coming[target]) if shared else (1, 1)
        found.append(max(
            parts[0] / job.machines[source].out_bytes_s,
            parts[1] / job.machines[target].in_bytes_s,
        ))  # fmt: skip
    return found
