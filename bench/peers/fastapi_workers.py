"""FastAPI on uvicorn, two worker processes: python -m bench.peers.fastapi_workers PORT"""

import sys

import uvicorn
from fastapi import FastAPI, Request, Response

from bench.peers.stock import StockModels

WORKERS = 2

app = FastAPI()
_models: list[StockModels] = []


@app.post("/infer")
async def infer(request: Request) -> Response:
    if not _models:
        _models.append(StockModels())
    message = await request.body()
    return Response(_models[0].answer(message), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(
        "bench.peers.fastapi_workers:app",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=WORKERS,
        log_level="warning",
        access_log=False,
        # Importing torch may take a worker longer than the usual 5 s, and it was killed for ever.
        timeout_worker_healthcheck=60,
    )
