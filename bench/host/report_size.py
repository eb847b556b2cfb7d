"""Measure what a report of a large database takes, in time and memory.

    python -m bench.host.report_size [--quick] [--rows 1000000] [--repeats 5]

The database has a row for each request of a made-up day of four models and three tenants. Each form
of the report is made by `gnnserve report` in a process of its own; its time includes the start of
Python, and its memory is the process's peak resident size. Asked for a million rows: 3 s, 200 MB.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.store import RecordStore

_MS = 1_000_000
_DAY_NS = 86_400 * 10**9
_START_UNIX_NS = 1_790_000_000 * 10**9
_COMMIT_ROWS = 10_000
#: What is asked of a million rows.
AIM_S, AIM_BYTES = 3.0, 200e6
MODELS = {"gcn": 1.0, "sage": 0.7, "gin": 0.6, "gat": 2.4}
FORMS = {"tables": (), "JSON": ("--json",), "page": ("--html", "-"), "last hour": ("--since", "1h")}
#: The server that the made-up requests went to.
MADE_UP_RUN = ServerRun(
    started_unix_ns=_START_UNIX_NS,
    version="0",
    device="cpu",
    lanes=4,
    budget_bytes=4 * 2**30,
    policy="slack",
    discipline="preemptive",
    window="adaptive",
    qos_factor=2.0,
    pid=1,
)
SCRIPT = Script(
    "report_size",
    full={"rows": 1_000_000, "repeats": 5},
    quick={"rows": 3000, "repeats": 1},
    tables=[
        Table("A report", "forms", {
            "form": "{form}", "time, s": "{seconds:.2f}", "most, s": "{most_s:.2f}",
            "processor time, s": "{processor_s:.2f}",
            "memory, MB": "{megabytes:,.0f}",
        })
    ],
)  # fmt: skip


def requests(
    count: int, begin_unix_ns: int = _START_UNIX_NS, span_ns: int = _DAY_NS
) -> Iterator[RequestRecord]:
    """Yield requests at even distances from a time on, in order of arrival."""
    rng = random.Random(0)
    models = list(MODELS)
    for number in range(count):
        model = rng.choice(models)
        nodes = int(100 * 80 ** rng.random())
        run_ns = int((0.4 + nodes / 900) * MODELS[model] * _MS)
        queue_ns = int(rng.expovariate(1 / (0.6 * run_ns)))
        latency_ns = run_ns + queue_ns + _MS // 2
        target_ns = 2 * run_ns + _MS
        late = latency_ns > target_ns
        yield RequestRecord(
            request_uid=f"{number:020x}",
            model=model,
            version="1",
            tenant=rng.choice(("", "a", "b")),
            arrived_unix_ns=begin_unix_ns + number * span_ns // count,
            num_nodes=nodes,
            num_edges=8 * nodes,
            policy="slack",
            discipline="preemptive",
            executor="csr",
            device="cpu",
            lane=number % 4,
            attempt=1,
            group_id=number,
            group_size=1,
            co_runners=rng.randrange(3),
            merged=1,
            queue_ns=queue_ns,
            prepare_ns=_MS // 4,
            quet_ns=queue_ns,
            run_ns=run_ns,
            answer_ns=_MS // 4,
            latency_ns=latency_ns,
            solo_estimate_ns=run_ns + _MS // 2,
            run_estimate_ns=run_ns,
            qos_target_ns=target_ns,
            violated=late,
            cause=rng.choice(("queue", "interference", "overload")) if late else "",
            pmc_estimate_bytes=nodes * 2000,
            reserve_bytes=nodes * 2200,
            pmc_measured_bytes=nodes * 1900,
        )


def make_database(path: Path, rows: int) -> None:
    """Write a database of so many rows."""
    store = RecordStore(path, MADE_UP_RUN)
    for number, record in enumerate(requests(rows), 1):
        store.insert(record)
        if number % _COMMIT_ROWS == 0:
            store.commit()
    store.commit()
    store.close()


def timed(database: Path, arguments: tuple[str, ...]) -> tuple[float, float, int]:
    """Return seconds, processor seconds and peak bytes; raises RuntimeError when it fails."""
    command = [sys.executable, "-m", "serve", "report", "--db", str(database), *arguments]
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    taken_s = usage.ru_utime + usage.ru_stime
    return time.monotonic() - started, taken_s, usage.ru_maxrss * 1024


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each form of the report."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "report.db"
        make_database(database, options.rows)
        forms = []
        for form, arguments in FORMS.items():
            found = [timed(database, arguments) for _ in range(options.repeats)]
            seconds, taken = [one for one, _, _ in found], [one for _, one, _ in found]
            forms.append({
                "form": form,
                "seconds": median(seconds),
                "most_s": max(seconds),
                "processor_s": median(taken),
                "megabytes": max(peak for _, _, peak in found) / 1e6,
            })  # fmt: skip
        size = database.stat().st_size
    aims = {"seconds": AIM_S, "megabytes": AIM_BYTES / 1e6}
    return {"rows": options.rows, "database_bytes": size, "aims": aims, "forms": forms}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
