"""What the server adds to calling the model in one's own process, split by stage.

    python -m bench.overhead [--repeats N] [--model gcn]

A client sends graphs of 100, 1,000 and 10,000 nodes (10 edges a node, the demo models' 32
features) one at a time over gRPC to a real server. In turn with each request it runs the same
model on the same graph itself, with one thread, as a lane has; both by the wall clock of the
client. `added` is the difference of the two medians (p99: of the two p99s). Stages are the
server's own account of each request; `transport` is what the client waited beyond it. The cost
of one scheduling decision is in `bench/decisions.py`. Writes bench/results/overhead.json.
"""

import argparse
import json
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.machine import machine_facts
from serve.app import tune_process
from serve.client import Client
from serve.models.loader import load_model
from serve.models.repository import find
from tests.harness import ServerProcess

NODES = (100, 1_000, 10_000)
EDGES_PER_NODE = 10
FEATURES = 32
REPOSITORY = Path(__file__).parent.parent / "configs" / "models"
RESULT = Path(__file__).parent / "results" / "overhead.json"
#: What the server keeps of each request, beside what the client and the direct call measure.
STAGES = ("queue", "prepare", "run", "answer", "latency")

#: {figure: {p50, p99}} in microseconds.
Figures = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--model", default="gcn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The direct call gets what lanes have: an allocator that keeps freed memory. Without it the
    # server often wins, which says more of glibc's defaults than of the server.
    tune_process()
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder)) as server:
        result = measure(server, arguments.model, arguments.repeats)
    RESULT.write_text(
        json.dumps(
            {"machine": machine_facts(), "model": arguments.model, "by_nodes": result}, indent=1
        )
        + "\n"
    )
    show(result)


def measure(server: ServerProcess, model: str, repeats: int) -> dict[str, Figures]:
    """{nodes: figures} in microseconds."""
    direct = load_model(find(REPOSITORY, model))
    rng = np.random.default_rng(0)
    taken: dict[int, list[tuple[str, float, float]]] = {}
    with Client(server.target) as client:
        for nodes in NODES:
            x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
            edge_index = rng.integers(0, nodes, (2, EDGES_PER_NODE * nodes))
            inputs = {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edge_index)}
            rows = []
            for _ in range(repeats + repeats // 10):
                started_ns = time.perf_counter_ns()
                answer = client.infer(model, x=x, edge_index=edge_index)
                served_ns = time.perf_counter_ns()
                direct.run(inputs)
                direct_us = (time.perf_counter_ns() - served_ns) / 1e3
                rows.append((answer.qos.request_uid, (served_ns - started_ns) / 1e3, direct_us))
            taken[nodes] = rows[repeats // 10 :]
    server.stop()
    stages = stages_by_uid(server.database)
    return {str(nodes): summary(rows, stages) for nodes, rows in taken.items()}


def stages_by_uid(database: Path) -> dict[str, tuple[float, ...]]:
    """The server's account of every request, microseconds, in the order of `STAGES`."""
    columns = ", ".join(f"{stage}_ns / 1e3" for stage in STAGES)
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(f"SELECT request_uid, {columns} FROM request").fetchall()
    return {uid: tuple(values) for uid, *values in rows}


def summary(rows: list[tuple[str, float, float]], stages: dict[str, tuple[float, ...]]) -> Figures:
    client = np.array([row[1] for row in rows])
    direct = np.array([row[2] for row in rows])
    kept = dict(zip(STAGES, np.array([stages[row[0]] for row in rows]).T, strict=True))
    latency = kept.pop("latency")
    found = {"client": client, "direct": direct, "transport": client - latency, **kept}
    figures = {name: quantiles(values) for name, values in found.items()}
    figures["added"] = {
        q: round(figures["client"][q] - figures["direct"][q], 1) for q in ("p5", "p50", "p99")
    }
    return figures


def quantiles(values: Any) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (5, 50, 99)}


def show(result: dict[str, Figures]) -> None:
    names = list(next(iter(result.values())))
    table = Table("nodes", "µs", *names)
    for nodes, row in result.items():
        for quantile in ("p5", "p50", "p99"):
            cells = (f"{row[name][quantile]:,.0f}" for name in names)
            table.add_row(f"{int(nodes):,}" if quantile == "p5" else "", quantile, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
