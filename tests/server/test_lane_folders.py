"""What the temporary files of a lane count, whatever a model makes of them."""

import os

import pytest

from serve.scratch import folder_of, temporary_folder
from serve.server.lanes.lane_folders import LEAST_BYTES, temporary_bytes

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    """The folder for temporary files of this process, as of a lane's."""
    with temporary_folder():
        found = folder_of(os.getpid())
        found.mkdir()
        yield found


@pytest.fixture
def count(folder):
    """Counts beyond what this process holds already: files of the test's own output."""
    before = temporary_bytes(os.getpid(), 1 << 40)

    def found(most_bytes=1 << 40):
        return temporary_bytes(os.getpid(), most_bytes) - before

    return found


def test_files_are_counted_once_and_with_those_that_have_no_name(folder, count):
    (folder / "one").write_bytes(bytes(MIB))
    os.link(folder / "one", folder / "again")
    assert MIB <= count() < 2 * MIB
    with (folder / "two").open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        os.unlink(folder / "two")
        assert 2 * MIB <= count() < 3 * MIB


def test_empty_files_count_and_no_more_are_looked_at_than_may_be_there(folder, count):
    for number in range(100):
        (folder / str(number)).touch()
    assert count() == 100 * LEAST_BYTES
    assert temporary_bytes(os.getpid(), 10 * LEAST_BYTES) == 11 * LEAST_BYTES


def test_folders_are_counted_however_deep_they_are(folder, count):
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
        os.close(here)
    assert count() >= 1500 * LEAST_BYTES


def test_links_are_not_followed(folder, count, tmp_path):
    (tmp_path / "large").write_bytes(bytes(MIB))
    (folder / "link").symlink_to(tmp_path)
    assert count() == LEAST_BYTES
