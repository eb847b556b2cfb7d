"""One server at a time writes to a database."""

import os
import subprocess
import sys

import pytest

from serve.errors import ConfigError
from serve.obs.ownership import DatabaseOwner
from serve.obs.read import read_rows
from serve.obs.store import RecordStore
from tests.obs.builders import RUN, record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.db"


def test_a_second_server_is_told_who_has_the_database_and_what_to_do(path):
    owner = DatabaseOwner(path)
    store = RecordStore(path, RUN)
    store.insert(record())
    store.commit()
    with pytest.raises(ConfigError) as refused:
        DatabaseOwner(path)
    assert str(refused.value) == (
        f"{path}: process {RUN.pid} writes its report there, and a database is one server's; "
        "stop that one, or name another file in report.database"
    )
    assert len(list(read_rows(path))) == 1
    store.close()
    owner.close()
    DatabaseOwner(path).close()


def test_before_the_first_row_the_other_one_has_no_name(path):
    owner = DatabaseOwner(path)
    with pytest.raises(ConfigError, match="another process writes"):
        DatabaseOwner(path)
    owner.close()


def test_a_server_that_was_killed_leaves_no_lock(path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from serve.obs.ownership import DatabaseOwner\n"
        "owner = DatabaseOwner(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    DatabaseOwner(path).close()


def test_what_cannot_be_opened_is_left_to_sqlite_to_tell(tmp_path):
    DatabaseOwner(tmp_path / "no" / "report.db").close()
    DatabaseOwner(tmp_path).close()
    os.mkfifo(tmp_path / "pipe")
    DatabaseOwner(tmp_path / "pipe").close()


def test_a_new_database_is_its_owners_alone(path):
    DatabaseOwner(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
