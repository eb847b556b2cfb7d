"""Compare policies, disciplines, baselines and the bound over the load, simulated.

    python -m bench.scheduling.policies [--quick] [--seeds 3] [--requests 1000]

The scheduler that serves runs on a virtual clock (``serve.sim``), with the run times calibrated on
this machine for the models of configs/dev.toml. 100 tasks a list, Poisson arrivals, ρ = rate × mean
solo time ÷ cores, targets of 2 × solo time; all systems see the same requests at the same times.
A request is missed when it is late or refused. The bound (``bench.scheduling.bound``) holds for
systems that do not merge.
"""

import argparse
from typing import Any

from bench.kit.script import Script, Table
from bench.scheduling.bound import unavoidable_violations
from bench.scheduling.site import (
    APART,
    MERGING,
    OURS,
    WINDOWS,
    Site,
    compared,
    missed_share,
)
from serve.sim.device import Offered
from serve.workload import WORKLOADS

BOUND = "bound"
#: On every workload; further variants of ours on the mix alone.
SYSTEMS = (
    BOUND, OURS, f"{OURS}, 2 lanes a core", f"{OURS}, 8 lanes a core", f"{OURS}, {MERGING}",
    f"{OURS}, {APART}", "sqtf+preemptive", "bqt+preemptive", "slack+rolling", "bqt+barrier",
    "mps_base", "default",
)  # fmt: skip
RHOS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
SCRIPT = Script(
    "policies",
    full={"seeds": 3, "requests": 1000, "workloads": WORKLOADS, "rhos": RHOS, "steps": 8},
    quick={"seeds": 1, "requests": 300, "workloads": ("mix",), "rhos": (0.1, 0.5), "steps": 3},
    tables=[
        Table("Share late or refused, and goodput", "rows", {
            "workload": "{workload}", "system": "{system}",
            "ρ 0.1": "{missed[0.1]:.1%}", "0.5": "{missed[0.5]:.1%}", "0.9": "{missed[0.9]:.1%}",
            "goodput": "{goodput:.2f}",
        })
    ],
)  # fmt: skip


def missed(site: Site, system: str, requests: list[Offered]) -> float:
    """Return the share missed; for the bound, the least that anybody must miss."""
    if system == BOUND:
        return unavoidable_violations(requests, site.cores) / len(requests)
    return missed_share(site.serve(system, requests))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each workload and system."""
    cases = [(workload, system) for workload in options.workloads for system in SYSTEMS]
    cases += [("mix", f"{OURS}, {window}") for window in WINDOWS]
    return compared(missed, cases, options.rhos, options)


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
