"""Tables of what the server costs beside the model."""

from collections.abc import Callable, Sequence

from bench.kit.page import Row, flat, grid
from bench.kit.result import read_result


def _every(minutes: int, looks: Sequence[Row]) -> list[Row]:
    """Return the first look in each span of so many minutes, and the last look."""
    firsts = {int(look["minutes"] // minutes): look for look in reversed(looks)}
    return [*reversed(firsts.values()), looks[-1]]


def _transport(row: Row) -> str:
    text = f"{row['added_us']['p50'] / 1e3:.3g} ms"
    if row["way"] != "echo":
        text += ", {p50:.2f} ({p25:.2f} to {p75:.2f})".format(**row["over_echo"])
    return text + (f", {row['megabytes_per_s']:,.0f} MB/s" if row["bytes"] > 2e6 else "")


def _cost(row: Row) -> str:
    text = f"{row['server_us']:,.0f} + {row['client_us']:,.0f}"
    if row["way"] == "echo":
        return text
    beyond = (f"{row[name]:,.0f}" for name in ("beyond_us", "beyond_least_us", "beyond_most_us"))
    return text + " ({}, {} to {})".format(*beyond)


WAYS = {
    "echo": "bare echo",
    "plain": "in the message",
    "shared": "shared memory",
    "ids": "node ids",
}


def by_size(cell: Callable[[Row], str]) -> str:
    """Return a line for each size of the request, a column for each way to send it."""
    rows = [
        row | {"size": f"{row['bytes'] // 1000:,} KB".replace(",000 KB", " MB")}
        for row in read_result("ways")["rows"]
    ]
    return grid(rows, ("size", "{}"), ("way", WAYS), cell, "request")


OVERHEAD = {
    "client": "through the server, at the client",
    "run": "of which the forward pass",
    "direct": "stock PyG called directly, one thread",
    "echo": "a bare gRPC echo of the same bytes",
    "front": "the native front, which runs nothing",
}


def overhead() -> str:
    """Return medians of one request at a time, in µs, by the number of nodes."""
    rows = read_result("overhead")["rows"]
    there = {row["figure"] for row in rows}
    titles = {figure: title for figure, title in OVERHEAD.items() if figure in there}
    return grid(rows, ("figure", titles), ("nodes", "{:,} nodes"), "{p50:,.0f}")


TABLES: dict[str, Callable[[], str]] = {
    "overhead": overhead,
    "access": lambda: flat(read_result("access")["rows"], {
        "connection": "{way}", "p50, µs": "{p50:,.0f}",
        "added": "{added_us:,.0f} ({interval_us[0]:,.0f} to {interval_us[1]:,.0f})",
    }),
    "operating": lambda: flat(read_result("operating")["rows"], {
        "process": "{process}", "plain, µs": "{plain_us:,.0f}",
        "operated, µs": "{operated_us:,.0f}",
        "added": "{added[0]:.1%} ({added[1]:.1%} to {added[2]:.1%})",
    }),
    "JSON beside": lambda: flat(read_result("json_beside")["ways"], {
        "small requests beside": "{way}", "p50, ms": "{p50:.2f}", "p99, ms": "{p99:.2f}",
        "÷ beside gRPC": "{over_grpc[0]:.2f} ({over_grpc[1]:.2f} to {over_grpc[2]:.2f})",
        "large answers": "{large}",
    }),
    "attacked": lambda: flat(read_result("attacked")["ways"], {
        "small requests beside": "{way}", "p50, ms": "{p50:.2f}", "p99, ms": "{p99:.2f}",
        "p99 ÷ alone": "{over_alone[0]:.2f} ({over_alone[1]:.2f} to {over_alone[2]:.2f})",
        "attacks": "{attacks}",
    }),
    "report size": lambda: flat(read_result("report_size")["forms"], {
        "form": "{form}", "time, s": "{seconds:.2f}", "processor time, s": "{processor_s:.2f}",
        "memory, MB": "{megabytes:,.0f}",
    }),
    "live page": lambda: flat(read_result("live_page")["views"], {
        "view": "{view}", "time, ms": "{first_ms:.0f}", "most, ms": "{most_ms:.0f}",
        "share of a core": "{share}",
    }),
    "warm start": lambda: flat(read_result("warm_start")["measures"], {
        "measure": "{measure}", "median": "{median:.2f}", "most": "{most:.2f}",
        "asked": "{asked:g}",
    }),
    "slow start": lambda: flat(read_result("slow_start")["measures"], {
        "measure": "{measure}", "median": "{median:.2f}", "most": "{most:.2f}",
        "asked": "{asked:g}",
    }),
    "retention soak": lambda: flat(read_result("retention_soak")["measures"], {
        "measure": "{measure}", "least": "{least:.1f}", "most": "{most:.1f}",
        "from the middle": "± {spread:.1%}",
    }),
    "long run": lambda: flat(_every(10, read_result("long_run")["looks"]), {
        "minutes": "{minutes:.0f}", "requests": "{requests:,}",
        "database, MiB": "{database_mib:.1f}", "main process, MiB": "{main_mib:.1f}",
        "all processes, MiB": "{all_mib:.1f}",
    }),
    "retention answers": lambda: flat(read_result("retention_answers")["rows"], {
        "latency at the client": "{percentile}", "all rows kept, ms": "{all_ms:.2f}",
        "5 s of rows kept, ms": "{kept_ms:.2f}",
        "ratio": "{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})",
    }),
    "transport": lambda: by_size(_transport),
    "request cost": lambda: by_size(_cost),
}  # fmt: skip
