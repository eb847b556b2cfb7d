"""What holds for tests of commands, which run within the tests' process."""

import pytest

from serve.server.lanes.processes import kill_all


@pytest.fixture(scope="module", autouse=True)
def _fork_server_of_no_command():
    """End the fork server that a command has started: its temporary folder is the command's.

    Later tests would have lanes with that folder, which may write in no other.
    """
    yield
    kill_all()
