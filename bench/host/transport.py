"""From the client to the lane: plain gRPC, shared memory, node ids, beside a bare gRPC echo.

    python -m bench.host.transport [--quick]

Requests of 10 KB to 50 MB (32 features and 10 edges a node; edges as INT32) go to a real server
whose model only copies one column, one at a time from our client: in the message, then with their
tensors in shared memory, then as ids of nodes of a graph the server holds, of which about as many
bytes are sampled and gathered, then the very bytes of the first to a bare echo of the same kind of
server, in turn. `added` is what the client waited beyond the run on the lane; of an echo, all it
waited. So `added` of ours has checking and staging in it, scheduling, hand-over and answer. Ratios
are of neighbours in time, with the quarter of them below and above. Writes
bench/results/transport.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.host.grpc_echo import echo_call, start_server
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.models.writer import write_model
from serve.wire.messages import encode_request

FEATURES, EDGES_PER_NODE = 32, 10
NODE_BYTES = 4 * FEATURES + 2 * 4 * EDGES_PER_NODE
#: Bytes of tensors in a request, and how often it is sent each way.
SIZES = {10_000: 200, 100_000: 200, 1_000_000: 100, 10_000_000: 40, 50_000_000: 20}
QUICK = 5
MESSAGE_BYTES = 128 << 20
#: The graph the server holds, and the in-neighbours read of each node asked for.
HELD_NODES, FANOUT = 400_000, 10
SECTIONS: dict[str, dict[str, object]] = {
    "server": {"max_message": "128 MiB", "reject_nonfinite": True},
    "device": {"memory_budget": "4 GiB"},
}
RESULT = RESULTS / "transport.json"

#: {way: microseconds of each request}
Times = dict[str, list[float]]


#: Next to no work: what is measured is the way there and back.
MODEL = """
import torch

class Score(torch.nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"1 ÷ {QUICK} of the requests")
    arguments = parser.parse_args()
    echo = start_server("threads")
    try:
        with tempfile.TemporaryDirectory() as folder:
            repository = Path(folder) / "models"
            write_score_model(repository)
            hold_graph(Path(folder))
            held: dict[str, object] = {"name": "held", "file": "held.npz"}
            with ServerProcess(
                Path(folder), repository=repository, sections=SECTIONS, graphs=(held,)
            ) as server:
                result = measure(server, echo_call(echo), QUICK if arguments.quick else 1)
    finally:
        echo.kill()
        echo.wait()
    content = {"quick": arguments.quick, "by_bytes": result}
    write_result(RESULT, content)
    show(result)


def measure(
    server: ServerProcess, echo: Callable[[bytes], bytes], divisor: int
) -> dict[str, dict[str, Any]]:
    """{bytes: figures}."""
    rng = np.random.default_rng(0)
    result = {}
    with ExitStack() as stack:
        plain = stack.enter_context(Client(server.target, max_message_bytes=MESSAGE_BYTES))
        shared = stack.enter_context(Client(server.target, shared_memory_bytes=MESSAGE_BYTES))
        for size_bytes, repeats in SIZES.items():
            nodes = size_bytes // NODE_BYTES
            x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
            edges = rng.integers(0, nodes, (2, EDGES_PER_NODE * nodes), dtype=np.int32)
            message = encode_request("score", {"x": x, "edge_index": edges})
            ids = rng.integers(0, HELD_NODES, nodes // (FANOUT + 1))
            times: Times = {"plain": [], "shared": [], "ids": [], "echo": []}
            warm_up = max(2, repeats // divisor // 10)
            for number in range(-warm_up, repeats // divisor):
                found = {
                    "plain": added_us(plain, x=x, edge_index=edges),
                    "shared": added_us(shared, x=x, edge_index=edges),
                    "ids": added_us(plain, graph="held", node_ids=ids, fanouts=[FANOUT]),
                    "echo": timed_us(echo, message),
                }
                if number >= 0:
                    for way, taken_us in found.items():
                        times[way].append(taken_us)
            result[str(size_bytes)] = summary(times, len(message))
    return result


def write_score_model(repository: Path) -> None:
    """A model named `score` that copies next to nothing."""
    score = torch.nn.Linear(FEATURES, 1)
    sizes = {"in_features": FEATURES, "out_features": 1}
    model = write_model(repository, "score", score, factory="./model.py:Score", args=sizes)
    (model / "model.py").write_text(MODEL)


def hold_graph(folder: Path) -> None:
    """A random graph as a file."""
    rng = np.random.default_rng(1)
    np.savez(
        folder / "held.npz",
        num_nodes=HELD_NODES,
        x=rng.standard_normal((HELD_NODES, FEATURES), dtype=np.float32),
        edge_index=rng.integers(0, HELD_NODES, (2, EDGES_PER_NODE * HELD_NODES)),
    )


def added_us(client: Client, **request: Any) -> float:
    """What the client waits beyond the run."""
    started_ns = time.perf_counter_ns()
    answer = client.infer("score", **request)
    taken_ns = time.perf_counter_ns() - started_ns
    return taken_ns / 1e3 - answer.qos.run_us


def timed_us(call: Callable[[bytes], bytes], message: bytes) -> float:
    started_ns = time.perf_counter_ns()
    call(message)
    return (time.perf_counter_ns() - started_ns) / 1e3


def summary(times: Times, message_bytes: int) -> dict[str, Any]:
    """Quantiles of what was added, the rate, and ratios to the echo beside."""
    taken = {way: np.array(values) for way, values in times.items()}
    figures: dict[str, Any] = {"message_bytes": message_bytes}
    for way, values in taken.items():
        quarters = quantiles(values)
        rate = round(message_bytes / quarters["p50"], 1)
        figures[way] = {"added_us": quarters, "megabytes_per_s": rate}
        if way != "echo":
            figures[way]["over_echo"] = quantiles(values / taken["echo"])
    return figures


def quantiles(values: Any) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (25, 50, 75, 99)}


def show(result: dict[str, dict[str, Any]]) -> None:
    ours = (name for way in ("plain", "shared memory", "node ids") for name in (way, "÷ echo"))
    columns = ("request", "echo", *ours)
    table = Table(*columns, title="Added to a run, p50")
    for size, row in result.items():
        cells = [f"{int(size):,} B"]
        for way in ("echo", "plain", "shared", "ids"):
            cell = row[way]
            cells.append(f"{cell['added_us']['p50']:,.0f} µs, {cell['megabytes_per_s']:,.0f} MB/s")
            if way != "echo":
                ratio = cell["over_echo"]
                cells.append(f"{ratio['p50']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})")
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
