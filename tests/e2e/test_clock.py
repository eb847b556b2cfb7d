"""A server whose clock is set, and that stands still: times stay right.

The wall clock is set two hours ahead, two hours back, and three days ahead, by a library in the
server's processes (``bench.chaos.stepped_clock``). `STOPPED_S=60` has it stand still for a minute.
"""

import json
import os
import signal
import time
from contextlib import suppress

import pytest

from bench.chaos.stepped_clock import SteppedClock
from bench.kit.servers import ServerProcess
from tests.e2e.support import GOOD, infer, raw_channel
from tests.processes import descendants, http_get, rows, wait_for

HOUR_S = 3600
STEPS_S = (2 * HOUR_S, -2 * HOUR_S, 72 * HOUR_S)
STOPPED_S = float(os.environ.get("STOPPED_S", 3))
#: Rows have the time that the server's clock had, within what a busy machine takes.
NEAR_S = 60.0


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return SteppedClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def server(clock, tmp_path_factory):
    sections = {"models": {"load": ["gcn"]}}
    folder = tmp_path_factory.mktemp("stepped")
    with ServerProcess(folder, sections=sections, environment=clock.environment) as found:
        yield found


def ask(server):
    """Ask for one answer; return its row, which has the server's time."""
    before = {row["request_uid"] for row in rows(server)}
    with raw_channel(server) as call:
        infer(call, "gcn", GOOD)

    def new():
        found = [row for row in rows(server) if row["request_uid"] not in before]
        return found[0] if found else None

    return wait_for(new, "its row")


def answered_since(server, since):
    """Requests of the report of the last `since`, by the server."""
    status, text = http_get(server, f"/report.json?since={since}")
    assert status == 200, text
    return json.loads(text)["requests"]


@pytest.mark.slow
@pytest.mark.parametrize("step_s", STEPS_S)
def test_rows_and_reports_follow_a_clock_that_is_set(server, clock, step_s):
    ask(server)
    clock.step(clock.offset_s + step_s)
    # The thread that writes rows sees it within a second or two.
    told = f"set {'ahead' if step_s > 0 else 'back'} by {abs(step_s)}."
    wait_for(lambda: ask(server) and told in server.log.read_text(), told)
    row = ask(server)
    server_s = time.time() + clock.offset_s
    assert abs(row["arrived_unix_ns"] / 1e9 - server_s) < NEAR_S
    assert 0 < row["latency_ns"] < NEAR_S * 1e9
    assert all(row[stage] >= 0 for stage in ("queue_ns", "run_ns", "answer_ns", "quet_ns"))
    # What came before a step ahead is not of the last hour; rows that lie ahead of the clock are.
    recent = answered_since(server, "1h")
    kept = [one["arrived_unix_ns"] / 1e9 for one in rows(server)]
    assert recent == sum(arrived_s > server_s - HOUR_S for arrived_s in kept)
    assert step_s < 0 or recent < len(kept)


@pytest.mark.slow
def test_a_server_that_stands_still_goes_on_with_the_right_time(server, clock):
    pids = [server.pid, *descendants(server.pid)]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
    finally:
        for pid in reversed(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    row = ask(server)
    assert abs(row["arrived_unix_ns"] / 1e9 - (time.time() + clock.offset_s)) < NEAR_S
    assert 0 < row["latency_ns"] < NEAR_S * 1e9
    assert answered_since(server, "1m") >= 1
    assert http_get(server, "/v2/health/ready")[0] == 200
    assert "Traceback" not in server.log.read_text()
