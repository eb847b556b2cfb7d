"""Tables of whole servers under load: systems, memory safety, versions, peers."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from bench.kit.measure import median_interval
from bench.kit.page import Row, flat, grid
from bench.kit.result import read_result

OURS = "slack+preemptive"
#: The native front with nothing behind it.
FLOOR = "nothing runs"
FROM_MS = ("shortest", "from 3 ms", "from 10 ms")


def systems(name: str) -> str:
    """Return late live with its range, and late at the client, by system and ρ."""
    rows = [
        row | {"title": " + ".join(f"`{part}`" for part in row["system"].split("+"))}
        for row in read_result(name)["means"]
    ]
    rows += [row | {"title": FLOOR} for row in read_result(name).get("floor", [])]

    def cell(row: Row) -> str:
        if row["title"] == FLOOR:
            return f"–, {row['missed']:.1%}"
        low, high = row["late_server_range"]
        spread = f" ({low:.1%} to {high:.1%})" if low != high else ""
        return f"{row['late_server']:.1%}{spread}, {row['missed']:.1%}"

    return grid(rows, ("title", "{}"), ("rho", "ρ {:g}"), cell, "system")


def ours(name: str) -> list[dict[str, Any]]:
    """Return the rows of our system."""
    return [row for row in read_result(name)["means"] if row["system"] == OURS]


def shares() -> str:
    """Return who took the cores under our system."""
    titles = {"live": "chosen by the server", "live_eager": "`eager`"}
    rows = [row | {"title": title} for name, title in titles.items() for row in ours(name)]
    who = {name: f"{{cores_{name}:.0%}}" for name in ("lanes", "server", "client")}
    return flat(rows, {"executors": "{title}", "ρ": "{rho:g}", **who})


def waits() -> str:
    """Return percentiles of hand-over and answer of our system."""
    percents = ("p50", "p90", "p99")
    cells = {
        stage: ", ".join(f"{{tails_ms[{stage}][{percent}]:.2f}}" for percent in percents)
        for stage in ("hand-over", "answer")
    }
    return flat(ours("live"), {"ρ": "{rho:g}", **cells})


def simulated() -> str:
    """Return what our system was late for live, and again in the simulator."""
    return flat(read_result("live").get("simulated", []), {
        "ρ": "{rho:g}", "live": "{late_server:.1%}",
        "simulated with what each took": "{as_live:.1%}",
        "simulated without a host": "{no_host:.1%}",
    })  # fmt: skip


def main_process() -> str:
    """Return the main process's processor time of a request, and that of the front alone."""
    content = read_result("live")
    rows = [row | {"who": "the whole server"} for row in ours("live")]
    rows += [row | {"who": "the front, which runs nothing"} for row in content.get("floor", [])]
    return grid(rows, ("who", "{}"), ("rho", "ρ {:g}"), "{server_us:,.0f}", "µs a request")


def training() -> str:
    """Return what jobs cost requests, and what they get, by rule of slack and ρ."""
    titles = {"none": "no jobs"}
    rows = [row | {"title": titles.get(row["slack"], f"`{row['slack']}`")}
            for row in read_result("training")["means"]]  # fmt: skip

    def cell(row: Row) -> str:
        low, high = row["late_server_range"]
        told = (
            f"{row['late_server']:.1%} ({low:.1%} to {high:.1%}), {row['handover_p99_ms']:.1f} ms"
        )
        return told if row["slack"] == "none" else f"{told}, {row['used']:.0%}"

    return grid(rows, ("title", "{}"), ("rho", "ρ {:g}"), cell, "jobs")


def training_parts() -> str:
    """Return the mean of each part of a request's time, without and with jobs."""
    return grid(
        [row | {"jobs": f"`{row['slack']}`, ρ {row['rho']:g}"}
         for row in read_result("training")["accounting"]],
        ("jobs", "{}"), ("part", "{}"), "{without_ms:.2f}, {with_ms:.2f}", "ms",
    )  # fmt: skip


def training_late() -> str:
    """Return what jobs change of the late share, by turns, and what became late or ceased to be."""
    content = read_result("training")
    rows = [row | {"points": _points(content["rows"], row["slack"], row["rho"])}
            for row in content["accounting"] if row["part"] == "run"]  # fmt: skip
    return flat(rows, {
        "jobs": "`{slack}`, ρ {rho:g}", "more late, points": "{points}",
        "late only with jobs": "{late_only_with}", "late only without": "{late_only_without}",
    })  # fmt: skip


