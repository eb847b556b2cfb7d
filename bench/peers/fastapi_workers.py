"""FastAPI on uvicorn, two worker processes: python -m bench.peers.fastapi_workers PORT

The model runs in the framework's thread pool, as its documentation recommends for blocking work, so
the event loop stays free for other connections.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from bench.peers.stock import StockModels

WORKERS = 2

_models: list[StockModels] = []


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    _models.append(StockModels())
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/infer")
async def infer(request: Request) -> Response:
    answer = await run_in_threadpool(_models[0].answer, await request.body())
    return Response(answer, media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(
        "bench.peers.fastapi_workers:app",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=WORKERS,
        log_level="warning",
        access_log=False,
        # A worker may take longer than the usual 5 s to import torch.
        timeout_worker_healthcheck=60,
    )
