"""grpc.aio with one PyG thread, first in, first out: python -m bench.peers.grpc_aio PORT"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from bench.kit.echoes import UNLIMITED, handlers
from bench.peers.stock import StockModels


async def main(port: int) -> None:
    models, thread = StockModels(), ThreadPoolExecutor(1)

    async def infer(message: bytes, _: Any) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(thread, models.answer, message)

    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers(handlers(infer))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
