import pytest

from serve.obs.store import RecordStore
from tests.obs.builders import RUN, traffic


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """A report database with 2,000 believable requests."""
    path = tmp_path_factory.mktemp("report") / "gnnserve.db"
    store = RecordStore(path, RUN)
    for row in traffic(2000):
        store.insert(row)
    store.close()
    return path
