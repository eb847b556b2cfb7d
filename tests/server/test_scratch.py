"""The folder for temporary files: private, gone afterwards, also after a kill."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve.scratch import own_folder, temporary_folder

CHILD = """
import tempfile, time
from serve.scratch import temporary_folder
with temporary_folder():
    tempfile.NamedTemporaryFile(delete=False).close()
    print(tempfile.gettempdir(), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def parent(monkeypatch):
    """An empty folder for temporary files, with a short path."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def started(script=CHILD):
    """A process with a folder of its own, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def ended(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_files_of_this_process_and_its_children_go_with_the_folder(parent):
    with temporary_folder():
        told = [sys.executable, "-c", "import tempfile; print(tempfile.mkstemp()[1])"]
        child = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
        own = tempfile.mkstemp()[1]
        (folder,) = parent.iterdir()
        assert Path(child).parent == Path(own).parent == folder
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(parent.iterdir()) == []
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(parent)


def test_what_a_killed_process_left_is_removed_and_nothing_else(parent):
    dead, dead_folder = started()
    alive, alive_folder = started()
    results = parent / "gnnserve-results"
    results.mkdir()
    (results / "kept").touch()
    try:
        assert len(list(dead_folder.iterdir())) == 2
        ended(dead)
        with temporary_folder():
            assert not dead_folder.exists()
            assert len(list(alive_folder.iterdir())) == 2
            assert (results / "kept").exists(), "a user's own folder"
        assert {*parent.iterdir()} == {alive_folder, results}
    finally:
        ended(alive)


def test_a_process_of_a_server_has_a_folder_and_removes_those_of_ended_ones(parent):
    leaves = (
        "import tempfile; from serve.scratch import own_folder; own_folder(); "
        "tempfile.NamedTemporaryFile(delete=False).close(); print(tempfile.gettempdir())"
    )

    def ended_process():
        told = subprocess.run(
            [sys.executable, "-c", leaves], capture_output=True, text=True, check=True
        )
        return Path(told.stdout.strip())

    with temporary_folder():
        (folder,) = parent.iterdir()
        first = ended_process()
        assert first.parent == folder
        assert len(list(first.iterdir())) == 1
        assert first.stat().st_mode & 0o777 == 0o700
        second = ended_process()
        assert not first.exists()
        assert second.exists()
        running, running_folder = started(leaves + "; import sys, time; sys.stdout.flush(); "
                                          "time.sleep(600)")  # fmt: skip
        try:
            assert not second.exists()
            third = ended_process()
            assert running_folder.exists()
        finally:
            ended(running)
        assert third.exists()
    assert list(parent.iterdir()) == []


def test_folders_within_folders_are_removed_however_deep(parent):
    """A model that leaves them keeps no lane from starting, nor the server from tidying up."""
    kept = parent / "kept"
    kept.mkdir()
    (kept / "file").touch()
    deep = (
        "import os, tempfile; from serve.scratch import own_folder; own_folder();"
        f"os.chdir(tempfile.gettempdir()); os.symlink({str(kept)!r}, 'link');"
        "[(os.mkdir('d'), os.mkdir('e', 0), os.chdir('d')) for _ in range(3000)];"
        "open('file', 'w').close(); print(tempfile.gettempdir())"
    )
    with temporary_folder():
        (folder,) = set(parent.iterdir()) - {kept}
        told = [sys.executable, "-c", deep]
        first = Path(subprocess.run(told, capture_output=True, text=True, check=True).stdout[:-1])
        assert first.parent == folder
        before = os.environ["TMPDIR"], tempfile.tempdir
        own_folder()
        os.environ["TMPDIR"], tempfile.tempdir = before
        assert not first.exists()
    assert list(parent.iterdir()) == [kept]
    assert list(kept.iterdir()) == [kept / "file"]


def test_outside_of_a_server_no_folder_is_made(parent):
    own_folder()
    assert tempfile.gettempdir() == str(parent)
    assert list(parent.iterdir()) == []


def test_a_path_too_long_for_sockets_is_not_used(parent, monkeypatch):
    long = parent / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with temporary_folder():
        assert Path(tempfile.gettempdir()).parent == Path("/tmp")
    assert list(long.iterdir()) == []


def test_a_process_with_a_fork_server_ends_silently_and_leaves_nothing(parent):
    script = """
import multiprocessing, serve.scratch
if __name__ == "__main__":
    with serve.scratch.temporary_folder():
        process = multiprocessing.get_context("forkserver").Process(target=print)
        process.start()
        process.join()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    assert list(parent.iterdir()) == []
