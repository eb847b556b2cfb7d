"""Processor time of a request: the server's main process, our client, and a bare gRPC echo's.

    python -m bench.host.request_cost [--repeats N] [--against CHECKOUT]

One request at a time of 10 KB, 100 KB and 1 MB (32 features and 10 edges a node, edges as INT32) to
a model that does next to nothing, in the message, in shared memory and as node ids, then the same
bytes to an echo of the same kind of server, in blocks in turn. Told is the time on processors from
the kernel's account of each thread, by which a busy machine moves far less than by the clock; what
lanes take is not in it. `beyond` is the median over rounds of plain − echo, server and client
together. With `--against` a server from another checkout, with a `.venv` of its own, takes turns
with ours. Writes bench/results/request_cost.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.host.grpc_echo import echo_call, start_server
from bench.host.transport import (
    EDGES_PER_NODE,
    FANOUT,
    FEATURES,
    HELD_NODES,
    MESSAGE_BYTES,
    NODE_BYTES,
    SECTIONS,
    hold_graph,
    write_score_model,
)
from bench.kit.processor import processor_ns
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.wire.messages import encode_request

SIZES = (10_000, 100_000, 1_000_000)
ROUNDS = 5
RESULT = RESULTS / "request_cost.json"

#: The process that is looked at, and one request to it.
Way = tuple[int, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000, help="requests of each size and way")
    parser.add_argument("--against", type=Path, help="another checkout, with its own .venv")
    arguments = parser.parse_args()
    checkouts = {"ours": None} | ({"other": arguments.against} if arguments.against else {})
    echo = start_server("threads")
    try:
        with ExitStack() as stack:
            servers = {}
            for name, checkout in checkouts.items():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                write_score_model(folder / "models")
                hold_graph(folder)
                servers[name] = stack.enter_context(
                    ServerProcess(
                        folder,
                        repository=folder / "models",
                        sections=SECTIONS,
                        graphs=({"name": "held", "file": "held.npz"},),
                        checkout=checkout,
                    )
                )
            result = measure(servers, (echo.pid, echo_call(echo)), arguments.repeats)
    finally:
        echo.kill()
        echo.wait()
    content = {"by_bytes": result}
    write_result(RESULT, content)
    show(result)


def measure(
    servers: dict[str, ServerProcess], echo: tuple[int, Callable[[bytes], bytes]], repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """{bytes: {way: figures}} in microseconds of processor time a request."""
    rng = np.random.default_rng(0)
    result = {}
    with ExitStack() as stack:
        clients = {
            name: (
                server.pid,
                stack.enter_context(Client(server.target)),
                stack.enter_context(Client(server.target, shared_memory_bytes=MESSAGE_BYTES)),
            )
            for name, server in servers.items()
        }
        for size_bytes in SIZES:
            nodes = size_bytes // NODE_BYTES
            x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
            edges = rng.integers(0, nodes, (2, EDGES_PER_NODE * nodes), dtype=np.int32)
            ids = rng.integers(0, HELD_NODES, nodes // (FANOUT + 1))
            message = encode_request("score", {"x": x, "edge_index": edges})
            ways: dict[str, Way] = {"echo": (echo[0], lambda m=message: echo[1](m))}  # type: ignore[misc]
            for name, (pid, plain, shared) in clients.items():
                ways |= _ways(name, pid, plain, shared, {"x": x, "edge_index": edges}, ids)
            result[str(size_bytes)] = _summary(_rounds(ways, max(1, repeats // ROUNDS)))
    return result


def _ways(
    name: str, pid: int, plain: Client, shared: Client, tensors: dict[str, Any], ids: Any
) -> dict[str, Way]:
    nodes = {"graph": "held", "node_ids": ids, "fanouts": [FANOUT]}
    return {
        f"{name} plain": (pid, lambda: plain.infer("score", **tensors)),
        f"{name} shared": (pid, lambda: shared.infer("score", **tensors)),
        f"{name} ids": (pid, lambda: plain.infer("score", **nodes)),
    }


def _rounds(ways: dict[str, Way], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """For each way and round: the server's and the client's microseconds a request."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-1, ROUNDS):
        for name, (pid, send) in ways.items():
            server_ns, client_ns = processor_ns(pid), time.process_time_ns()
            for _ in range(repeats):
                send()
            found = (
                (processor_ns(pid) - server_ns) / repeats / 1e3,
                (time.process_time_ns() - client_ns) / repeats / 1e3,
            )
            if number >= 0:
                taken[name].append(found)
    return taken


def _summary(taken: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for name, rounds in taken.items():
        beyond = [sum(ours) - sum(echo) for ours, echo in zip(rounds, taken["echo"], strict=True)]
        figures[name] = {
            "server_us": round(median(server for server, _ in rounds), 1),
            "client_us": round(median(client for _, client in rounds), 1),
            "beyond_us": round(median(beyond), 1),
            "beyond_least_us": round(min(beyond), 1),
            "beyond_most_us": round(max(beyond), 1),
        }
    return figures


def show(result: dict[str, dict[str, dict[str, float]]]) -> None:
    sizes = [f"{int(size):,} B" for size in result]
    table = Table("server + client, beyond the echo", *sizes, title="Processor time, µs a request")
    for name in next(iter(result.values())):
        rows = [row[name] for row in result.values()]
        cells = (
            f"{row['server_us']:,.0f} + {row['client_us']:,.0f}, {row['beyond_us']:,.0f} "
            f"({row['beyond_least_us']:,.0f} to {row['beyond_most_us']:,.0f})"
            for row in rows
        )
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
