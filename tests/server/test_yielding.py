"""A process group that stands still on demand, and never for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.processes import descendants, wait_for
from serve.server.lanes.yielding import Yielding


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def group():
    """The first process of a group of three."""
    command = ["sh", "-c", "sleep 600 & sleep 600 & wait"]
    process = subprocess.Popen(command, start_new_session=True)
    wait_for(lambda: len(descendants(process.pid)) == 2, "its children")
    yield process.pid
    os.killpg(process.pid, 9)
    process.wait()


class Lanes:
    execute = False


def members(pid):
    return [pid, *descendants(pid)]


def test_all_of_it_stands_still_and_goes_on(group):
    lanes = Lanes()
    yielding = Yielding(group, lambda: lanes.execute)
    for _ in range(3):
        lanes.execute = True
        yielding.look()
        yielding.look()
        wait_for(lambda: all(map(stands_still, members(group))), "all to stand still")
        lanes.execute = False
        yielding.look()
        wait_for(lambda: not any(map(stands_still, members(group))), "all to go on")


def test_it_goes_on_for_good_at_the_end(group):
    yielding = Yielding(group, lambda: True)
    yielding.look()
    wait_for(lambda: all(map(stands_still, members(group))), "all to stand still")
    yielding.end()
    yielding.look()
    wait_for(lambda: not any(map(stands_still, members(group))), "all to go on")


def test_a_group_that_is_not_there_yet_is_stopped_later():
    command = (
        "import os, sys, time; input(); os.setpgid(0, 0); print(1, flush=True); time.sleep(9e5)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yielding = Yielding(process.pid, lambda: True)
        yielding.look()
        assert not stands_still(process.pid)
        process.stdin.write("now\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1\n"
        yielding.look()
        wait_for(lambda: stands_still(process.pid), "it to stand still")
    finally:
        process.kill()
        process.communicate()
