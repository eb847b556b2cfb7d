"""Find what keeps the scheduler from the bound: what it cannot know, or what suspending costs.

    python -m bench.scheduling.limits [--quick] [--seeds 12] [--requests 1000]

Simulated as in ``bench.scheduling.policies``. Beside the server's scheduler stand three that could
not be built, on the same requests and targets. The first is told whom to give up: the requests that
the bound's solution does not keep on time. The second is told the true run time of each request
when it arrives. The third is told these as well, and suspends and resumes for nothing. The bound
pays for launches and not for suspending; so do the others.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from bench.kit.script import Script, Table
from bench.scheduling.bound import most_on_time, unavoidable_violations
from bench.scheduling.site import Site, compared, missed_share
from serve.core.policies import register_policy
from serve.core.policies.slack import Slack
from serve.core.state.ordered import Key
from serve.core.types import ZERO_NS, Nanos, Task, TaskId
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import simulate
from serve.sim.workload import make_system
from serve.workload import WORKLOADS

SCRIPT = Script(
    "limits",
    full={"seeds": 12, "requests": 1000, "workloads": WORKLOADS, "steps": 8},
    quick={"seeds": 1, "requests": 200, "workloads": ("mix",), "steps": 2},
    tables=[
        Table("Goodput; share missed at ρ 0.8", "rows", {
            "workload": "{workload}", "system": "{system}", "goodput": "{goodput:.2f}",
            "missed": "{missed[0.8]:.2%}",
        })
    ],
)  # fmt: skip


@register_policy
class Told(Slack):
    """`slack` that is told whom to keep on time; the others count as late from the start."""

    name = "slack, told whom to give up"
    kept: frozenset[TaskId] = frozenset()

    def rank(self, task: Task, left_ns: Nanos, now_ns: Nanos) -> Key:
        """Return `slack`'s rank for tasks that are kept, and a late one for the others."""
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
    """Return the share missed by the server's scheduler."""
    made = make_system(policy, "preemptive", cores=site.cores, budget_bytes=site.budget_bytes)
    return missed_share(simulate(requests, made.params, device or made.device))


def told(site: Site, requests: Sequence[Offered]) -> float:
    """Return the share missed when told whom to give up."""
    Told.kept = most_on_time(requests, site.cores)
    return ours(site, requests, policy=Told.name)


def knowing(site: Site, requests: Sequence[Offered]) -> float:
    """Return the share missed when told true run times."""
    return ours(site, [known(offered) for offered in requests])


def knowing_free(site: Site, requests: Sequence[Offered]) -> float:
    """Return the share missed when told true run times, with suspending for free."""
    device = DeviceModel(switch_ns=ZERO_NS, launch_ns=DeviceModel().switch_ns)
    return ours(site, [known(offered) for offered in requests], device)


def bound(site: Site, requests: Sequence[Offered]) -> float:
    """Return the share that anybody must miss."""
    return unavoidable_violations(requests, site.cores) / len(requests)


SYSTEMS: dict[str, Callable[[Site, Sequence[Offered]], float]] = {
    "as it is": ours,
    "told whom to give up": told,
    "run times known": knowing,
    "run times known, suspending free": knowing_free,
    "bound": bound,
}


def known(offered: Offered) -> Offered:
    """Return the request with its true run time as the estimate; its target stays."""
    task, run_ns = offered.task, offered.run_ns
    was = task.estimate
    solo_ns = Nanos(was.solo_ns - was.run_ns + run_ns)
    estimate = msgspec.structs.replace(was, run_ns=run_ns, solo_ns=solo_ns)
    return replace(offered, task=msgspec.structs.replace(task, estimate=estimate))


def missed(site: Site, system: str, requests: Sequence[Offered]) -> float:
    """Return the share missed by the system."""
    return SYSTEMS[system](site, requests)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each workload and system."""
    cases = [(workload, system) for workload in options.workloads for system in SYSTEMS]
    return compared(missed, cases, (0.7, 0.8, 0.9), options)


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
