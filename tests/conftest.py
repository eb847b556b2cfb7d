"""What holds for all tests."""

import logging
import os

import pytest
from hypothesis import HealthCheck, settings

from bench.kit.servers import ServerProcess
from serve.collector import imports_uncollected
from tests.failures import pytest_configure

__all__ = ["pytest_configure"]

#: Folders whose tests share something that takes long to make, so one process runs all of them.
_TOGETHER = ("tests/gallery/",)

#: Pages whose commands are run, most of them against a server.
_RUN_PAGES = (
    "client", "cluster", "estimates", "http", "import", "load", "own_model", "prometheus", "readme",
    "resident_graphs", "training", "versions",
)  # fmt: skip
#: Where tests are `live`: they start whole servers, clusters or commands that ask them.
_LIVE = (
    "tests/cluster/",
    "tests/e2e/",
    "tests/gallery/",
    "tests/interop/",
    "tests/rest/test_life.py",
    *(f"tests/docs/test_{page}.py" for page in _RUN_PAGES),
)
#: Those that use this fixture are, wherever they are: it starts a server for load generators.
_LIVE_FIXTURE = "fake_server"

# Before torch is imported: processes of tests, each with a thread for every core, wait for each
# other in every operator. Servers that tests start inherit it, and lanes have one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before grpc is imported: its handlers of a fork abort a child that a test forks beside calls.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example takes, and making it up, is up to what else the machine does. The same
# examples every time; others are tried by `make explore`.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", settings.get_profile("tests"), derandomize=False, max_examples=1000
)
settings.load_profile("tests")

# Tests may run beside other programs, and lanes that give way to them would take minutes.
ServerProcess.lane_niceness = 0
ServerProcess.models_write = True
ServerProcess.front = os.environ.get("FRONT")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all test modules without searches for garbage, of which each goes through them all."""
    with imports_uncollected():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if (
            item.nodeid.startswith(_LIVE)
            or item.get_closest_marker("browser")
            or _LIVE_FIXTURE in item.fixturenames
        ):
            item.add_marker("live")


def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, a process runs whole files, or all files of certain folders."""
    if config.getoption("dist") != "loadfile":
        return None
    # Where xdist is not installed, nobody calls this.
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            together = (folder for folder in _TOGETHER if nodeid.startswith(folder))
            return next(together, super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _logging_as_before():
    """A command run within the test sets up logging for its process; the next test has pytest's."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if root.handlers != handlers or root.level != level:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)
