"""Many mixed requests at a high load, then a look at what is left of them: nothing, it must be.

    python -m bench.live.soak [--requests 10000] [--rho 0.8] [--policy P] [--discipline D]
        [--seed S]

A server of its own gets an open-loop Poisson load of all four demo models (`gnnserve load`), after
a warm-up that has made whatever is made once. Checked afterwards: every request was answered, once,
and has its row; nothing is reserved or waiting; files, threads, processes and named shared memory
are as before; the server stops with exit code 0 and nothing of it runs on. Writes
bench/results/soak.json; exit code 1 when a check fails.
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
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.processes import descendants, is_running, metric, rows, shared_memory_names
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from serve.config import ModelsConfig, SchedulingConfig

RESULT = RESULTS / "soak.json"
WARM_UP_REQUESTS = 100
#: Connections of clients that are gone, and rows on their way, need a moment; on a machine that
#: does much else, a long one.
SETTLE_S = 120.0
#: Of what a server holds, that which is the same before and after.
SAME = ("processes", "reserved, waiting, restarted, lost")
#: Answers being written at once, besides the requests in flight.
WRITING = 64
#: Reserved, waiting, restarted, lost.
NOUGHTS = (
    "gnnserve_memory_reserved_bytes",
    "gnnserve_queue_depth",
    "gnnserve_lane_restarts_total",
    "gnnserve_report_rows_dropped_total",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    what: str
    wanted: Any
    found: Any
    passed: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rho", type=float, default=0.8)
    parser.add_argument("--policy", default=SchedulingConfig().policy)
    parser.add_argument("--discipline", default=SchedulingConfig().discipline)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", type=float, default=ModelsConfig().calibration_s)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load, checks = soak(Path(folder), arguments)
    content = {
        "policy": arguments.policy,
        "discipline": arguments.discipline,
        "load": load,
        "checks": [asdict(check) for check in checks],
    }
    write_result(arguments.out, content)
    show(load, checks)
    raise SystemExit(not all(check.passed for check in checks))


def soak(folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    """The load's summary, and what was checked."""
    names = shared_memory_names()
    with ServerProcess(
        folder,
        policy=arguments.policy,
        discipline=arguments.discipline,
        calibration_s=arguments.calibration,
    ) as server:
        send(server, WARM_UP_REQUESTS, arguments.rho, seed=arguments.seed + 1)
        warm_up = settled(lambda: rows(server), lambda found: len(found) == WARM_UP_REQUESTS)
        before = stable(lambda: footprint(server))
        load = send(server, arguments.requests, arguments.rho, seed=arguments.seed)
        total = len(warm_up) + arguments.requests
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
        *answer_checks(load, told, arguments.requests),
        equal("open files besides those before", {}, more_files(after, before)),
        *(equal(what, before[what], after[what]) for what in SAME),
        Check(
            "threads", f"at most {before['threads'] + new_threads}", after["threads"],
            after["threads"] <= before["threads"] + new_threads,
        ),
        equal("exit code", 0, exit_code),
        equal("processes that run on", [], left),
        equal("named shared memory left", [], sorted(shared_memory_names() - names)),
    ]  # fmt: skip


def send(server: ServerProcess, requests: int, rho: float, seed: int) -> dict[str, Any]:
    """Load the server; the summary of `gnnserve load --json`."""
    command = [
        *(sys.executable, "-m", "loadgen", "--target", server.target, "--workload", "mix"),
        *("--rho", str(rho), "--requests", str(requests), "--seed", str(seed), "--json"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def answer_checks(load: dict[str, Any], told: list[dict[str, Any]], requests: int) -> list[Check]:
    """Exactly one answer for each request, as the client and the database see it."""
    by_status = Counter(row["status"] for row in told)
    ran = [row for row in told if row["status"] == "OK"]
    return [
        equal("requests that ended at the client", requests, load["requests"]),
        equal("with an answer or a refusal", requests, sum(ends(load["by_status"]).values())),
        equal("rows", requests, len(told)),
        equal("rows by end, as at the client", ends(load["by_status"]), ends(by_status)),
        equal("different request uids", requests, len({row["request_uid"] for row in told})),
        equal("run at the first attempt", len(ran), sum(row["attempt"] == 1 for row in ran)),
    ]


def ends(by_status: Mapping[str, int]) -> dict[str, int]:
    """How requests ended: with a result, refused as the queue was full, or out of time.

    A client that runs out of time cancels, so the server may see either of the two.
    """
    return {
        "answered": by_status.get("OK", 0),
        "refused": by_status.get("RESOURCE_EXHAUSTED", 0),
        "given up": by_status.get("DEADLINE_EXCEEDED", 0) + by_status.get("CANCELLED", 0),
    }


def footprint(server: ServerProcess) -> dict[str, Any]:
    """What the server holds, once its clients are gone."""
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
    """Open files by kind; connections of clients that were gone may still have been open before."""
    return dict(Counter(after["open files"]) - Counter(before["open files"]))


def not_more(after: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether nothing is held that was not held before, threads apart."""
    return not more_files(after, before) and all(after[what] == before[what] for what in SAME)


def most_in_flight(told: list[dict[str, Any]]) -> int:
    """The most requests that were under way at one time."""
    moves = [(row["arrived_unix_ns"], 1) for row in told]
    moves += [(row["arrived_unix_ns"] + row["latency_ns"], -1) for row in told]
    return max(accumulate(step for _, step in sorted(moves)))


def settled(look: Callable[[], Any], enough: Callable[[Any], bool]) -> Any:
    """What `look` finds once that is enough, or after `SETTLE_S`."""
    give_up = time.monotonic() + SETTLE_S
    while not enough(found := look()) and time.monotonic() < give_up:
        time.sleep(0.25)
    return found


def stable(look: Callable[[], Any]) -> Any:
    """What `look` finds twice in a row: connections of clients that are gone close after them."""
    found = look()
    while True:
        before = found
        time.sleep(0.5)
        if (found := look()) == before:
            return found


def show(load: dict[str, Any], checks: list[Check]) -> None:
    console = Console(highlight=False)
    latency = load["latency_over_qt"]
    console.print(
        f"{load['requests']:,} requests in {load['elapsed_s']:.0f} s at ρ {load['trace']['rho']:g} "
        f"on {load['trace']['lanes']} lanes; {load['late_rate']:.1%} late; latency ÷ target "
        f"p50 {latency['p50']:.2f}, p99 {latency['p99']:.2f}"
    )
    table = Table("", "wanted", "found", "")
    for check in checks:
        mark = "[green]ok[/green]" if check.passed else "[red]no[/red]"
        table.add_row(check.what, _short(check.wanted), _short(check.found), mark)
    console.print(table)


def _short(value: object) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )


def equal(what: str, wanted: Any, found: Any) -> Check:
    return Check(what, wanted, found, wanted == found)


def _links(pid: int) -> list[str]:
    """What the process's open files are."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return links


if __name__ == "__main__":
    main()
