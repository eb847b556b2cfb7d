import pytest

from serve.client import Client
from tests.client.blocking import Blocking
from tests.rpc.conftest import engine, front, reports, server, target

__all__ = ["engine", "front", "make", "reports", "server", "target"]


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def make(request):
    return request.param


@pytest.fixture
def client(make, target):
    with make(target) as client:
        yield client
