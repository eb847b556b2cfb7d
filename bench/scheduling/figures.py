"""Simulate the GNNSched paper's figures 5 to 8 for this machine: violations, latency, JCT, QUET.

    python -m bench.scheduling.figures [--quick] [--runs 10]

The paper shows its two policies and three baselines on queues of 100 tasks of GCN, SAGE and GIN,
8 layers × 256, and of all three (MIX), at a low and a high load, as means of ten runs. Here they
are simulated with run times and memory calibrated on this machine; GNNSched is `sqtf` and `bqt`
under `barrier`. Absolute numbers cannot be compared: two cores stand for a V100, graphs are scaled
down, loads are ρ 0.1 and 0.5, and running out of memory costs the baselines nothing here, where the
paper's paging slows them down.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.kit.script import Script, Table
from bench.scheduling.site import Site, missed_share, site_of
from serve.config import Config, ModelsConfig
from serve.models import zoo
from serve.models.writer import write_model

MODELS = ("gcn", "sage", "gin")
WORKLOADS = (*MODELS, "mix")
SYSTEMS = (
    "default", "mps_base", "mps_aggr", "sqtf+barrier", "bqt+barrier", "slack+preemptive",
)  # fmt: skip
LOADS = {"low": 0.1, "high": 0.5}
TASKS = 100
ARGS = {"in_channels": 32, "out_channels": 5, "hidden_channels": 256, "num_layers": 8}
FIGURES = (
    "violation_rate", "latency_over_qt_p50", "latency_over_qt_p90", "latency_over_qt_p99",
    "jct_over_qt_mean", "quet_over_qt_mean",
)  # fmt: skip
#: How much lower GNNSched is on average in the paper: figure, baseline, share.
HEADLINES = (
    ("latency_over_qt_p50", "mps_base", 0.262),
    ("latency_over_qt_p90", "mps_base", 0.274),
    ("latency_over_qt_p99", "mps_base", 0.319),
    ("jct_over_qt_mean", "default", 0.606),
    ("jct_over_qt_mean", "mps_base", 0.268),
    ("jct_over_qt_mean", "mps_aggr", 0.627),
)
#: Highest violation rates at the high load in the paper.
PAPER_WORST = {"default": 0.93, "mps_base": 0.20, "mps_aggr": 0.91, "gnnsched": 0.08}
SCRIPT = Script(
    "figures",
    full={"runs": 10},
    quick={"runs": 1},
    tables=[
        Table("By load, workload and system", "rows", {
            "load": "{load}", "workload": "{workload}", "system": "{system}",
            "violations": "{violation_rate:.1%}", "p99 ÷ target": "{latency_over_qt_p99:.2f}",
            "JCT ÷ target": "{jct_over_qt_mean:.2f}",
        }),
        Table("Lower by, on average", "headlines", {
            "figure": "{figure}", "than": "{against}", "paper": "{paper:.1%}",
            "GNNSched here": "{gnnsched:.1%}", "gnnserve here": "{gnnserve:.1%}",
        }),
    ],
)  # fmt: skip


def paper_site(folder: Path) -> Site:
    """Return this machine with the paper's models; times do not depend on their random weights."""
    torch.manual_seed(0)
    for name in MODELS:
        module = getattr(zoo, name)(**ARGS)
        write_model(folder, name, module, factory=f"serve.models.zoo:{name}", args=ARGS)
    config = Config(models=ModelsConfig(repository=str(folder), cache=str(folder / "cache")))
    return site_of(config, MODELS)


def rows(site: Site, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each load, workload and system."""
    for load, rho in LOADS.items():
        for workload in WORKLOADS:
            offers = [site.requests(workload, rho, seed, TASKS, MODELS) for seed in range(runs)]
            for system in SYSTEMS:
                reports = [site.serve(system, requests) for requests in offers]
                found = {
                    name: fmean(getattr(report, name) for report in reports) for name in FIGURES
                }
                # A refused request is no answer in time either.
                found["violation_rate"] = fmean(map(missed_share, reports))
                yield {"load": load, "rho": rho, "workload": workload, "system": system, **found}


def headlines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how far GNNSched's two policies, and gnnserve, are below the baselines on average."""
    by_case = {(row["load"], row["workload"], row["system"]): row for row in rows}

    def lower(ours: tuple[str, ...], against: str, name: str) -> float:
        return fmean(
            1 - by_case[load, workload, system][name] / by_case[load, workload, against][name]
            for load in LOADS
            for workload in WORKLOADS
            for system in ours
        )

    return [
        {
            "figure": name,
            "against": against,
            "paper": paper,
            "gnnsched": lower(("sqtf+barrier", "bqt+barrier"), against, name),
            "gnnserve": lower(("slack+preemptive",), against, name),
        }
        for name, against, paper in HEADLINES
    ]


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the highest violation rate of each system at the high load."""
    high = [row for row in rows if row["load"] == "high"]
    return {
        system: max(row["violation_rate"] for row in high if row["system"] == system)
        for system in SYSTEMS
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows and what they come to."""
    with tempfile.TemporaryDirectory() as folder:
        site = paper_site(Path(folder))
        found = list(rows(site, options.runs))
    return {
        "runs": options.runs,
        "tasks": TASKS,
        "rho": LOADS,
        "graphs": site.pool.sources,
        "headlines": headlines(found),
        "worst": worst(found),
        "paper_worst": PAPER_WORST,
        "rows": found,
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
