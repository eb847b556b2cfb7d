"""How long a bare gRPC echo takes: synchronous server, asyncio server, asyncio on uvloop.

    python -m bench.grpc_echo [--repeats N]

One server process each, asked in turn by one client, so that a drift of the machine's speed meets
all alike. Writes bench/results/grpc_echo.json. uvloop is left out where it is not installed.
"""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine_facts
from serve.wire import INFER_METHOD, encode_response

SIZES_BYTES = (10_000, 100_000, 400_000, 4_000_000)
ANSWER = bytes(28_000)
OPTIONS = [("grpc.max_receive_message_length", 128 << 20)]
RESULT = Path(__file__).parent / "results" / "grpc_echo.json"


def handlers(method: Any) -> tuple[grpc.GenericRpcHandler]:
    echo: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(method)
    return (grpc.method_handlers_generic_handler("Echo", {"Call": echo}),)


def serve_threads(method: Any = None) -> None:
    """With `method` under the standard's name too, where a client that reads answers can ask."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=OPTIONS)
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
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    kinds = ["threads", "asyncio"] + ["uvloop"] * (importlib.util.find_spec("uvloop") is not None)
    processes = {kind: start_server(kind) for kind in kinds}
    try:
        result = measure(processes, arguments.repeats)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    RESULT.write_text(json.dumps({"machine": machine_facts(), "echo_us": result}, indent=1) + "\n")
    show(result)


def start_server(kind: str) -> "subprocess.Popen[str]":
    """An echo server in a process of its own; the first line it prints is its port."""
    command = [sys.executable, "-m", "bench.grpc_echo", "--serve", kind]
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
    """{size: {kind: {p50, p99}}} in microseconds."""
    calls = {kind: echo_call(process) for kind, process in processes.items()}
    result = {}
    for size_bytes in SIZES_BYTES:
        message = bytes(size_bytes)
        times: dict[str, list[int]] = {kind: [] for kind in calls}
        for _ in range(repeats):
            for kind, call in calls.items():
                started_ns = time.perf_counter_ns()
                call(message)
                times[kind].append(time.perf_counter_ns() - started_ns)
        result[str(size_bytes)] = {
            kind: {
                f"p{q}": round(float(np.percentile(taken[repeats // 10 :], q)) / 1e3, 1)
                for q in (50, 99)
            }
            for kind, taken in times.items()
        }
    return result


def show(result: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table("request", *next(iter(result.values())), title="gRPC echo, p50 (p99), µs")
    for size, row in result.items():
        cells = (f"{cell['p50']:,.0f} ({cell['p99']:,.0f})" for cell in row.values())
        table.add_row(f"{int(size):,} B", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
