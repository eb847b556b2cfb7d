"""What a bare gRPC echo takes: synchronous server with Python's threads and ours, asyncio, uvloop.

    python -m bench.host.grpc_echo [--repeats N]

One server process each, asked in turn by one client, a block of calls each, so that a drift of the
machine's speed meets all alike. Told are the latency, and by the kernel's account what the server
took of processors and how often its threads went to sleep. Writes bench/results/grpc_echo.json.
uvloop is left out where it is not installed.
"""

import argparse
import asyncio
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from statistics import median
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.processor import handovers, processor_ns
from bench.kit.result import RESULTS, write_result
from serve.rpc.call_threads import CallThreads
from serve.rpc.workers import Workers
from serve.wire.messages import INFER_METHOD, encode_response

SIZES_BYTES = (10_000, 100_000, 400_000, 4_000_000)
ANSWER = bytes(28_000)
ROUNDS = 5
OPTIONS = [("grpc.max_receive_message_length", 128 << 20)]
RESULT = RESULTS / "grpc_echo.json"


def handlers(method: Any) -> tuple[grpc.GenericRpcHandler]:
    echo: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(method)
    return (grpc.method_handlers_generic_handler("Echo", {"Call": echo}),)


def serve_threads(method: Any = None, pool: Any = None) -> None:
    """With `method` under the standard's name too, where a client that reads answers can ask.

    `pool`: of the threads that serve; None: Python's own.
    """
    server = grpc.server(pool or futures.ThreadPoolExecutor(8), options=OPTIONS)
    server.add_generic_rpc_handlers(handlers(lambda message, context: ANSWER))
    if method is not None:
        _, service, name = INFER_METHOD.split("/")
        infer: Any = {name: grpc.unary_unary_rpc_method_handler(method)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, infer),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def serve_asyncio() -> None:
    async def echo(message: bytes, context: object) -> bytes:
        return ANSWER

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(handlers(echo))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def serve(kind: str) -> None:
    if kind == "threads":
        serve_threads()
        return
    if kind == "ours":
        serve_threads(pool=CallThreads(Workers(8, "rpc")))
        return
    if kind == "infer":
        answer = encode_response("echo", {"output": np.frombuffer(ANSWER, np.float32)})
        serve_threads(lambda message, context: answer)
        return
    if kind == "uvloop":
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        uvloop.install()
    asyncio.run(serve_asyncio())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=80, help="calls of a block")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    kinds = ["threads", "ours", "asyncio"]
    kinds += ["uvloop"] * (importlib.util.find_spec("uvloop") is not None)
    processes = {kind: start_server(kind) for kind in kinds}
    try:
        result = measure(processes, arguments.repeats)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    content = {"echo": result}
    write_result(RESULT, content)
    show(result)


def start_server(kind: str) -> "subprocess.Popen[str]":
    """An echo server in a process of its own; the first line it prints is its port."""
    command = [sys.executable, "-m", "bench.host.grpc_echo", "--serve", kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def echo_call(server: "subprocess.Popen[str]") -> Any:
    """What sends bytes to the server and returns its answer."""
    address = f"127.0.0.1:{echo_port(server)}"
    return grpc.insecure_channel(address, options=OPTIONS).unary_unary("/Echo/Call")


def echo_port(server: "subprocess.Popen[str]") -> int:
    """Where it listens."""
    assert server.stdout is not None
    return int(server.stdout.readline())


def measure(
    processes: "dict[str, subprocess.Popen[str]]", repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """{size: {kind: {p50, p99, server, handovers}}}, times in microseconds a call."""
    calls = {kind: echo_call(process) for kind, process in processes.items()}
    result = {}
    for size_bytes in SIZES_BYTES:
        message = bytes(size_bytes)
        blocks: dict[str, list[dict[str, Any]]] = {kind: [] for kind in calls}
        for number in range(-1, ROUNDS):
            for kind, call in calls.items():
                block = _block(partial(call, message), processes[kind].pid, repeats)
                if number >= 0:
                    blocks[kind].append(block)
        result[str(size_bytes)] = {kind: _summary(found) for kind, found in blocks.items()}
    return result


def _block(call: Callable[[], object], pid: int, repeats: int) -> dict[str, Any]:
    """So many calls, one after the other."""
    taken_ns = []
    before = processor_ns(pid), handovers(pid)
    for _ in range(repeats):
        started_ns = time.perf_counter_ns()
        call()
        taken_ns.append(time.perf_counter_ns() - started_ns)
    return {
        "taken_ns": taken_ns,
        "server": (processor_ns(pid) - before[0]) / repeats / 1e3,
        "handovers": (handovers(pid) - before[1]) / repeats,
    }


def _summary(blocks: Sequence[dict[str, Any]]) -> dict[str, float]:
    taken_us = np.concatenate([block["taken_ns"] for block in blocks]) / 1e3
    p50, p99 = np.percentile(taken_us, (50, 99))
    found = {"p50": float(p50), "p99": float(p99)}
    for name in ("server", "handovers"):
        found[name] = median(block[name] for block in blocks)
    return {name: round(value, 1) for name, value in found.items()}


def show(result: dict[str, dict[str, dict[str, float]]]) -> None:
    kinds = next(iter(result.values()))
    table = Table("request", *kinds, title="gRPC echo: p50 (p99); server, µs; hand-overs")
    for size, row in result.items():
        cells = (
            f"{cell['p50']:,.0f} ({cell['p99']:,.0f}); "
            f"{cell['server']:,.0f}; {cell['handovers']:.1f}"
            for cell in row.values()
        )
        table.add_row(f"{int(size):,} B", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
