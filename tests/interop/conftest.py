import pytest

from serve.config import ServerConfig
from serve.rpc.server import GrpcServer
from tests.rpc.conftest import engine, front
from tests.rpc.fakes import FACTS

__all__ = ["engine", "front"]


@pytest.fixture
def server(engine, front):
    """Yield a server for messages of up to 64 MiB."""
    config = ServerConfig(grpc_port=0, max_queue=64, front=front)
    server = GrpcServer(engine, lambda: FACTS, lambda _: {}, config)
    server.port = server.start()
    yield server
    engine.let_go()
    server.stop(2.0)
