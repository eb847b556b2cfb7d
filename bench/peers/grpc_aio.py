"""grpc.aio with one PyG thread, first in, first out.

    python -m bench.peers.grpc_aio PORT [--runs-nothing]

With `--runs-nothing` every request gets an empty answer at once: what remains is transport.
"""

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from bench.peers.stock import StockModels
from serve.wire.messages import INFER_METHOD, encode_response


async def main(port: int, runs_nothing: bool) -> None:
    models = StockModels()
    thread = ThreadPoolExecutor(1)
    nothing = encode_response("", {"output": np.zeros((1, 1), np.float32)})

    async def infer(message: bytes, _: Any) -> bytes:
        if runs_nothing:
            return nothing
        return await asyncio.get_running_loop().run_in_executor(thread, models.answer, message)

    _, service, method = INFER_METHOD.split("/")
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--runs-nothing", action="store_true")
    options = parser.parse_args()
    asyncio.run(main(options.port, options.runs_nothing))
