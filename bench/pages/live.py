"""Tables of whole servers under load: live and simulated, stopping, versions, peers."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.kit.page import markdown, percent
from bench.kit.result import read_result

OURS = "slack+preemptive"
FROM_MS = ("shortest", "from 3 ms", "from 10 ms")


def systems(name: str, result: Mapping[str, Any] | None = None) -> str:
    """Return a row for each system: late live with its range, simulated, at the client, by ρ."""
    means = (result or read_result(name))["means"]
    by_case = {(row["system"], row["rho"]): row for row in means}
    rhos = sorted({row["rho"] for row in means})

    def cell(row: Mapping[str, Any]) -> str:
        low, high = row["late_server_range"]
        spread = f" ({percent(low)} to {percent(high)})" if low != high else ""
        late = percent(row["late_server"])
        return f"{late}{spread}, {percent(row['simulated'])}, {percent(row['missed'])}"

    rows = [
        [" + ".join(f"`{part}`" for part in system.split("+")), *(cell(by_case[system, rho])
                                                               for rho in rhos)]
        for system in dict.fromkeys(row["system"] for row in means)
    ]  # fmt: skip
    return markdown(["system", *(f"ρ {rho:g}" for rho in rhos)], rows)


def shares() -> str:
    """Return who took the cores under our system, and lateness with a cheaper host."""
    rows = []
    for name, title in (("live", "chosen by the server"), ("live_eager", "`eager`")):
        for row in ours(name):
            used = (percent(row[f"cores_{who}"], 0) for who in ("lanes", "server", "client"))
            hosts = row["simulated_host"].values()
            rows.append([title, f"{row['rho']:g}", *used, *map(percent, hosts)])
    head = ["executors", "ρ", "lanes", "server", "client"]
    return markdown([*head, "late, host at half its cost", "late, host for free"], rows)


def ours(name: str) -> list[dict[str, Any]]:
    """Return the rows of our system."""
    return [row for row in read_result(name)["means"] if row["system"] == OURS]


def tails() -> str:
    """Return percentiles of hand-over and answer of our system, live and simulated."""
    stages = ("hand-over", "answer")
    rows = [
        [
            f"{row['rho']:g}",
            *(
                ", ".join(f"{value:.2f}" for value in row[key][stage].values())
                for stage in stages
                for key in ("tails_ms", "simulated_tails_ms")
            ),
        ]
        for row in ours("live")
    ]
    return markdown(["ρ", *(f"{s}, {how}" for s in stages for how in ("live", "simulated"))], rows)


def versions() -> str:
    """Return lateness of the first version and this one, and the rate at 1 % late."""
    content = read_result("versions")
    loads = [(row["rho"], row["rate_hz"]) for row in content["rows"] if row["version"] == "this"]
    rows = []
    for version, name in (("other", "first version"), ("this", "this one")):
        cells = [
            f"{percent(row['late_server'])}, {percent(row['missed'])}; {row['over_qt']['p99']:.2f}"
            for row in content["rows"]
            if row["version"] == version
        ]
        (limit,) = [row for row in content["limits"] if row["version"] == version]
        rows.append([name, *cells, f"{limit['rate_at_limit_hz']:.0f}"])
    heads = (f"ρ {rho:g}, {rate_hz:.0f}/s" for rho, rate_hz in loads)
    return markdown(["", *heads, "requests/s at 1 % late"], rows)


def peers(result: Mapping[str, Any] | None = None) -> str:
    """Return lateness at the client by server and load, pooled over the seeds."""
    rows = (result or read_result("peers"))["rows"]
    rhos = sorted({row["rho"] for row in rows})
    lines = [
        [
            system,
            *(
                peer_cell([row for row in rows if (row["system"], row["rho"]) == (system, rho)])
                for rho in rhos
            ),
        ]
        for system in dict.fromkeys(row["system"] for row in rows)
    ]
    head = [f"ρ {rho:g} ({', '.join(FROM_MS)})" for rho in rhos]
    return markdown(["late at the client", *head], lines)


def peer_cell(group: Sequence[Mapping[str, Any]]) -> str:
    """Return late of all seeds, range of the seeds, late by class of targets; p50, p99 ÷ target."""
    late = pooled_late(group, "late", "requests")
    each = [100 * row["late"] / row["requests"] for row in group]
    classes = [
        f"{pooled_late(same, 'late', 'requests'):.1f}"
        for same in zip(*(row["late_by_target"] for row in group), strict=True)
    ]
    p50, p99 = (statistics.fmean(row["over_target"][q] for row in group) for q in ("p50", "p99"))
    spread = f"{min(each):.1f} to {max(each):.1f}"
    return f"{late:.1f} %, {spread} ({', '.join(classes)}); {p50:.2f}, {p99:.1f}"


def pooled_late(rows: Sequence[Mapping[str, Any]], late: str, requests: str) -> float:
    """Return the percentage late over all rows."""
    total = sum(int(row[requests]) for row in rows)
    return 100 * sum(int(row[late]) for row in rows) / max(1, total)


def peers_at_half_load() -> str:
    """Return lateness at ρ 0.5 for the README: all targets, and those of 10 ms and more."""
    rows = [row for row in read_result("peers")["rows"] if row["rho"] == 0.5]
    names = [name for name in dict.fromkeys(row["system"] for row in rows) if "nothing" not in name]
    lines = []
    for title, key in (("all targets", None), ("targets of 10 ms and more", 2)):
        cells = []
        for name in names:
            group = [row for row in rows if row["system"] == name]
            chosen = group if key is None else [row["late_by_target"][key] for row in group]
            late = pooled_late(chosen, "late", "requests")
            cells.append(f"{late:.0f} %" if late >= 10 else f"{late:.1f} %")
        lines.append([title, *cells])
    return markdown(["late at half load", *(name.split(",")[0] for name in names)], lines)


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
    "live": partial(systems, "live"),
    "live eager": partial(systems, "live_eager"),
    "live shares": shares,
    "live tails": tails,
    "stopping": stopping,
    "memory safety": memory_safety,
    "versions": versions,
    "peers": peers,
    "peers at half load": peers_at_half_load,
}
