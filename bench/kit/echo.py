"""A bare gRPC echo on Python's thread pool, which other benches compare a server with."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from bench.kit.open_loop import UNLIMITED

ANSWER = bytes(28_000)


@dataclass(frozen=True)
class EchoServer:
    """An echo server in a process of its own."""

    pid: int
    address: str

    def call(self) -> Any:
        """Return a function that sends bytes to the server and returns its answer."""
        return grpc.insecure_channel(self.address, options=UNLIMITED).unary_unary("/Echo/Call")


@contextmanager
def echo_server() -> Iterator[EchoServer]:
    """Yield a running echo server."""
    command = [sys.executable, "-m", "bench.kit.echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield EchoServer(process.pid, f"127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.kill()


def serve() -> None:
    """Serve until the process is killed; prints the port."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=UNLIMITED)
    plain: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(lambda *_: ANSWER)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", plain),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    serve()
