"""Many mixed requests at a high load leave nothing behind.

A server of its own gets an open-loop Poisson load of all four demo models (`gnnserve load`), after
a warm-up that has made whatever is made once. `SOAK_REQUESTS=10000 SOAK_RHO=0.8` makes it long.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from bench.kit.servers import ServerProcess
from tests.processes import PATIENCE_S, descendants, is_running, metric, rows, shared_memory_names

REQUESTS = int(os.environ.get("SOAK_REQUESTS", 300))
#: A load that a machine can carry unless it is very busy; then some are refused, and told so.
RHO = float(os.environ.get("SOAK_RHO", 0.4))
WARM_UP_REQUESTS = 100
#: What a server holds that must be the same before and after.
SAME = ("processes", "reserved, waiting, restarted, lost")
#: Answers being written at once, besides the requests in flight.
WRITING = 64
NOUGHTS = (
    "gnnserve_memory_reserved_bytes",
    "gnnserve_pool_used_bytes",
    "gnnserve_requests_inside",
    "gnnserve_queue_depth",
    "gnnserve_lane_restarts_total",
    "gnnserve_report_rows_dropped_total",
)


@pytest.mark.slow
@pytest.mark.timeout(900 + REQUESTS)
def test_a_soak_leaves_nothing_behind(tmp_path):
    names = shared_memory_names()
    with ServerProcess(tmp_path, policy="slack", discipline="preemptive") as server:
        send(server, WARM_UP_REQUESTS, seed=1)
        warm_up = settled(lambda: rows(server), lambda found: len(found) == WARM_UP_REQUESTS)
        before = stable(lambda: footprint(server))
        load = send(server, REQUESTS, seed=0)
        total = len(warm_up) + REQUESTS
        told = settled(lambda: rows(server), lambda found: len(found) == total)
        after = settled(lambda: footprint(server), lambda found: not_more(found, before))
        running = [server.pid, *before["processes"]]
        assert server.stop() == 0
    told = told[len(warm_up) :]
    assert_each_has_one_answer(load, told)
    assert more_files(after, before) == {}
    assert {what: after[what] for what in SAME} == {what: before[what] for what in SAME}
    # The server makes a thread for each request in flight and keeps it; an answer is still being
    # written when its request counts as ended.
    new_threads = max(0, most_in_flight(told) - most_in_flight(warm_up)) + WRITING
    assert after["threads"] <= before["threads"] + new_threads
    assert settled(lambda: [pid for pid in running if is_running(pid)], lambda left: not left) == []
    assert shared_memory_names() - names == set()


def send(server, requests, seed):
    """Load the server; return the summary of `gnnserve load --json`."""
    command = [
        *(sys.executable, "-m", "loadgen", "--target", server.target, "--workload", "mix"),
        *("--rho", str(RHO), "--requests", str(requests), "--seed", str(seed), "--json"),
    ]
    limit_s = PATIENCE_S + requests
    return json.loads(subprocess.check_output(command, timeout=limit_s))


def assert_each_has_one_answer(load, told):
    """Each request has one answer, by the client and by the database."""
    assert load["requests"] == sum(ends(load["by_status"]).values()) == len(told) == REQUESTS
    assert ends(Counter(row["status"] for row in told)) == ends(load["by_status"])
    assert 0 < load["answered"] <= REQUESTS
    assert len({row["request_uid"] for row in told}) == REQUESTS
    assert {row["attempt"] for row in told if row["status"] == "OK"} == {1}


def ends(by_status):
    """Return how many requests had a result, were refused, or ran out of time.

    A client that runs out of time cancels, so the server may see either status.
    """
    return {
        "answered": by_status.get("OK", 0),
        "refused": by_status.get("RESOURCE_EXHAUSTED", 0),
        "given up": by_status.get("DEADLINE_EXCEEDED", 0) + by_status.get("CANCELLED", 0),
    }


def footprint(server):
    """Return what the server holds."""
    # Numbers of pipes and sockets differ each time; kinds and counts do not.
    files = Counter(re.sub(r":?\[.*\]", "", Path(link).name) for link in _links(server.pid))
    threads = [name.read_text() for name in Path(f"/proc/{server.pid}/task").glob("*/comm")]
    return {
        "open files": dict(sorted(files.items())),
        # gRPC's own threads come and go, and have other names.
        "threads": sum(name.startswith("python") for name in threads),
        "processes": sorted(descendants(server.pid)),
        "reserved, waiting, restarted, lost": [metric(server, name) for name in NOUGHTS],
    }


def more_files(after, before):
    """Return the open files by kind that were not open before.

    Fewer are fine: connections of clients that were gone may still have been open before.
    """
    return dict(Counter(after["open files"]) - Counter(before["open files"]))


def not_more(after, before):
    """Return True when nothing is held that was not held before, threads apart."""
    return not more_files(after, before) and all(after[what] == before[what] for what in SAME)


def most_in_flight(told):
    """Return the most requests that were in flight at one time."""
    moves = [(row["arrived_unix_ns"], 1) for row in told]
    moves += [(row["arrived_unix_ns"] + row["latency_ns"], -1) for row in told]
    return max(accumulate(step for _, step in sorted(moves)))


def settled(look, enough):
    """Return what `look` finds once that is enough, or after `PATIENCE_S`."""
    give_up = time.monotonic() + PATIENCE_S
    while not enough(found := look()) and time.monotonic() < give_up:
        time.sleep(0.25)
    return found


def stable(look):
    """Return what `look` finds twice in a row: connections close after their clients are gone."""
    found = look()
    while True:
        before = found
        time.sleep(0.5)
        if (found := look()) == before:
            return found


def _links(pid):
    """Return the targets of the process's open files."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return links
