"""Servers that run nothing: what a client sees of them is transport alone.

    python -m bench.kit.echoes threads|aio|native PORT

Each answers every ``ModelInfer`` at once: gRPC's Python server on its thread pool or on asyncio, or
the server's own native front. It is a lower bound for any server behind such a front.
"""

import asyncio
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from bench.kit.servers import listening
from bench.kit.waiting import PATIENCE_S
from serve.native import Front
from serve.wire.messages import INFER_METHOD, encode_response

#: As large as a mean answer of the mix: 28 KB.
ANSWER = encode_response("", {"output": np.zeros((7_000, 1), np.float32)})
#: Options of a gRPC channel or server: messages of any size.
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True)
class EchoServer:
    """An echo in a process of its own."""

    pid: int
    address: str

    def call(self) -> Any:
        """Return a function that sends bytes to the server and returns its answer."""
        return grpc.insecure_channel(self.address, options=UNLIMITED).unary_unary(INFER_METHOD)


@contextmanager
def echo_server(kind: str = "threads") -> Iterator[EchoServer]:
    """Yield a running echo."""
    with listening(f"bench.kit.echoes {kind} {{port}}") as (pid, port):
        yield EchoServer(pid, f"127.0.0.1:{port}")


def handlers(answer: Any) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return what lets a gRPC server give a message's bytes to `answer`, and send its bytes."""
    _, service, method = INFER_METHOD.split("/")
    methods: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    return (grpc.method_handlers_generic_handler(service, methods),)


def threads(port: int) -> None:
    """Serve on gRPC's thread pool."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=UNLIMITED)
    server.add_generic_rpc_handlers(handlers(lambda *_: ANSWER))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


async def aio(port: int) -> None:
    """Serve on asyncio."""

    async def answer(*_: object) -> bytes:
        return ANSWER

    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers(handlers(answer))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def native(port: int) -> None:
    """Serve on the native front."""
    front = Front(
        host="127.0.0.1",
        port=port,
        backend="gnnserve-nobody-is-behind",
        method=INFER_METHOD,
        max_message_bytes=1 << 30,
        max_receiving_bytes=4 << 30,
        max_receiving_bytes_of_connection=4 << 30,
        max_connections=1024,
        max_connections_of_peer=1024,
        max_streams=1024,
        receive_timeout_s=PATIENCE_S,
        receive_bytes_per_s=1,
        send_timeout_s=PATIENCE_S,
    )
    while True:
        *_, events = front.poll(-1)
        for handle, message, *_ in events:
            if message is not None:
                front.answer(handle, ANSWER)


def main(kind: str, port: int) -> None:
    """Serve until the process is killed."""
    if kind == "aio":
        asyncio.run(aio(port))
    else:
        {"threads": threads, "native": native}[kind](port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
