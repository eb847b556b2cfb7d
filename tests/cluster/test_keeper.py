"""What a keeper keeps is started again, renewed, ended in order, and outlives who started it."""

import os
import signal
import subprocess
import sys

import pytest

from bench.kit.result import ROOT
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.cluster.kept import Kept
from tests.processes import is_running

#: Writes its process id, and `ended` when it ends in order.
CHILD = """
import os, signal, sys, time
def end(*_):
    print("ended", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def kept(tmp_path):
    found = Kept(tmp_path / "kept")
    yield found
    found.end(PATIENCE_S)


def start(kept, code=CHILD, lease_s=PATIENCE_S):
    kept.start([sys.executable, "-c", code], "v1", lease_s)


def child(kept):
    """Return the process id of what is kept, once it has said it."""
    return int(wait_for(lambda: kept.said().split()[:1], "its process id")[0])


def test_it_is_found_by_others_and_ended_in_order(kept, tmp_path):
    assert kept.pid is None
    start(kept)
    found = Kept(tmp_path / "kept")
    assert (found.pid, found.version) == (kept.pid, "v1")
    pid = child(kept)
    found.end(PATIENCE_S)
    assert found.pid is None
    assert not is_running(pid)
    assert kept.said().split() == [str(pid), "ended"]
    found.end(PATIENCE_S)


def test_it_outlives_the_process_that_started_it(kept, tmp_path):
    code = (
        "import sys; from pathlib import Path; from serve.cluster.kept import Kept; "
        f"Kept(Path(sys.argv[1])).start([sys.executable, '-c', {CHILD!r}], 'v1', {PATIENCE_S})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "kept")], cwd=ROOT, start_new_session=True
    )
    assert process.wait(PATIENCE_S) == 0
    assert os.getpgid(kept.pid) not in (process.pid, os.getpgid(0))
    assert is_running(child(kept))


def test_one_that_is_killed_is_started_again(kept):
    start(kept)
    first = child(kept)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: kept.said() and child(kept) != first, "another")
    assert kept.pid is not None


def test_what_nobody_wants_ends_in_order(kept):
    start(kept, lease_s=0.5)
    pid = child(kept)
    wait_for(lambda: kept.pid is None, "the end")
    assert not is_running(pid)
    assert kept.said().split()[-1] == "ended"


def test_with_its_keeper_it_dies(kept):
    start(kept)
    pid = child(kept)
    os.kill(kept.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid), "the end")
    assert kept.pid is None


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (1, 3)])
def test_one_that_cannot_start_is_given_up(kept, tmp_path, code, starts):
    told = tmp_path / "told"
    start(kept, f"import sys; open({str(told)!r}, 'a').write('x'); print('why'); sys.exit({code})")
    wait_for(lambda: kept.pid is None and told.exists(), "the end")
    assert told.read_text() == "x" * starts
    assert kept.said() == "why\n"


def test_one_that_does_not_end_is_killed(kept):
    code = CHILD.replace('print("ended", flush=True)', "return").replace("sys.exit(0)", "")
    start(kept, code)
    pid = child(kept)
    kept.end(0.5)
    assert kept.pid is None
    wait_for(lambda: not is_running(pid), "the end")
