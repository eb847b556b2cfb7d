"""Tables of the native front: what was asked of it, and what a request costs behind each front."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from bench.kit.page import Cell, Row, filled, flat, grid, markdown
from bench.kit.result import read_result
from bench.pages.live import OURS, other_version, pooled_late

#: The load at which most is asked.
HALF = 0.5
GNNSERVE = "gnnserve"
SCRIPTS = {
    "fronts": "bench.host.fronts",
    "overhead": "bench.host.requests overhead",
    "ways": "bench.host.requests ways",
    "handover": "bench.host.handover",
    "live": "bench.live.live",
    "live_eager": "bench.live.live --executor eager",
    "peers": "bench.peers",
    "versions": "bench.live.rates --workload mix",
    "rates": "bench.live.rates",
}


@dataclass(frozen=True)
class Aim:
    """Something that was asked, and how to find it in the results."""

    measure: str
    asked: str
    #: Highest value that meets it, in the unit of the values; the least one where `at_least`.
    limit: float
    #: Text of a value.
    form: str
    #: Returns the values, all of which are asked to be within the limit.
    find: Callable[[], Sequence[float]]
    #: Result that they are from, one of `SCRIPTS`.
    result: str
    at_least: bool = False

    def row(self) -> Row:
        """Return the line of the table."""
        script = f"`{SCRIPTS[self.result]}`"
        row = {"measure": self.measure, "asked": self.asked, "script": script}
        try:
            values = list(self.find())
            row["commit"] = str(read_result(self.result).get("commit", "older"))[:7]
        except (FileNotFoundError, KeyError):
            values = []
        if not values:
            return row | {"found": "not measured yet", "met": "–", "commit": "–"}
        kept = [value >= self.limit if self.at_least else value <= self.limit for value in values]
        found = ", ".join(dict.fromkeys(filled(self.form, {"value": value}) for value in values))
        return row | {"found": found, "met": "yes" if all(kept) else "no"}


def rows_of(name: str, part: str = "rows", **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows of a result with these values."""
    rows: list[dict[str, Any]] = read_result(name)[part]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def late_by_server(name: str) -> list[float]:
    """Return the share that our system is late for at half load, by its own clock."""
    return [row["late_server"] for row in rows_of(name, "means", system=OURS, rho=HALF)]


def late_at_client() -> list[float]:
    """Return the share that is late at the client at half load."""
    return [row["missed"] for row in rows_of("live", "means", system=OURS, rho=HALF)]


def late_beside_floor() -> list[float]:
    """Return that share ÷ the share that the front alone is late for."""
    floor = [row["missed"] for row in rows_of("live", "floor", rho=HALF)]
    return [ours / least if least else float("inf") for ours in late_at_client() for least in floor]


def late_beside_peers() -> list[float]:
    """Return our share at half load, and its ratio to the best peer's."""
    found = rows_of("peers", rho=HALF)
    ours = pooled_late([row for row in found if row["system"] == GNNSERVE])
    names = {row["system"] for row in found if "nothing" not in row["system"]} - {GNNSERVE}
    best = min(pooled_late([row for row in found if row["system"] == name]) for name in names)
    return [ours / 100, ours / best]


def simulated_off() -> list[float]:
    """Return by how much the simulator is off, of each load."""
    return [abs(row["late_server"] - row["as_live"]) for row in read_result("live")["simulated"]]


def processor_us(front: str = "native") -> list[float]:
    """Return the main process's time for a request at both loads, in µs."""
    return [row["processor_us"] for row in rows_of("fronts", front=front)]


def added_ms() -> list[float]:
    """Return what a small request takes beyond its forward pass on the lane, in ms."""
    found = {row["figure"]: row["p50"] for row in rows_of("overhead", nodes=1_000)}
    return [(found["client"] - found["run"]) / 1e3]


def handover_ms() -> list[float]:
    """Return the 99th percentiles of the ways there and back at half load, in ms."""
    rows = rows_of("handover", niceness=20, rho=HALF)
    ways = ("there_us", "back_us") if rows else ()
    return [median(row[way]["p99"] for row in rows) / 1e3 for way in ways]


def megabyte_ms() -> list[float]:
    """Return what a message of 1 MB waits beyond its run, in ms."""
    return [row["added_us"]["p50"] / 1e3 for row in rows_of("ways", bytes=1_000_000, way="plain")]


def rate_in_time() -> list[float]:
    """Return the requests of the mix a second at 1 % late; 0 where no rate that was tried is."""
    return [row["rate_at_limit_hz"] or 0.0 for row in rows_of("versions", "limits", version="this")]


def closed_ratio() -> list[float]:
    """Return the best rate of small requests ÷ that of the version before."""
    best = {
        version: max(row["rate_hz"][0] for row in rows_of("rates", "closed", version=version))
        for version in ("this", "other")
    }
    return [best["this"] / best["other"]]


