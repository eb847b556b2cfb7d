"""One server for the models of the gallery, and each as this process runs it."""

import warnings

import pytest

from bench.kit import gallery as entries
from bench.kit.servers import ServerProcess
from tests.e2e.support import raw_channel


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The repository, the models in it by name, and a server: each trained, imported and loaded.

    All are calibrated before the server starts: beside one that serves, each load would have
    successors of its lanes load all models again. Each lane takes long for that, so there is one.
    """
    root = tmp_path_factory.mktemp("gallery")
    with warnings.catch_warnings():
        # Torch warns of its sparse matrices once in a process, wherever that is.
        warnings.filterwarnings("ignore", "Sparse", UserWarning)
        models = {name: entries.write(root, name) for name in (*entries.GALLERY, *entries.BASIC)}
        with ServerProcess(
            tmp_path_factory.mktemp("server"),
            policy="slack",
            discipline="preemptive",  # as the command that calibrates has it
            repository=root,
            sections={"models": {"calibration_s": 0.05}, "device": {"lanes": 1}},
            usual_calibrations=True,
        ) as server:
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
