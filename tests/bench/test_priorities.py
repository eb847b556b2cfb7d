"""Priorities that a bench gives to the threads of a server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from bench.kit.priorities import set_priorities

_SLEEPS = "import os, sys; os.nice(7); print('up', flush=True); sys.stdin.read()"


@contextmanager
def processes(count: int) -> Iterator[list[int]]:
    """Yield the ids of processes of niceness 7 that sleep until the end."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _SLEEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            assert one.stdout is not None
            assert one.stdout.readline() == b"up\n"
            found.append(one.pid)
        yield found  # the end of its input ends each


def test_short_slices_leave_every_class_and_niceness_as_they_are():
    with processes(3) as (server, lane, client):
        try:
            set_priorities("short", server, [lane], client)
        except OSError as error:
            pytest.skip(f"not allowed here: {error}")
        for other in (server, lane, client):
            assert os.sched_getscheduler(other) == os.SCHED_OTHER
            assert os.getpriority(os.PRIO_PROCESS, other) == 7


def test_real_time_priorities_rise_from_lanes_to_the_server_and_the_client_gives_its_own_back():
    with processes(3) as (server, lane, client):
        try:
            set_priorities("realtime", server, [lane], client)
        except OSError as error:
            pytest.skip(f"not allowed here: {error}")
        levels = [os.sched_getparam(pid).sched_priority for pid in (lane, client, server)]
        assert levels == [1, 2, 3]
        set_priorities("plain", server, [lane], client)
        assert os.sched_getscheduler(client) == os.SCHED_OTHER


def test_a_way_that_is_none_is_told():
    with pytest.raises(ValueError, match="priorities: 'fast' is none of plain, short"):
        set_priorities("fast", os.getpid(), [], os.getpid())
