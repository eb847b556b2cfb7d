"""Tables of simulated scheduling: policies, limits, the paper's figures, devices, overload."""

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
SHAPES = {
    "2 GPU-like": "2 of four slots",
    "8 GPU-like": "8 of four slots",
    "2 CPU-like": "2 cores, preemptive",
    "4 CPU-like": "4 cores, preemptive",
}
#: Device of ``bench.scheduling.interference``, its slowdown, and the loads that are shown.
SLOWDOWNS = {
    "strong": ("1, 1.6, 2.2, 2.9", (0.5, 0.9, 1.1)),
    "one after the other": ("1, 2, 3, 4", (0.5, 0.9)),
    "medium": ("1, 1.3, 1.5, 1.7", (0.9,)),
}
MANY_SLOWDOWNS = {"16 lanes": ("1, 1.05, 1.1, 1.15, 1.2, 1.28, … 2.08", (5.85, 7.15))}


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


def devices() -> str:
    """Return the share late by the number of devices."""
    found = read_result("devices")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in found))
    by_case = {(row["shape"], row["rho"], row["way"]): row["late"] for row in found}
    rows = [
        [name, f"{rho:g}", *(percent(by_case[shape, rho, way]) for way in ways)]
        for shape, name in SHAPES.items()
        for rho in (0.7, 0.9)
    ]
    return markdown(["devices", "ρ", *ways], rows)


def interference(shown: Mapping[str, tuple[str, tuple[float, ...]]], lanes: tuple[int, ...]) -> str:
    """Return the share late, and p99 of latency ÷ target, by lanes and with the table."""
    by_case = {
        (row["device"], row["rho"], row["system"]): row
        for row in read_result("interference")["rows"]
    }
    columns = [*(f"{count} lanes" for count in lanes), "the table"]

    def cell(device: str, rho: float, system: str) -> str:
        row = by_case[device, rho, system]
        return f"{percent(row['missed'])} ({row['latency_over_qt_p99']:.1f})"

    rows = [
        [slowdown, f"{rho:g}", *(cell(device, rho, system) for system in columns)]
        for device, (slowdown, rhos) in shown.items()
        for rho in rhos
    ]
    head = [
        "slowdown with 0, 1, 2, 3 … co-runners",
        "ρ",
        *columns[:-1],
        f"{lanes[-1]} lanes, table",
    ]
    return markdown(head, rows)


def overload() -> str:
    """Return what becomes of a flood, and of the calm after it."""

    def calm(row: Mapping[str, Any]) -> str:
        late = row["calm_late"]
        return f"{percent(late)}, {row['recovery_ms']:.0f} ms" if late else "none"

    rows = [
        [
            f"{row['rho']:g}",
            str(row["shed_late"]).lower(),
            *(percent(row[name], 0) for name in ("admitted", "attainment", "in_time")),
            f"{row['goodput']:.2f}",
            calm(row),
        ]
        for row in read_result("overload")["rows"]
    ]
    head = ["ρ", "`shed_late`", "admitted", "in time, of admitted", "in time, of all"]
    return markdown([*head, "useful work per core", "late in the calm phase"], rows)


def closed_loop() -> str:
    """Return what becomes of clients that wait for each answer."""
    by_case = {(row["clients"], row["shed_late"]): row for row in read_result("overload")["closed"]}

    def cell(row: Mapping[str, Any]) -> str:
        return f"{percent(row['in_time'], 0)}, {row['answered_per_s']:.0f}"

    rows = [
        [
            str(clients),
            *(cell(by_case[clients, shed]) for shed in (False, True)),
            percent(by_case[clients, True]["refused"], 0),
        ]
        for clients in dict.fromkeys(clients for clients, _ in by_case)
        if clients > 2
    ]
    return markdown(["concurrent clients", "default", "with `shed_late`", "refused"], rows)


def stopping() -> str:
    """Return how soon lanes are free, the slowest model's median and the slowest run."""
    rows = []
    for nodes in dict.fromkeys(row["nodes"] for row in read_result("stopping")["rows"]):
        found = [row for row in read_result("stopping")["rows"] if row["nodes"] == nodes]
        middle = [row["p50_us"] / 1e3 for row in found]
        slowest = f"{max(row['p99_us'] for row in found) / 1e3:.0f} ms"
        rows.append([f"{nodes:,}", f"{min(middle):.1f} to {max(middle):.1f} ms", slowest])
    return markdown(["nodes", "median, by model", "slowest"], rows)


def memory_safety() -> str:
    """Return what the memory checks prevent."""
    names = {"checked": "by reservation", "mps_aggr": "whenever a lane is free (`mps_aggr`)"}
    rows = [
        [
            names[row["mode"]],
            f"{row['peak_share']:.2f}",
            str(row["killed_lanes"]),
            f"{row['ended']['OK']} of {sum(row['ended'].values())}",
            f"{row['took_s']:.0f} s",
        ]
        for row in read_result("memory_safety")["rows"]
    ]
    head = ["launching", "most memory ÷ device", "lanes killed", "answered", "took"]
    return markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "policies": partial(systems, SYSTEMS, "mix"),
    "windows": partial(systems, WINDOWS, "window"),
    "limits": limits,
    "paper": paper,
    "decisions": decisions,
    "devices": devices,
    "interference": partial(interference, SLOWDOWNS, (2, 3, 4)),
    "interference, many lanes": partial(interference, MANY_SLOWDOWNS, (8, 12, 16)),
    "overload": overload,
    "closed loop": closed_loop,
    "stopping": stopping,
    "memory safety": memory_safety,
}
