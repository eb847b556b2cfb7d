"""Send many mixed requests at a high load, then check that nothing of them is left.

    python -m bench.live.soak [--quick] [--requests 10000] [--rho 0.8]

A server of its own gets an open-loop Poisson load of all four demo models (`gnnserve load`), after
a warm-up that has made whatever is made once. Checked afterwards: every request was answered once
and has its row; nothing is reserved or waiting; files, threads, processes and named shared memory
are as before; the server stops with exit code 0 and leaves no process. Exit code 1 when a check
fails.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.kit.live_setup import OURS
from bench.kit.processes import descendants, is_running, metric, rows, shared_memory_names
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess

WARM_UP_REQUESTS = 100
#: Connections of clients that are gone, and rows on their way, need a moment; on a machine that
#: does much else, a long one.
SETTLE_S = 120.0
#: What a server holds that must be the same before and after.
SAME = ("processes", "reserved, waiting, restarted, lost")
#: Answers being written at once, besides the requests in flight.
WRITING = 64
NOUGHTS = (
    "gnnserve_memory_reserved_bytes",
    "gnnserve_queue_depth",
    "gnnserve_lane_restarts_total",
    "gnnserve_report_rows_dropped_total",
)
SCRIPT = Script(
    "soak",
    full={"requests": 10_000, "rho": 0.8},
    quick={"requests": 50, "rho": 0.3},
    tables=[
        Table("Checks", "checks", {
            "what": "{what}", "wanted": "{wanted}", "found": "{found}", "passed": "{passed}",
        })
    ],
)  # fmt: skip
Check = dict[str, Any]


def check(what: str, wanted: Any, found: Any, passed: bool | None = None) -> Check:
    """Return a check; it passes where both are equal unless `passed` is given."""
    passed = wanted == found if passed is None else passed
    return {"what": what, "wanted": wanted, "found": found, "passed": passed}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the load's summary and all checks."""
    with tempfile.TemporaryDirectory() as folder:
        load, checks = soak(Path(folder), options)
    return {"system": OURS, "load": load, "checks": checks}


def soak(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """Return the load's summary, and what was checked."""
    names = shared_memory_names()
    policy, _, discipline = OURS.partition("+")
    with ServerProcess(
        folder, policy=policy, discipline=discipline, usual_calibrations=True
    ) as server:
        send(server, WARM_UP_REQUESTS, options.rho, seed=1)
        warm_up = settled(lambda: rows(server), lambda found: len(found) == WARM_UP_REQUESTS)
        before = stable(lambda: footprint(server))
        load = send(server, options.requests, options.rho, seed=0)
        total = len(warm_up) + options.requests
        told = settled(lambda: rows(server), lambda found: len(found) == total)
        after = settled(lambda: footprint(server), lambda found: not_more(found, before))
        running = [server.pid, *before["processes"]]
        exit_code = server.stop()
    left = settled(lambda: [pid for pid in running if is_running(pid)], lambda pids: not pids)
    told = told[len(warm_up) :]
    # The server makes a thread for each request in flight and keeps it; an answer is still being
    # written when its request counts as ended.
    new_threads = max(0, most_in_flight(told) - most_in_flight(warm_up)) + WRITING
    return load, [
        *answer_checks(load, told, options.requests),
        check("open files besides those before", {}, more_files(after, before)),
        *(check(what, before[what], after[what]) for what in SAME),
        check(
            "threads", f"at most {before['threads'] + new_threads}", after["threads"],
            after["threads"] <= before["threads"] + new_threads,
        ),
        check("exit code", 0, exit_code),
        check("processes that run on", [], left),
        check("named shared memory left", [], sorted(shared_memory_names() - names)),
    ]  # fmt: skip


def send(server: ServerProcess, requests: int, rho: float, seed: int) -> dict[str, Any]:
    """Load the server; return the summary of `gnnserve load --json`."""
    command = [
        *(sys.executable, "-m", "loadgen", "--target", server.target, "--workload", "mix"),
        *("--rho", str(rho), "--requests", str(requests), "--seed", str(seed), "--json"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def answer_checks(load: dict[str, Any], told: list[dict[str, Any]], requests: int) -> list[Check]:
    """Check that each request has one answer, by the client and by the database."""
    by_status = Counter(row["status"] for row in told)
    ran = [row for row in told if row["status"] == "OK"]
    return [
        check("requests that ended at the client", requests, load["requests"]),
        check("with an answer or a refusal", requests, sum(ends(load["by_status"]).values())),
        check("rows", requests, len(told)),
        check("rows by end, as at the client", ends(load["by_status"]), ends(by_status)),
        check("different request uids", requests, len({row["request_uid"] for row in told})),
        check("run at the first attempt", len(ran), sum(row["attempt"] == 1 for row in ran)),
    ]


def ends(by_status: Mapping[str, int]) -> dict[str, int]:
    """Return how many requests had a result, were refused, or ran out of time.

    A client that runs out of time cancels, so the server may see either status.
    """
    return {
        "answered": by_status.get("OK", 0),
        "refused": by_status.get("RESOURCE_EXHAUSTED", 0),
        "given up": by_status.get("DEADLINE_EXCEEDED", 0) + by_status.get("CANCELLED", 0),
    }


def footprint(server: ServerProcess) -> dict[str, Any]:
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


def more_files(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, int]:
    """Return the open files by kind that were not open before.

    Fewer are fine: connections of clients that were gone may still have been open before.
    """
    return dict(Counter(after["open files"]) - Counter(before["open files"]))


def not_more(after: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return True when nothing is held that was not held before, threads apart."""
    return not more_files(after, before) and all(after[what] == before[what] for what in SAME)


def most_in_flight(told: list[dict[str, Any]]) -> int:
    """Return the most requests that were in flight at one time."""
    moves = [(row["arrived_unix_ns"], 1) for row in told]
    moves += [(row["arrived_unix_ns"] + row["latency_ns"], -1) for row in told]
    return max(accumulate(step for _, step in sorted(moves)))


def settled(look: Callable[[], Any], enough: Callable[[Any], bool]) -> Any:
    """Return what `look` finds once that is enough, or after `SETTLE_S`."""
    give_up = time.monotonic() + SETTLE_S
    while not enough(found := look()) and time.monotonic() < give_up:
        time.sleep(0.25)
    return found


def stable(look: Callable[[], Any]) -> Any:
    """Return what `look` finds twice in a row: connections close after their clients are gone."""
    found = look()
    while True:
        before = found
        time.sleep(0.5)
        if (found := look()) == before:
            return found


def _links(pid: int) -> list[str]:
    """Return the targets of the process's open files."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return links


if __name__ == "__main__":
    content = SCRIPT.main(measure, __doc__)
    raise SystemExit(not all(row["passed"] for row in content["checks"]))
