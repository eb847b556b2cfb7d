"""What keeps the scheduler from the bound: what it cannot know, what suspending costs, the rest.

    python -m bench.scheduling.limits [--quick] [--seeds 12] [--requests 1000] [--out FILE]

Simulated as in ``bench.scheduling.policies`` (calibrated run times, 100 tasks a list, targets of 2
× solo, true times 10 % off the estimates), `slack` with `preemptive` on four lanes a core. Besides
it as it is, three that could not be built, on the same requests with the same targets: one is told
whom to give up, those that the bound's solution does not keep on time; one the true run time of
each request when it arrives; and one of these also suspends and resumes for nothing. The last two
do not know what is to come, so what they lack of the bound is the price of that, or ours. The bound
(``bench.scheduling.bound``) pays for launches, not for suspending, so the others pay for launches
as well.

Goodput is the highest ρ with at most 1 % missed, as in ``bench.scheduling.policies``.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from bench.scheduling.bound import most_on_time, unavoidable_violations
from bench.scheduling.policies import Site, goodput, missed_share, this_machine
from serve.core.policies import register_policy
from serve.core.policies.slack import Slack
from serve.core.state.ordered import Key
from serve.core.types import ZERO_NS, Nanos, Task, TaskId
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from serve.sim.workload import make_system
from serve.workload import WORKLOADS

RHOS = (0.7, 0.8, 0.9)


@register_policy
class Told(Slack):
    """`slack` that is told who is to be on time; the others count as late from the start."""

    name = "slack, told whom to give up"
    kept: frozenset[TaskId] = frozenset()

    def rank(self, task: Task, left_ns: Nanos, now_ns: Nanos) -> Key:
        """As ever for those that are kept."""
        late, level, by_ns, task_id = super().rank(task, left_ns, now_ns)
        if task_id in self.kept:
            return late, level, by_ns, task_id
        return True, level, left_ns, task_id


def ours(
    site: Site,
    requests: Sequence[Offered],
    device: DeviceModel | None = None,
    policy: str = Slack.name,
) -> float:
    """Share missed by the server's scheduler."""
    made = make_system(policy, "preemptive", cores=site.cores, budget_bytes=site.budget_bytes)
    return missed_share(simulate(requests, made.params, device or made.device))


def told(site: Site, requests: Sequence[Offered]) -> float:
    """The same, told whom to give up."""
    Told.kept = most_on_time(requests, site.cores)
    return ours(site, requests, policy=Told.name)


def knowing(site: Site, requests: Sequence[Offered]) -> float:
    """The same, told true run times."""
    return ours(site, [known(offered) for offered in requests])


def knowing_free(site: Site, requests: Sequence[Offered]) -> float:
    """The same, and to suspend and resume costs nothing."""
    device = DeviceModel(switch_ns=ZERO_NS, launch_ns=DeviceModel().switch_ns)
    return ours(site, [known(offered) for offered in requests], device)


def bound(site: Site, requests: Sequence[Offered]) -> float:
    """Nobody misses fewer."""
    return unavoidable_violations(requests, site.cores) / len(requests)


SYSTEMS: dict[str, Callable[[Site, Sequence[Offered]], float]] = {
    "as it is": ours,
    "told whom to give up": told,
    "run times known": knowing,
    "run times known, suspending free": knowing_free,
    "bound": bound,
}


def known(offered: Offered) -> Offered:
    """The same request with its true run time as the estimate; the target stays."""
    task, run_ns = offered.task, offered.run_ns
    was = task.estimate
    solo_ns = Nanos(was.solo_ns - was.run_ns + run_ns)
    estimate = msgspec.structs.replace(was, run_ns=run_ns, solo_ns=solo_ns)
    return replace(offered, task=msgspec.structs.replace(task, estimate=estimate))


def of_one(site: Site, options: argparse.Namespace, case: tuple[str, str]) -> dict[str, Any]:
    """One workload and system."""
    workload, system = case
    missed = partial(SYSTEMS[system], site)
    at = {
        f"{rho:g}": statistics.fmean(
            missed(site.requests(workload, rho, seed, options.requests))
            for seed in range(options.seeds)
        )
        for rho in RHOS
    }
    reach = goodput(site, options, workload, missed)
    return {"workload": workload, "system": system, "missed": at, "goodput": reach}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="goodput, and what part of the bound's; share missed at ρ 0.8")
    made.add_column("workload")
    for system in SYSTEMS:
        made.add_column(system, justify="right")
    for workload in WORKLOADS:
        of = {row["system"]: row for row in rows if row["workload"] == workload}
        best = of["bound"]["goodput"]
        cells = (
            f"{of[system]['goodput']:.2f}, {of[system]['goodput'] / best:.0%}, "
            f"{of[system]['missed']['0.8']:.2%}"
            for system in SYSTEMS
        )
        made.add_row(workload, *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one seed of 300 requests, not kept")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/limits.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, 300
    site = this_machine()
    cases = [(workload, system) for workload in WORKLOADS for system in SYSTEMS]
    # Forked, as nothing here is timed and the site need not be sent.
    with ProcessPoolExecutor(site.cores, get_context("fork")) as workers:
        rows = list(workers.map(partial(of_one, site, options), cases))
    Console(width=130).print(table(rows))
    if options.quick:
        return
    result = {
        "cores": site.cores,
        "seeds": options.seeds,
        "requests": options.requests,
        "rows": rows,
    }
    write_result(options.out, result)
    Console().print(str(options.out))


if __name__ == "__main__":
    main()
