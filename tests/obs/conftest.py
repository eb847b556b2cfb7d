import pytest

from serve.obs.store import RecordStore
from tests.obs.builders import RUN, traffic


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """Return a report database with 2,000 realistic requests."""
    path = tmp_path_factory.mktemp("report") / "gnnserve.db"
    store = RecordStore(path, RUN)
    for row in traffic(2000):
        store.insert(row)
    store.close()
    return path
