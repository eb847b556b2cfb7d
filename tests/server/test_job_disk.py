"""A job's process is ended once it takes more disk than it may, its graph apart."""

import os
import threading

import pytest

from bench.kit.waiting import wait_for
from serve.server.lanes.lane_folders import disk_bytes
from serve.server.training import job_disk
from serve.server.training.job_disk import JobDisk
from serve.server.training.job_folder import JobFolder

MIB = 1 << 20


class Process:
    """This process, in the place of a job's."""

    def __init__(self):
        self.pid = os.getpid()
        self.ended = threading.Event()

    def kill(self):
        self.ended.set()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(job_disk, "_EVERY_S", 0.01)
    found = JobFolder(tmp_path)
    found.shared.mkdir()
    (found.shared / "graph.safetensors").write_bytes(bytes(8 * MIB))
    return found


@pytest.fixture
def disk(folder):
    """May take 2 MiB beside the graph, and what this process has open in the same file system."""
    open_bytes = disk_bytes(os.getpid(), (folder.shared,), 1 << 40) - 8 * MIB
    return JobDisk(folder, 2 * MIB + open_bytes)


def test_what_is_in_its_folder_counts_but_for_the_graph(folder, disk):
    process = Process()
    (folder.shared / "checkpoint.safetensors").write_bytes(bytes(MIB))
    assert not disk._look(process)
    with disk.watched(process):
        (folder.shared / "more").write_bytes(bytes(2 * MIB))
        wait_for(process.ended.is_set, "the process to be ended")
    assert "training.max_files" in disk.exceeded


def test_a_graph_that_grows_counts(folder, disk):
    (folder.shared / "graph.safetensors").write_bytes(bytes(11 * MIB))
    assert disk._look(Process())


def test_a_watch_ends_with_its_process(folder, disk):
    process = Process()
    with disk.watched(process):
        process.pid = None
    with disk.watched(Process()):
        pass
    assert "job disk" not in {thread.name for thread in threading.enumerate()}
    assert not disk.exceeded
