"""One reduction over several requests' features on one graph, beside a union and one by one.

    python -m bench.models.shared_graph [--quick] [--out bench/results/shared_graph.json]

If k requests were on the same edges with features of their own [N, F], their matrices could be put
side by side and reduced at once, [N, k · F]: the edges are read once, and sorted once (TurboGNN's
idea, for a GPU). Here, on one thread pinned to one core with a lane's allocator, over the kernel
of `csr`, alternating, in processor time: `apart` sorts the edges and reduces for each; `union`
sorts and reduces the disjoint union of the k graphs, as merged requests are; `sorted_once` sorts
once and reduces for each; `wide` sorts once, puts the features side by side, reduces once and
takes the result apart. A ratio above 1 is a gain over `apart`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.kit.as_lane import become_lane
from bench.kit.result import write_result
from serve.lane.executors.kernels import Csr, aggregate

SIZES = ((100, 1_000), (1_000, 10_000), (8_000, 80_000), (50_000, 500_000))
WIDTHS = (16, 64, 256)
COUNTS = (2, 4, 8)
WAYS = ("union", "sorted_once", "wide")


def ways(nodes: int, edges: int, width: int, count: int) -> dict[str, Callable[[], list[Any]]]:
    """What is compared; each gives one [N, F] for every request."""
    torch.manual_seed(nodes + width)
    edge_index = torch.randint(nodes, (2, edges))
    features = [torch.randn(nodes, width) for _ in range(count)]

    def csr(of: torch.Tensor = edge_index, rows: int = nodes) -> Csr:
        return Csr(of, rows, replace_loops=False, edges=False)

    def union() -> list[Any]:
        shifted = torch.cat([edge_index + nodes * place for place in range(count)], dim=1)
        graph = csr(shifted, nodes * count)
        return list(torch.split(aggregate(graph, torch.cat(features)), nodes))

    def sorted_once() -> list[Any]:
        graph = csr()
        return [aggregate(graph, x) for x in features]

    def wide() -> list[Any]:
        out = aggregate(csr(), torch.cat(features, dim=1))
        return [part.contiguous() for part in torch.split(out, width, dim=1)]

    return {
        "apart": lambda: [aggregate(csr(), x) for x in features],
        "union": union,
        "sorted_once": sorted_once,
        "wide": wide,
    }


def measure(nodes: int, edges: int, width: int, count: int, budget_s: float) -> dict[str, Any]:
    compared = ways(nodes, edges, width, count)
    expected = compared["apart"]()
    for run in compared.values():
        for given, right in zip(run(), expected, strict=True):
            torch.testing.assert_close(given, right)
    times: dict[str, list[int]] = {name: [] for name in compared}
    until = time.monotonic() + budget_s
    while len(times["apart"]) < 5 or (time.monotonic() < until and len(times["apart"]) < 100):
        for name, run in compared.items():
            started = time.thread_time_ns()
            run()
            times[name].append(time.thread_time_ns() - started)
    row: dict[str, Any] = {"nodes": nodes, "edges": edges, "width": width, "count": count}
    row["apart_ms"] = statistics.median(times["apart"]) / 1e6
    for name in WAYS:
        ratios = [a / b for a, b in zip(times["apart"], times[name], strict=True)]
        row[name] = [round(value, 3) for value in statistics.quantiles(ratios, n=4)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="less often; no file")
    parser.add_argument("--out", type=Path, default=Path("bench/results/shared_graph.json"))
    options = parser.parse_args()
    become_lane("bench.models.shared_graph")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with torch.inference_mode():
        rows = [
            measure(*size, width, count, 0.2 if options.quick else 1.5)
            for size in SIZES
            for width in WIDTHS
            for count in COUNTS
        ]
    table = Table(title="one by one ÷ each way: processor time, median and middle half")
    for head in ("nodes", "features", "requests", "one by one, ms", *WAYS):
        table.add_column(head, justify="right")
    for row in rows:
        shown = [f"{row[name][1]:.2f} ({row[name][0]:.2f}, {row[name][2]:.2f})" for name in WAYS]
        first = f"{row['nodes']:,}", str(row["width"]), str(row["count"]), f"{row['apart_ms']:.2f}"
        table.add_row(*first, *shown)
    Console(width=120).print(table)
    if not options.quick:
        document = {"rows": rows}
        write_result(options.out, document)


if __name__ == "__main__":
    main()
