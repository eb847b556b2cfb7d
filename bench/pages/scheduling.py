"""Tables of simulated scheduling: policies, limits, the paper's figures."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.kit.page import markdown, percent
from bench.kit.result import read_result

RHOS = ("0.1", "0.3", "0.5", "0.7", "0.9", "1.1", "1.5")
OURS = "slack+preemptive"
#: System of ``bench.scheduling.policies`` and its name in the page.
SYSTEMS = {
    "bound": "lower bound",
    OURS: "`slack` + `preemptive`, 4 lanes a core (default)",
    f"{OURS}, 8 lanes a core": "the same, 8 lanes a core",
    f"{OURS}, 2 lanes a core": "the same, 2 lanes a core",
    f"{OURS}, merging": "the same, 4 lanes, merging",
    f"{OURS}, a device for each core": "the same, 4 lanes, a device for each core",
    "sqtf+preemptive": "`sqtf` + `preemptive`",
    "bqt+preemptive": "`bqt` + `preemptive`",
    "mps_base": "`mps_base`",
    "slack+rolling": "`slack` + `rolling`",
    "bqt+barrier": "`bqt` + `barrier`",
    "default": "`default`",
}
WINDOWS = {
    OURS: "adaptive",
    **{f"{OURS}, windows of {ms} ms": f"fixed, {ms} ms" for ms in ("0.5", 1, 2, 5, 10, 20)},
}
#: System of ``bench.scheduling.limits`` and its name in the page.
LIMITS = {
    "as it is": "`slack` + `preemptive`",
    "told whom to give up": "the same, told whom to give up",
    "run times known": "told true run times",
    "run times known, suspending free": "told true run times, suspending for free",
    "bound": "lower bound",
}
FIGURES = {
    "latency_over_qt_p50": "median latency",
    "latency_over_qt_p90": "90th percentile of latency",
    "latency_over_qt_p99": "99th percentile of latency",
    "jct_over_qt_mean": "mean JCT",
}


def systems(names: Mapping[str, str], head: str) -> str:
    """Return the share missed on the mix by ρ, and goodput."""
    by_system = {row["system"]: row for row in read_result("policies")["rows"]
                 if row["workload"] == "mix"}  # fmt: skip
    rows = [
        [
            name,
            *(percent(by_system[system]["missed"][rho]) for rho in RHOS),
            f"{by_system[system]['goodput']:.2f}",
        ]
        for system, name in names.items()
    ]
    return markdown([head, f"ρ {RHOS[0]}", *RHOS[1:], "goodput"], rows)


def limits(result: Mapping[str, Any] | None = None) -> str:
    """Return goodput, its share of the bound's, and the share missed at ρ 0.8, by workload."""
    rows = (result or read_result("limits"))["rows"]
    by_case = {(row["system"], row["workload"]): row for row in rows}
    workloads = list(dict.fromkeys(row["workload"] for row in rows))

    def cell(system: str, workload: str) -> str:
        row, best = by_case[system, workload], by_case["bound", workload]["goodput"]
        part = "" if system == "bound" else f" ({percent(row['goodput'] / best, 0)})"
        return f"{row['goodput']:.2f}{part}, {percent(row['missed']['0.8'])}"

    lines = [[name, *(cell(system, w) for w in workloads)] for system, name in LIMITS.items()]
    return markdown(["", *workloads], lines)


def paper() -> str:
    """Return how much lower the paper's figures are than its baselines'."""
    baselines = {"mps_base": "MPS-Base", "mps_aggr": "MPS-Aggr", "default": "Default"}

    def lower(share: float) -> str:
        return percent(share) if share > 0 else f"{1 - share:.1f} times as high"

    rows = [
        [
            FIGURES[row["figure"]],
            baselines[row["against"]],
            *(lower(row[name]) for name in ("paper", "gnnsched", "gnnserve")),
        ]
        for row in read_result("figures")["headlines"]
    ]
    head = ["lower by, on average", "than", "paper", "GNNSched here", "`slack` + `preemptive` here"]
    return markdown(head, rows)


def decisions() -> str:
    """Return what a decision costs by discipline and length of the queue."""
    found = [row for row in read_result("decisions")["rows"] if row["policy"] == "slack"]
    pending = list(dict.fromkeys(row["pending"] for row in found))
    rows = [
        [
            f"`{discipline}`",
            *(
                f"{row['mean_us']:.0f} µs, {row['p99_us']:.0f} µs"
                for row in found
                if row["discipline"] == discipline
            ),
        ]
        for discipline in dict.fromkeys(row["discipline"] for row in found)
    ]
    return markdown(["`slack` with", *(f"{count:,} pending" for count in pending)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "policies": partial(systems, SYSTEMS, "mix"),
    "windows": partial(systems, WINDOWS, "window"),
    "limits": limits,
    "paper": paper,
    "decisions": decisions,
}
