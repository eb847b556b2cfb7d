"""Bare gRPC echo servers, and what a call to each kind of them takes.

    python -m bench.host.echo [--quick] [--repeats 80]

One server process of each kind is asked in turn by one client, a block of calls each. `threads` is
Python's thread pool, `ours` the server's own threads (``serve.rpc.call_threads``), the others are
asyncio; uvloop is left out where it is not installed. Latency is the client's. `server` is
processor time and `handovers` counts how often the server's threads went to sleep, both by the
kernel's account.
"""

import argparse
import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import grpc
import numpy as np

from bench.kit.measure import elapsed_us, in_turns, percentiles
from bench.kit.open_loop import UNLIMITED
from bench.kit.processes import handovers, processor_ns
from bench.kit.script import Script, Table
from serve.rpc.call_threads import CallThreads
from serve.rpc.workers import Workers
from serve.wire.messages import INFER_METHOD, encode_response

ANSWER = bytes(28_000)
KINDS = ("threads", "ours", "asyncio", "uvloop")
SCRIPT = Script(
    "echo",
    full={"repeats": 80, "rounds": 5, "sizes": (10_000, 100_000, 400_000, 4_000_000), "serve": ""},
    quick={"repeats": 3, "rounds": 1, "sizes": (10_000,)},
    tables=[
        Table("gRPC echo, µs a call", "rows", {
            "request": "{bytes:,} B", "server": "{kind}", "p50": "{p50:,.0f}", "p99": "{p99:,.0f}",
            "processor time": "{server:,.0f}", "hand-overs": "{handovers:.1f}",
        })
    ],
)  # fmt: skip


@dataclass(frozen=True)
class EchoServer:
    """An echo server in a process of its own."""

    pid: int
    address: str

    def call(self) -> Any:
        """Return a function that sends bytes to the server and returns its answer."""
        return grpc.insecure_channel(self.address, options=UNLIMITED).unary_unary("/Echo/Call")


@contextmanager
def echo_server(kind: str = "threads") -> Iterator[EchoServer]:
    """Yield a running server of that kind; it answers ``ModelInfer`` with an encoded response."""
    command = [sys.executable, "-m", "bench.host.echo", "--serve", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield EchoServer(process.pid, f"127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.kill()


def handlers(echo: Any, infer: Any) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return handlers of the echo, and of ``ModelInfer`` for clients that read answers."""
    _, service, name = INFER_METHOD.split("/")
    methods: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(infer)}
    plain: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(echo)}
    return (
        grpc.method_handlers_generic_handler("Echo", plain),
        grpc.method_handlers_generic_handler(service, methods),
    )


def serve_threads(pool: Any) -> None:
    """Serve on the threads of `pool` until the process is killed; prints the port."""
    answer = encode_response("echo", {"output": np.frombuffer(ANSWER, np.float32)})
    server = grpc.server(pool, options=UNLIMITED)
    server.add_generic_rpc_handlers(handlers(lambda *_: ANSWER, lambda *_: answer))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def serve_asyncio() -> None:
    """Serve on an event loop until the process is killed; prints the port."""

    async def echo(message: bytes, context: object) -> bytes:
        return ANSWER

    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers(handlers(echo, echo))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def serve(kind: str) -> None:
    """Serve as that kind until the process is killed."""
    if kind == "threads":
        serve_threads(futures.ThreadPoolExecutor(8))
    elif kind == "ours":
        serve_threads(CallThreads(Workers(8, "rpc")))
    else:
        if kind == "uvloop":
            import uvloop  # type: ignore[import-not-found,unused-ignore]

            uvloop.install()
        asyncio.run(serve_asyncio())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each size and kind."""
    kinds = [kind for kind in KINDS if kind != "uvloop" or importlib.util.find_spec("uvloop")]
    rows = []
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(echo_server(kind)) for kind in kinds}
        calls = {kind: server.call() for kind, server in servers.items()}
        for size in options.sizes:
            blocks = in_turns(
                {
                    kind: partial(block, servers[kind].pid, call, bytes(size), options.repeats)
                    for kind, call in calls.items()
                },
                options.rounds,
            )
            for kind, found in blocks.items():
                taken = percentiles(np.concatenate([one["taken_us"] for one in found]), (50, 99))
                counted = {
                    name: round(median(one[name] for one in found), 1)
                    for name in ("server", "handovers")
                }
                rows.append({"bytes": size, "kind": kind, **taken, **counted})
    return {"rows": rows}


def block(pid: int, call: Any, message: bytes, repeats: int) -> dict[str, Any]:
    """Call `repeats` times, one call after the other."""
    used_ns, slept = processor_ns(pid), handovers(pid)
    taken_us = [elapsed_us(call, message) for _ in range(repeats)]
    return {
        "taken_us": taken_us,
        "server": (processor_ns(pid) - used_ns) / repeats / 1e3,
        "handovers": (handovers(pid) - slept) / repeats,
    }


if __name__ == "__main__":
    if kind := SCRIPT.parse(__doc__).serve:
        serve(kind)
    else:
        SCRIPT.main(measure, __doc__)
