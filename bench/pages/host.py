"""Tables of what the server costs beside the model."""

from collections.abc import Callable, Mapping
from typing import Any

from bench.kit.page import markdown, percent
from bench.kit.result import read_result


def size(count: int) -> str:
    """Return a size as text, e.g. `10 KB`."""
    return f"{count // 1000:,} KB" if count < 1_000_000 else f"{count // 1_000_000:,} MB"


def overhead() -> str:
    """Return medians in µs by the number of nodes."""
    names = {
        "client": "through the server, at the client",
        "run": "of which the forward pass",
        "direct": "stock PyG called directly, one thread",
        "echo": "a bare gRPC echo of the same bytes",
    }
    found = {(row["figure"], row["nodes"]): row["p50"] for row in read_result("overhead")["rows"]}
    nodes = list(dict.fromkeys(count for _, count in found))
    rows = [
        [name, *(f"{found[figure, count]:,.0f}" for count in nodes)]
        for figure, name in names.items()
    ]
    return markdown(["", *(f"{count:,} nodes" for count in nodes)], rows)


def transport() -> str:
    """Return what each way adds, and its ratio to the echo with quartiles."""
    found = read_result("transport")["rows"]

    def cell(row: Mapping[str, Any]) -> str:
        text = f"{row['added_us']['p50'] / 1e3:.3g} ms"
        if row["way"] != "echo":
            over = row["over_echo"]
            text += f", {over['p50']:.2f} ({over['p25']:.2f} to {over['p75']:.2f})"
        return text + (f", {row['megabytes_per_s']:,.0f} MB/s" if row["bytes"] > 2e6 else "")

    ways = {"echo": "echo", "plain": "plain gRPC", "shared": "shared memory", "ids": "node ids"}
    by_case = {(row["bytes"], row["way"]): row for row in found}
    rows = [
        [size(count), *(cell(by_case[count, way]) for way in ways)]
        for count in dict.fromkeys(row["bytes"] for row in found)
    ]
    return markdown(["request", *ways.values()], rows)


def request_cost() -> str:
    """Return processor time of server + client, beyond the echo's in brackets."""
    by_case = {(row["bytes"], row["way"]): row for row in read_result("request_cost")["rows"]}

    def cell(row: Mapping[str, Any]) -> str:
        text = f"{row['server_us']:,.0f} + {row['client_us']:,.0f}"
        if row["way"] == "echo":
            return text
        least, most = row["beyond_least_us"], row["beyond_most_us"]
        return f"{text} ({row['beyond_us']:,.0f}, {least:,.0f} to {most:,.0f})"

    ways = {"echo": "bare echo", "ours plain": "in the message", "ours shared": "shared memory",
            "ours ids": "node ids"}  # fmt: skip
    rows = [
        [size(count), *(cell(by_case[count, way]) for way in ways)]
        for count in dict.fromkeys(count for count, _ in by_case)
    ]
    return markdown(["request", *ways.values()], rows)


def prepare() -> str:
    """Return whether preparing is hidden, by the requests in flight."""
    rows = [
        [
            str(row["in_flight"]),
            f"{row['prepare_us']['p50']:.0f}, {row['prepare_us']['p99']:.0f} µs",
            *(percent(row[name]) for name in ("hidden", "delayed", "cost")),
        ]
        for row in read_result("prepare")["rows"]
    ]
    head = ["requests in flight", "prepare, p50 and p99", "hidden"]
    return markdown([*head, "launches that a lane waited for", "share of lane time"], rows)


def echo() -> str:
    """Return p50 and p99 of a call by kind of server."""
    found = read_result("echo")["rows"]
    kinds = {"threads": "`grpc.server`, threads", "asyncio": "`grpc.aio`"}
    by_case = {(row["bytes"], row["kind"]): row for row in found}

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['p50'] / 1e3:.2f}, {row['p99'] / 1e3:.2f} ms"

    rows = [
        [size(count), *(cell(by_case[count, kind]) for kind in kinds)]
        for count in dict.fromkeys(row["bytes"] for row in found)
    ]
    return markdown(["request", *kinds.values()], rows)


TABLES: dict[str, Callable[[], str]] = {
    "overhead": overhead,
    "transport": transport,
    "request cost": request_cost,
    "prepare": prepare,
    "echo": echo,
}
