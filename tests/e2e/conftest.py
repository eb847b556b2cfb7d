"""One ordinary server for all tests that do not need one of their own."""

import pytest

from bench.kit.servers import ServerProcess
from tests.e2e.support import Reference, raw_channel


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    graphs = ({"name": "community", "dataset": "community"},)
    with ServerProcess(tmp_path_factory.mktemp("server"), graphs=graphs) as found:
        yield found


@pytest.fixture(scope="session")
def call(server):
    with raw_channel(server) as found:
        yield found


@pytest.fixture(scope="session")
def reference():
    return Reference()
