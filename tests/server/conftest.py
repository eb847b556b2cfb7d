"""A repository with a model that misbehaves on demand, and what a leak would show in."""

import os
import threading
from pathlib import Path

import pytest

from tests.e2e.support import Troubled
from tests.processes import descendants, wait_for


@pytest.fixture(scope="session")
def trouble(tmp_path_factory):
    return Troubled(tmp_path_factory.mktemp("repository"), "gcn")


@pytest.fixture(scope="session")
def cores():
    """One or two cores for two lanes."""
    found = sorted(os.sched_getaffinity(0))
    return found[0], found[-1]


def held_by_this_process() -> tuple[set[str], set[str], set[int]]:
    """What could leak: open files, threads, processes below this one."""
    files = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            files.add(f"{entry.name} {entry.readlink()}")
        except OSError:
            continue  # the one that lists them
    threads = {thread.name for thread in threading.enumerate()}
    return files, threads, set(descendants(os.getpid()))


def assert_nothing_more_is_held(before: tuple[set[str], set[str], set[int]]) -> None:
    """Than `before`; what others held then may be gone."""

    def more() -> list[set[str] | set[int]]:
        return [now - then for now, then in zip(held_by_this_process(), before, strict=True)]

    wait_for(lambda: not any(more()), f"the end of {more()}")
