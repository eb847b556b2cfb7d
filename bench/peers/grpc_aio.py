"""grpc.aio with one PyG thread, first in, first out: python -m bench.peers.grpc_aio PORT"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from bench.peers.stock import StockModels
from serve.wire import INFER_METHOD


async def main(port: int) -> None:
    models = StockModels()
    thread = ThreadPoolExecutor(1)

    async def infer(message: bytes, _: Any) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(thread, models.answer, message)

    _, service, method = INFER_METHOD.split("/")
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
