"""One server for the models of the gallery, and each as this process runs it."""

import warnings

import pytest

from bench.kit import gallery as entries
from bench.kit.servers import ServerProcess
from tests.e2e.support import raw_channel


@pytest.fixture(scope="session")
def gallery(tmp_path_factory):
    """The repository, and the models in it by name: each trained, saved and imported."""
    root = tmp_path_factory.mktemp("gallery")
    with warnings.catch_warnings():
        # Torch warns of its sparse matrices once in a process, wherever that is.
        warnings.filterwarnings("ignore", "Sparse", UserWarning)
        names = (*entries.GALLERY, *entries.BASIC)
        return root, {name: entries.write(root, name) for name in names}


@pytest.fixture(scope="session")
def server(tmp_path_factory, gallery):
    root, _ = gallery
    folder = tmp_path_factory.mktemp("server")
    sections = {"models": {"calibration_s": 0.2}}
    with ServerProcess(folder, repository=root, sections=sections) as found:
        yield found


@pytest.fixture(scope="session")
def call(server):
    with raw_channel(server) as found:
        yield found
