"""Tables of simulated scheduling: policies, limits, decisions."""

from collections.abc import Callable, Mapping

from bench.kit.page import Row, flat, grid
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


def systems(names: Mapping[str, str], head: str) -> str:
    """Return the share missed on the mix by ρ, and goodput."""
    rows = {row["system"]: row for row in read_result("policies")["rows"]
            if row["workload"] == "mix"}  # fmt: skip
    columns = {f"ρ {rho}": f"{{missed[{rho}]:.1%}}" for rho in RHOS}
    named = [rows[system] | {"name": name} for system, name in names.items()]
    return flat(named, {head: "{name}", **columns, "goodput": "{goodput:.2f}"})


def limits() -> str:
    """Return goodput, its share of the bound's, and the share missed at ρ 0.8, by workload."""
    rows = read_result("limits")["rows"]
    best = {row["workload"]: row["goodput"] for row in rows if row["system"] == "bound"}

    def cell(row: Row) -> str:
        share = f" ({row['goodput'] / best[row['workload']]:.0%})" * (row["system"] != "bound")
        return f"{row['goodput']:.2f}{share}, {row['missed']['0.8']:.1%}"

    return grid(rows, ("system", LIMITS), ("workload", "{}"), cell)


def decisions() -> str:
    """Return what a decision costs by discipline and length of the queue."""
    rows = [row for row in read_result("decisions")["rows"] if row["policy"] == "slack"]
    cell = "{mean_us:.0f} µs, {p99_us:.0f} µs"
    return grid(rows, ("discipline", "`{}`"), ("pending", "{:,} pending"), cell, "`slack` with")


TABLES: dict[str, Callable[[], str]] = {
    "policies": lambda: systems(SYSTEMS, "mix"),
    "windows": lambda: systems(WINDOWS, "window"),
    "limits": limits,
    "decisions": decisions,
}