def _points(rows: Sequence[Row], slack: str, rho: float) -> str:
    """Return the median over the turns of how much larger the late share is with jobs."""
    late = {(row["seed"], row["turn"], row["jobs"]): 100 * row["late_server"]
            for row in rows if (row["slack"], row["rho"]) == (slack, rho)}  # fmt: skip
    more = [late[seed, turn, True] - late[seed, turn, False] for seed, turn, jobs in late if jobs]
    middle, low, high = median_interval(more)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def versions() -> str:
    """Return lateness of an older version and this one, and the rate at 1 % late."""
    content = read_result("versions")
    rows = [row | {"load": f"ρ {row['rho']:g}, {row['rate_hz']:.0f}/s"} for row in content["rows"]]
    rows += [row | {"load": "requests/s at 1 % late"} for row in content["limits"]]

    def cell(row: Row) -> str:
        if "rate_at_limit_hz" in row:
            return f"{row['rate_at_limit_hz']:.0f}"
        late = f"{row['late_server']:.1%}, {row['missed']:.1%}"
        return f"{late}; {row['over_qt']['p99']:.2f}; {server_us(row):,.0f}"

    names = {"other": other_version(content), "this": "this one"}
    return grid(rows, ("version", names), ("load", "{}"), cell)


def other_version(content: Mapping[str, Any]) -> str:
    """Return what version a result of ``bench.live.rates`` compares with."""
    before = "before-front" in content.get("command", "")
    return "before the native front" if before else "first version"


def server_us(row: Row) -> float:
    """Return the main process's processor time of a request, on the two cores of the result."""
    return float(2e6 * row["cores_server"] / row["rate_hz"])


def peers(result: Mapping[str, Any] | None = None) -> str:
    """Return lateness at the client by server and load, pooled over the seeds."""
    rows = (result or read_result("peers"))["rows"]
    pooled = [
        {"system": system, "rho": rho, "group": _group(rows, system, rho)}
        for system, rho in dict.fromkeys((row["system"], row["rho"]) for row in rows)
    ]
    heads = f"ρ {{:g}} ({', '.join(FROM_MS)})"
    cell: Callable[[Row], str] = lambda row: peer_cell(row["group"])  # noqa: E731
    return grid(pooled, ("system", "{}"), ("rho", heads), cell, "late at the client")


def _group(rows: Sequence[Row], system: str, rho: float) -> list[Row]:
    return [row for row in rows if (row["system"], row["rho"]) == (system, rho)]


def peer_cell(group: Sequence[Row]) -> str:
    """Return late of all seeds, range of the seeds, late by class of targets; p50, p99 ÷ target."""
    each = [100 * row["late"] / row["requests"] for row in group]
    classes = [
        f"{pooled_late(same):.1f}"
        for same in zip(*(row["late_by_target"] for row in group), strict=True)
    ]
    p50, p99 = (fmean(row["over_target"][q] for row in group) for q in ("p50", "p99"))
    spread = f"{min(each):.1f} to {max(each):.1f}"
    return f"{pooled_late(group):.1f} %, {spread} ({', '.join(classes)}); {p50:.2f}, {p99:.1f}"


def pooled_late(rows: Sequence[Row]) -> float:
    """Return the percentage late over all rows."""
    total = sum(int(row["requests"]) for row in rows)
    return 100 * sum(int(row["late"]) for row in rows) / max(1, total)


def peers_at_half_load() -> str:
    """Return lateness at ρ 0.5 for the README: all targets, and those of 10 ms and more."""
    found = read_result("peers")["rows"]
    names = [
        name for name in dict.fromkeys(row["system"] for row in found) if "nothing" not in name
    ]
    titles = {name: name.split(",")[0] for name in names}
    rows = []
    for name in names:
        group = _group(found, name, 0.5)
        large = [row["late_by_target"][2] for row in group]
        for what, these in (("all targets", group), ("targets of 10 ms and more", large)):
            late = pooled_late(these)
            text = f"{late:.0f} %" if late >= 10 else f"{late:.1f} %"
            rows.append({"system": name, "targets": what, "text": text})
    return grid(rows, ("targets", "{}"), ("system", titles), "{text}", "late at half load")


def memory_safety() -> str:
    """Return what the memory checks prevent."""
    names = {"checked": "by reservation", "mps_aggr": "whenever a lane is free (`mps_aggr`)"}
    return flat(read_result("memory_safety")["rows"], {
        "launching": lambda row: names[row["mode"]],
        "most memory ÷ device": "{peak_share:.2f}",
        "lanes killed": "{killed_lanes}",
        "answered": lambda row: f"{row['ended']['OK']} of {sum(row['ended'].values())}",
        "took": "{took_s:.0f} s",
    })  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "live": lambda: systems("live"),
    "live eager": lambda: systems("live_eager"),
    "live shares": shares,
    "live waits": waits,
    "live simulated": simulated,
    "live main process": main_process,
    "training beside requests": training,
    "parts of a request beside training": training_parts,
    "late beside training": training_late,
    "memory safety": memory_safety,
    "versions": versions,
    "peers": peers,
    "peers at half load": peers_at_half_load,
}
