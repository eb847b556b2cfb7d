"""What the server adds to calling the model in one's own process, split by stage.

    python -m bench.host.overhead [--repeats N] [--model gcn]

A client sends graphs of 100, 1,000 and 10,000 nodes (10 edges a node, the demo models' 32
features) one at a time over gRPC to a real server. In turn, ten by ten, it runs the same model on
the same graph itself, with one thread, as a lane has, and sends the same bytes to a bare gRPC echo
of the same kind of server, at the same pace; all by the wall clock of the client.

`added` is served − direct, quantile by quantile; `beyond` is what of that a bare echo would not
take too. The stages are the server's own account; `transport` is what the client waited beyond it,
`hand-over` from the launch until the lane runs and from its end until that is known. The cost of
one scheduling decision is measured by `bench.scheduling.decisions`. Writes
bench/results/overhead.json.
"""

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.host.grpc_echo import echo_call, start_server
from bench.kit.result import RESULTS, ROOT, write_result
from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.commands.serve import tune_process
from serve.config import ModelsConfig
from serve.lane.models.loader import load_model
from serve.models.repository import find
from serve.wire.messages import encode_request

NODES = (100, 1_000, 10_000)
EDGES_PER_NODE = 10
FEATURES = 32
#: Lanes keep freed memory in proportion to the budget; the test harness's small one is not typical.
SECTIONS: dict[str, dict[str, object]] = {"device": {"memory_budget": "8 GiB"}}
BLOCK = 10
REPOSITORY = ROOT / "configs" / "models"
RESULT = RESULTS / "overhead.json"
#: What the server keeps of each request, beside what the client and the direct call measure.
STAGES = ("queue", "prepare", "run", "answer", "latency", "quet")

#: {figure: {p50, p99}} in microseconds.
Figures = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--model", default="gcn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The direct call gets what lanes have: an allocator that keeps freed memory. Without it the
    # server often wins, which says more of glibc's defaults than of the server.
    tune_process()
    echo = start_server("threads")
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess(
                Path(folder), sections=SECTIONS, calibration_s=ModelsConfig().calibration_s
            ) as server,
        ):
            result = measure(server, echo_call(echo), arguments.model, arguments.repeats)
    finally:
        echo.kill()
        echo.wait()
    content = {"model": arguments.model, "by_nodes": result}
    write_result(RESULT, content)
    show(result)


def measure(
    server: ServerProcess, echo: Callable[[bytes], bytes], model: str, repeats: int
) -> dict[str, Figures]:
    """{nodes: figures} in microseconds."""
    direct = load_model(find(REPOSITORY, model))
    rng = np.random.default_rng(0)
    taken: dict[int, dict[str, list[Any]]] = {}
    with Client(server.target) as client:
        for nodes in NODES:
            x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
            edge_index = rng.integers(0, nodes, (2, EDGES_PER_NODE * nodes))
            inputs = {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edge_index)}
            message = encode_request(model, {"x": x, "edge_index": edge_index.astype(np.int32)})
            rows: dict[str, list[Any]] = {"uid": [], "client": [], "direct": [], "echo": []}
            for block in range(-1, repeats // BLOCK):
                found: dict[str, list[Any]] = {name: [] for name in rows}
                for _ in range(BLOCK):
                    answer, taken_us = timed(client.infer, model, x=x, edge_index=edge_index)
                    found["uid"].append(answer.qos.request_uid)
                    found["client"].append(taken_us)
                # All at one pace: a core that was idle for a moment is slower for the next, and
                # a hot loop would flatter what is compared with.
                for pause_us in found["client"]:
                    direct_us = timed(direct.run, inputs)[1]
                    found["direct"].append(direct_us)
                    time.sleep(max(0.0, pause_us - direct_us) / 1e6)
                for pause_us in found["direct"]:
                    time.sleep(pause_us / 1e6)
                    found["echo"].append(timed(echo, message)[1])
                if block >= 0:
                    for name, values in found.items():
                        rows[name] += values
            taken[nodes] = rows
    server.stop()
    stages = stages_by_uid(server.database)
    return {str(nodes): summary(rows, stages) for nodes, rows in taken.items()}


def timed(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """What it returns, and the microseconds it took."""
    started_ns = time.perf_counter_ns()
    returned = call(*arguments, **options)
    return returned, (time.perf_counter_ns() - started_ns) / 1e3


def stages_by_uid(database: Path) -> dict[str, tuple[float, ...]]:
    """The server's account of every request, microseconds, in the order of `STAGES`."""
    columns = ", ".join(f"{stage}_ns / 1e3" for stage in STAGES)
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(f"SELECT request_uid, {columns} FROM request").fetchall()
    return {uid: tuple(values) for uid, *values in rows}


def summary(rows: dict[str, list[Any]], stages: dict[str, tuple[float, ...]]) -> Figures:
    client, direct, echo = (np.array(rows[name]) for name in ("client", "direct", "echo"))
    kept = dict(zip(STAGES, np.array([stages[uid] for uid in rows["uid"]]).T, strict=True))
    latency, launched = kept.pop("latency"), kept.pop("quet")
    found = {
        "client": client,
        "direct": direct,
        "echo": echo,
        "transport": client - latency,
        "queue": kept["queue"],
        "prepare": kept["prepare"],
        "run": kept["run"],
        "hand-over": latency - launched - kept["run"] - kept["answer"],
        "answer": kept["answer"],
    }
    figures = {name: quantiles(values) for name, values in found.items()}
    added = {q: round(figures["client"][q] - figures["direct"][q], 1) for q in figures["client"]}
    beyond = {q: round(added[q] - figures["echo"][q], 1) for q in added}
    return figures | {"added": added, "beyond": beyond}


def quantiles(values: Any) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (5, 50, 99)}


def show(result: dict[str, Figures]) -> None:
    names = list(next(iter(result.values())))
    columns = [f"{int(nodes):,} nodes" for nodes in result]
    table = Table("µs, p50 (p99)", *columns, title="Served, direct, and a bare gRPC echo")
    for name in names:
        cells = (f"{row[name]['p50']:,.0f} ({row[name]['p99']:,.0f})" for row in result.values())
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
