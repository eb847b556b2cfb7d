"""A process hears of children that ended, and of none that was stopped or went on."""

import os
import signal
import subprocess

import pytest

from bench.kit.waiting import eventually
from serve.ipc.child_signals import hear_only_of_ends


@pytest.fixture
def heard():
    """Numbers of the signals about children, as they come."""
    numbers = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGCHLD, before)


def stop_and_go_on(child):
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)


def test_only_the_end_of_a_child_is_told(heard):
    with subprocess.Popen(["sleep", "60"]) as child:
        stop_and_go_on(child)
        eventually(lambda: heard)  # the kernel's default
        heard.clear()
        hear_only_of_ends()
        stop_and_go_on(child)
        assert not heard
        child.kill()
        child.wait()
    eventually(lambda: heard)
