"""One server for the models of the gallery, and each as this process runs it."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.kit import gallery as entries
from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.client import Client
from tests.e2e.support import raw_channel


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The repository, the models in it by name, and a server: each trained, imported and loaded.

    The server measures one model while this process trains the next.
    """
    root = tmp_path_factory.mktemp("gallery")
    first, *others = (*entries.GALLERY, *entries.BASIC)
    sections = {"models": {"calibration_s": 0.05}}
    with warnings.catch_warnings():
        # Torch warns of its sparse matrices once in a process, wherever that is.
        warnings.filterwarnings("ignore", "Sparse", UserWarning)
        models = {first: entries.write(root, first)}
        with (
            ServerProcess(
                tmp_path_factory.mktemp("server"), repository=root, sections=sections
            ) as server,
            Client(server.target, timeout_s=PATIENCE_S) as client,
            ThreadPoolExecutor(1) as loads,
        ):
            pending = []
            for name in others:
                models[name] = entries.write(root, name)
                pending.append(loads.submit(client.load, name, timeout_s=PATIENCE_S))
            for load in pending:
                load.result()
            yield root, models, server


@pytest.fixture(scope="session")
def gallery(served):
    """The repository, and the models in it by name."""
    return served[:2]


@pytest.fixture(scope="session")
def server(served):
    return served[2]


@pytest.fixture(scope="session")
def call(server):
    with raw_channel(server) as found:
        yield found