_PERCENT = "{value:.1%}"
AIMS = (
    Aim("main process, processor time a request, ρ 0.25 and 0.5", "≤ 520 µs",
        520, "{value:,.0f} µs", processor_us, "fronts"),
    Aim("a request of 1,000 nodes beyond its forward pass, gRPC client in Python", "≤ 0.5 ms",
        0.5, "{value:.2f} ms", added_ms, "overhead"),
    Aim("a message of 1 MB beyond its run, the same client", "≤ 1 ms",
        1.0, "{value:.2f} ms", megabyte_ms, "ways"),
    Aim("late by the server, ρ 0.5", "< 2 %",
        0.02, _PERCENT, lambda: late_by_server("live"), "live"),
    Aim("late by the server, ρ 0.5, `eager`", "< 2 %",
        0.02, _PERCENT, lambda: late_by_server("live_eager"), "live_eager"),
    Aim("late at the client, ρ 0.5", "≤ 5 %", 0.05, _PERCENT, late_at_client, "live"),
    Aim("the same ÷ that of the front alone", "≤ 2", 2, "{value:.1f}", late_beside_floor, "live"),
    Aim("simulated beside live, points apart at each load", "≤ 3",
        0.03, _PERCENT, simulated_off, "live"),
    Aim("late beside other servers, ρ 0.5", "≤ 8 %",
        0.08, _PERCENT, lambda: late_beside_peers()[:1], "peers"),
    Aim("the same ÷ that of the best other server", "≤ 0.25",
        0.25, "{value:.2f}", lambda: late_beside_peers()[1:], "peers"),
    Aim("way to a lane and back, 99th percentiles, ρ 0.5", "≤ 1 ms",
        1.0, "{value:.1f} ms", handover_ms, "handover"),
    Aim("requests of the mix a second at 1 % late", "≥ 500",
        500, "{value:,.0f}", rate_in_time, "versions", at_least=True),
    Aim("small requests a second ÷ those of the version before the native front", "≥ 4",
        4, "{value:.1f}", closed_ratio, "rates", at_least=True),
)  # fmt: skip


def aims() -> str:
    """Return what was asked and what was measured."""
    return flat([aim.row() for aim in AIMS], {
        "measure": "{measure}", "asked": "{asked}", "measured": "{found}", "met": "{met}",
        "script": "{script}", "commit": "{commit}",
    })  # fmt: skip


def fronts() -> str:
    """Return what a request costs the main process behind each front, by load."""
    rows = [
        row | {"case": f"ρ {row['rho']:g}, {'gRPC' if row['front'] == 'python' else 'native'}"}
        for row in rows_of("fronts")
    ]
    figures: dict[str, Cell] = {
        "processor time, µs": "{processor_us:,.0f}",
        "÷ gRPC's": "{ratio:.2f}",
        "hand-overs between threads": "{handovers:.1f}",
        "latency p50, ms": lambda row: f"{row['latency_us']['p50'] / 1e3:.1f}",
        "latency p99, ms": lambda row: f"{row['latency_us']['p99'] / 1e3:.1f}",
    }
    lines = [[name, *(filled(cell, row) for row in rows)] for name, cell in figures.items()]
    return markdown(["", *(row["case"] for row in rows)], lines)


def handover() -> str:
    """Return percentiles of the ways to the lane and back, medians of rounds, in ms."""
    rows = rows_of("handover")
    cases = dict.fromkeys((row["niceness"], row["rho"]) for row in rows)
    return flat(_handovers(rows, cases), {
        "lanes": "{lanes}", "ρ": "{rho:g}", "to the lane": "{there_us}",
        "to a lane, nothing else running": "{alone_us}", "back": "{back_us}",
        "lane waits for a core": "{lane_waits:.2f}",
    })  # fmt: skip


def _handovers(rows: Sequence[Row], cases: Iterable[tuple[int, float]]) -> Iterator[Row]:
    for niceness, rho in cases:
        group = [row for row in rows if (row["niceness"], row["rho"]) == (niceness, rho)]
        found: dict[str, Any] = {
            "lanes": "in the idle class" if niceness == 20 else f"of niceness {niceness}",
            "rho": rho,
            "lane_waits": median(row["lane_waits_us"] for row in group) / 1e3,
        }
        for way in ("there_us", "alone_us", "back_us"):
            each = (median(row[way][at] for row in group) / 1e3 for at in ("p50", "p90", "p99"))
            found[way] = ", ".join(f"{ms:.2f}" for ms in each)
        yield found


def small_requests() -> str:
    """Return small requests a second, by the number in flight and at 1 % late."""
    content = read_result("rates")
    names = {"other": other_version(content), "this": "this one"}
    closed = [row | {"load": f"{row['in_flight']} in flight"} for row in content["closed"]]
    limits = [row | {"load": "at 1 % late"} for row in content["limits"]]

    def cell(row: Row) -> str:
        if "rate_at_limit_hz" in row:
            return f"{row['rate_at_limit_hz']:,.0f}"
        rate, low, high = row["rate_hz"]
        return f"{rate:,.0f} ({low:,.0f} to {high:,.0f}), {row['server_us']:,.0f} µs"

    return grid([*chain(closed, limits)], ("version", names), ("load", "{}"), cell)


TABLES: dict[str, Callable[[], str]] = {
    "front aims": aims,
    "fronts": fronts,
    "handover": handover,
    "small requests": small_requests,
}
