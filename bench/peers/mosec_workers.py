"""mosec, two worker processes: python -m bench.peers.mosec_workers --port PORT"""

from typing import Any

from mosec import Server, Worker

from bench.peers.stock import StockModels

WORKERS = 2


class Pyg(Worker):
    """Bytes in, bytes out."""

    def __init__(self) -> None:
        self._models = StockModels()

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: Any) -> bytes:
        return bytes(data)

    def forward(self, data: bytes) -> bytes:
        return self._models.answer(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Pyg, num=WORKERS)
    server.run()
