"""The paper's Figures 5 to 8 for this machine: violations, latency, JCT and QUET.

    python -m bench.scheduling.figures [--quick] [--out FILE] [--picture FILE]

GNNSched shows its two policies and three baselines on queues of 100 tasks of GCN, SAGE and
GIN, 8 layers × 256, and of all three (MIX), at a low and a high load, means of ten runs. The same
here, simulated (``serve.sim``) with the run times and memory calibrated on this machine for those
models: GNNSched is `sqtf` and `bqt` under `barrier`, beside it what this project adds.

What differs, so that absolute numbers cannot be compared: two cores instead of a V100, so four
tasks at once share two cores; graphs scaled down (``serve.workload.PoolSpec``); loads are ρ 0.1 and
0.5, as the paper's batches of one and two tasks say nothing of the time between them; and running
out of memory costs the baselines nothing here, where the paper's paging slows them down.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from bench.scheduling.figures_picture import picture
from bench.scheduling.policies import Site, missed_share, site_of
from serve.config import Config, ModelsConfig
from serve.models import zoo
from serve.models.writer import write_model

MODELS = ("gcn", "sage", "gin")
WORKLOADS = (*MODELS, "mix")
SYSTEMS = {
    "default": "Default",
    "mps_base": "MPS-Base",
    "mps_aggr": "MPS-Aggr",
    "sqtf+barrier": "GNNSched-SQTF",
    "bqt+barrier": "GNNSched-BQT",
    "slack+preemptive": "gnnserve",
}
LOADS = {"low": 0.1, "high": 0.5}
RUNS, TASKS = 10, 100
ARGS = {"in_channels": 32, "out_channels": 5, "hidden_channels": 256, "num_layers": 8}
FIGURES = {
    "violation_rate": "Figure 5",
    "latency_over_qt_p50": "Figure 6, median",
    "latency_over_qt_p90": "Figure 6, 90 %",
    "latency_over_qt_p99": "Figure 6, 99 %",
    "jct_over_qt_mean": "Figure 7",
    "quet_over_qt_mean": "Figure 8",
}
#: What the paper says GNNSched lowers, on average: (figure, against, by).
HEADLINES = (
    ("latency_over_qt_p50", "mps_base", 0.262),
    ("latency_over_qt_p90", "mps_base", 0.274),
    ("latency_over_qt_p99", "mps_base", 0.319),
    ("jct_over_qt_mean", "default", 0.606),
    ("jct_over_qt_mean", "mps_base", 0.268),
    ("jct_over_qt_mean", "mps_aggr", 0.627),
)
#: Highest violation rates at the high load in the paper; "always below" for MPS-Base.
PAPER_WORST = {"default": 0.93, "mps_base": 0.20, "mps_aggr": 0.91, "gnnsched": 0.08}


def paper_site(folder: Path) -> Site:
    """This machine with the paper's models, random weights: times do not depend on them."""
    for name in MODELS:
        module = getattr(zoo, name)(**ARGS)
        write_model(folder, name, module, factory=f"serve.models.zoo:{name}", args=ARGS)
    config = Config(models=ModelsConfig(repository=str(folder), cache=str(folder / "cache")))
    return site_of(config, MODELS)


def measure(site: Site, runs: int) -> Iterator[dict[str, Any]]:
    for load, rho in LOADS.items():
        for workload in WORKLOADS:
            offers = [site.requests(workload, rho, seed, TASKS, MODELS) for seed in range(runs)]
            for system in SYSTEMS:
                reports = [site.serve(system, requests) for requests in offers]
                found = {
                    name: statistics.fmean(getattr(report, name) for report in reports)
                    for name in FIGURES
                }
                # A refused request is no answer in time either.
                found["violation_rate"] = statistics.fmean(map(missed_share, reports))
                yield {"load": load, "rho": rho, "workload": workload, "system": system, **found}


def headlines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By how much GNNSched's two policies, and gnnserve, are below the baselines, on average."""
    values = {
        (row["load"], row["workload"], row["system"], name): row[name]
        for row in rows
        for name in FIGURES
    }

    def lower(ours: tuple[str, ...], against: str, name: str) -> float:
        return statistics.fmean(
            1 - values[load, workload, system, name] / values[load, workload, against, name]
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
    """Highest violation rate of each system at the high load."""
    return {
        system: max(
            row["violation_rate"]
            for row in rows
            if row["load"] == "high" and row["system"] == system
        )
        for system in SYSTEMS
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=120)
    for load, rho in LOADS.items():
        for name in ("violation_rate", "latency_over_qt_p99", "jct_over_qt_mean"):
            table = Table(
                "", *SYSTEMS.values(), title=f"{FIGURES[name]} ({name}), {load} load, ρ {rho:g}"
            )
            for workload in WORKLOADS:
                cells = (
                    f"{row[name]:.1%}" if name == "violation_rate" else f"{row[name]:.2f}"
                    for row in result["rows"]
                    if (row["load"], row["workload"]) == (load, workload)
                )
                table.add_row(workload, *cells)
            console.print(table)
    table = Table("lower by, on average", "than", "paper", "GNNSched here", "gnnserve here")
    for line in result["headlines"]:
        shares = (f"{line[name]:.1%}" for name in ("paper", "gnnsched", "gnnserve"))
        table.add_row(FIGURES[line["figure"]], SYSTEMS[line["against"]], *shares)
    console.print(table)
    console.print({"worst at the high load": result["worst"], "paper": PAPER_WORST})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two runs, nothing written")
    parser.add_argument("--out", type=Path, default=Path("bench/results/figures.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/paper.svg"))
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        site = paper_site(Path(folder))
    rows = list(measure(site, 2 if options.quick else RUNS))
    shapes = ((100, 500), (1_000, 8_000), (8_000, 80_000))
    result = {
        "runs": 2 if options.quick else RUNS,
        "tasks": TASKS,
        "rho": LOADS,
        "graphs": site.pool.sources,
        "solo_ms": {m: [site.estimate(m, n, e).solo_ns / 1e6 for n, e in shapes] for m in MODELS},
        "solo_ms_of": [list(shape) for shape in shapes],
        "headlines": headlines(rows),
        "worst": worst(rows),
        "paper_worst": PAPER_WORST,
        "rows": rows,
    }
    show(result)
    if not options.quick:
        write_result(options.out, result)
        options.picture.write_text(picture(result, SYSTEMS), encoding="utf-8")


if __name__ == "__main__":
    main()
