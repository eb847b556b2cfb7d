"""A supervised command is started again, renewed, ended in order, and outlives its starter."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bench.kit.result import ROOT
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.cluster.supervised import Supervised
from serve.cluster.supervisor import LEASE, Lease
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
def supervised(tmp_path):
    found = Supervised(tmp_path / "supervised")
    yield found
    found.end(PATIENCE_S)


def start(supervised, code=CHILD, lease_s=PATIENCE_S):
    supervised.start([sys.executable, "-c", code], "v1", lease_s)


def child(supervised):
    """Return the process id of what is supervised, once it has said it."""
    return int(wait_for(lambda: supervised.said().split()[:1], "its process id")[0])


def test_it_is_found_by_others_and_ended_in_order(supervised, tmp_path):
    assert supervised.pid is None
    start(supervised)
    found = Supervised(tmp_path / "supervised")
    assert (found.pid, found.version) == (supervised.pid, "v1")
    pid = child(supervised)
    found.end(PATIENCE_S)
    assert found.pid is None
    assert not is_running(pid)
    assert supervised.said().split() == [str(pid), "ended"]
    found.end(PATIENCE_S)


def test_it_outlives_the_process_that_started_it(supervised, tmp_path):
    code = (
        "import sys; from pathlib import Path; from serve.cluster.supervised import Supervised; "
        "Supervised(Path(sys.argv[1])).start("
        f"[sys.executable, '-c', {CHILD!r}], 'v1', {PATIENCE_S})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "supervised")], cwd=ROOT, start_new_session=True
    )
    assert process.wait(PATIENCE_S) == 0
    assert os.getpgid(supervised.pid) not in (process.pid, os.getpgid(0))
    assert is_running(child(supervised))


def test_one_that_is_killed_is_started_again(supervised):
    start(supervised)
    first = child(supervised)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: supervised.said() and child(supervised) != first, "another")
    assert supervised.pid is not None


def test_what_nobody_wants_ends_in_order(supervised):
    start(supervised, lease_s=0.5)
    pid = child(supervised)
    wait_for(lambda: supervised.pid is None, "the end")
    assert not is_running(pid)
    assert supervised.said().split()[-1] == "ended"


def test_a_lease_that_was_deleted_is_written_anew(supervised, tmp_path):
    start(supervised)
    pid = child(supervised)
    lease = tmp_path / "supervised" / LEASE
    lease.unlink()
    wait_for(lease.exists, "the lease")
    assert is_running(pid)
    supervised.renew()
    supervised.end(PATIENCE_S)
    assert supervised.said().split()[-1] == "ended"


def test_what_has_lost_its_folder_ends_in_order(supervised, tmp_path):
    start(supervised, lease_s=0.5)
    pid = child(supervised)
    shutil.rmtree(tmp_path / "supervised")
    wait_for(lambda: not is_running(pid), "the end")


def test_a_lease_runs_from_its_renewal_whatever_the_clock_says(tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    (tmp_path / LEASE).touch()
    lease = Lease(tmp_path / LEASE)
    for date_s in (0, 10**10, 1):  # as the clock of the machine is set
        os.utime(tmp_path / LEASE, (date_s, date_s))
        assert lease.unwanted_s() == 0
        now_s[0] += 7
        assert lease.unwanted_s() == 7


def test_with_its_supervisor_it_dies(supervised):
    start(supervised)
    pid = child(supervised)
    os.kill(supervised.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid), "the end")
    assert supervised.pid is None


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (1, 3)])
def test_one_that_cannot_start_is_given_up(supervised, tmp_path, code, starts):
    told = tmp_path / "told"
    start(
        supervised,
        f"import sys; open({str(told)!r}, 'a').write('x'); print('why'); sys.exit({code})",
    )
    wait_for(lambda: supervised.pid is None and told.exists(), "the end")
    assert told.read_text() == "x" * starts
    assert supervised.said() == "why\n"


def test_one_that_does_not_end_is_killed(supervised):
    code = CHILD.replace('print("ended", flush=True)', "return").replace("sys.exit(0)", "")
    start(supervised, code)
    pid = child(supervised)
    supervised.end(0.5)
    assert supervised.pid is None
    wait_for(lambda: not is_running(pid), "the end")
