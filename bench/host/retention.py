"""Measure what keeping the report's rows within bounds does to files, memory and answers.

    python -m bench.host.retention QUESTION [--quick]

QUESTION is

- soak: 500 requests a second end for an hour. All is done that a server does when a request has
  ended: rows and sums go to the database, metrics are counted, the access log is written, and moved
  away every minute as a rotation of logs would. Rows are kept for `keep_s`. No model runs, so it
  needs little of the machine. Once rows have been deleted for a while, files and memory should be
  flat: asked are ± 10 % and no row lost.
- answers: two servers get the same requests of the demo's GCN at equal distances, in turns. One
  keeps its rows for five seconds, so it deletes as many as it writes; the other keeps all. Answers
  should take as long: `ratio` is that of latencies at the client in neighbouring rounds, with its
  95 % bootstrap interval.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.host.operating import FEATURES, LIMIT_S
from bench.host.report_size import MADE_UP_RUN, requests
from bench.kit.measure import median_interval, ratios
from bench.kit.processes import processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from loadgen.native import NativeSender
from serve.obs.access_log import AccessLog
from serve.obs.metrics import Metrics
from serve.obs.record import RequestRecord
from serve.obs.retention import Retention
from serve.obs.scraped import EngineSnapshot
from serve.obs.sink import RecordSink
from serve.obs.store import RecordStore
from serve.wire.messages import encode_request

#: What is asked of sizes, as a share of their middle.
AIM = 0.1
_NS = 1_000_000_000
#: Records are put in so many portions a second.
_PORTIONS_HZ = 50
_LOOK_S = 10.0
_ROTATE_S = 60.0
#: Different records that are put again and again, with an id and a time of their own.
_DIFFERENT = 5000
#: Percentiles of latencies that are compared.
PERCENTS = (50, 99)
SCRIPTS = {
    "soak": Script(
        "retention_soak",
        full={"minutes": 60.0, "rate": 500, "keep_s": 600.0},
        quick={"minutes": 0.2, "rate": 500, "keep_s": 3.0},
        tables=[
            Table("Rows kept while others come", "measures", {
                "measure": "{measure}", "least": "{least:.2f}", "most": "{most:.2f}",
                "from the middle": "{spread:.1%}",
            })
        ],
    ),
    "answers": Script(
        "retention_answers",
        full={"rounds": 24, "requests": 600, "rate": 150.0, "nodes": 100},
        quick={"rounds": 2, "requests": 20, "rate": 50.0, "nodes": 20},
        tables=[
            Table("Latency at the client, ms", "rows", {
                "percentile": "{percentile}", "all rows kept": "{all_ms:.2f}",
                "5 s of rows kept": "{kept_ms:.2f}", "ratio": "{ratio[0]:.3f}",
                "from": "{ratio[1]:.3f}", "to": "{ratio[2]:.3f}",
            })
        ],
    ),
}  # fmt: skip


_OWN = os.getpid()


class Look(msgspec.Struct):
    """What there was at one moment."""

    at_s: float
    database_bytes: int
    wal_bytes: int
    access_log_bytes: int
    resident_bytes: int
    processor_ns: int


def now_ended(portion: int) -> Iterator[list[RequestRecord]]:
    """Yield portions of requests that have just ended, without end."""
    known = cycle(list(requests(_DIFFERENT)))
    number = 0
    while True:
        now_ns = time.time_ns()
        made = []
        for one in islice(known, portion):
            number += 1
            uid, arrived = f"{number:020x}", now_ns - one.latency_ns
            made.append(msgspec.structs.replace(one, request_uid=uid, arrived_unix_ns=arrived))
        yield made


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def no_engine() -> EngineSnapshot:
    """Return the state of a server whose requests have all ended."""
    return EngineSnapshot(
        pending={}, lanes_up=4, lane_restarts=0, memory_bytes=((1, 0),), rows_dropped=0
    )


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Return extremes of files and memory since rows were deleted, and one look a minute."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        store = RecordStore(
            folder / "report.db",
            msgspec.structs.replace(MADE_UP_RUN, started_unix_ns=time.time_ns()),
            retention=Retention(keep_ns=round(options.keep_s * _NS)),
        )
        log = stack.enter_context(closing(AccessLog(folder / "access.jsonl", 1.0)))
        metrics = Metrics(MADE_UP_RUN, no_engine)
        sink = RecordSink(store, (metrics.observe, log.write), flushes=(log.flush,))
        looks, put, took_s = _put_all(options, sink, metrics, folder)
        sink.close()
        dropped, lost = sink.dropped, log.lost
    # A file grows until the first rows are deleted and their pages are used again.
    settled = [one for one in looks if one.at_s >= 1.5 * options.keep_s] or looks[-1:]
    spent_ns = looks[-1].processor_ns - looks[0].processor_ns
    return {
        "rate_hz": options.rate,
        "keep_s": options.keep_s,
        "lasted_s": round(took_s, 1),
        "requests": put,
        "rows_lost": dropped,
        "lines_lost": lost,
        "processor_us_a_request": round(spent_ns / 1e3 / put, 1),
        "aim": AIM,
        "measures": _extremes(settled),
        "looks": [msgspec.to_builtins(one) for one in _one_a_minute(looks)],
    }


def _put_all(
    options: argparse.Namespace, sink: RecordSink, metrics: Metrics, folder: Path
) -> tuple[list[Look], int, float]:
    looks: list[Look] = []
    put = 0
    begun = time.monotonic()
    end, look_at, rotate_at = begun + 60 * options.minutes, begun, begun + _ROTATE_S
    for number, portion in enumerate(now_ended(options.rate // _PORTIONS_HZ), 1):
        for record in portion:
            sink.put(record)
        put += len(portion)
        now = time.monotonic()
        if now >= look_at:
            metrics.text()  # a scrape
            looks.append(_look(folder, now - begun))
            look_at += _LOOK_S if options.minutes > 1 else 1.0
        if now >= rotate_at:
            (folder / "access.jsonl").replace(folder / "access.jsonl.1")
            rotate_at += _ROTATE_S
        if now >= end:
            break
        time.sleep(max(0.0, begun + number / _PORTIONS_HZ - now))
    return looks, put, time.monotonic() - begun


def _look(folder: Path, at_s: float) -> Look:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    logs = sum(size for name, size in sizes.items() if name.startswith("access"))
    return Look(
        at_s=round(at_s, 1),
        database_bytes=sizes["report.db"],
        wal_bytes=sizes.get("report.db-wal", 0),
        access_log_bytes=logs,
        resident_bytes=resident_bytes(),
        processor_ns=processor_ns(_OWN),
    )


def _extremes(looks: list[Look]) -> list[dict[str, Any]]:
    measures = []
    for measure, sizes in (
        ("database, MiB", [one.database_bytes for one in looks]),
        ("log of the database, MiB", [one.wal_bytes for one in looks]),
        ("memory of the process, MiB", [one.resident_bytes for one in looks]),
    ):
        least, most = min(sizes) / 2**20, max(sizes) / 2**20
        middle = (least + most) / 2
        spread = (most - middle) / middle if middle else 0.0
        measures.append({"measure": measure, "least": least, "most": most, "spread": spread})
    return measures


def _one_a_minute(looks: list[Look]) -> list[Look]:
    kept: list[Look] = []
    for one in looks:
        if not kept or one.at_s - kept[-1].at_s >= 59.0:
            kept.append(one)
    return kept


def latencies_ms(
    server: ServerProcess, message: bytes, options: argparse.Namespace
) -> dict[str, float]:
    """Send a round; return percentiles of its latencies at the client."""
    sender = NativeSender(server.target, LIMIT_S)
    offsets_ns = [round(number / options.rate * 1e9) for number in range(options.requests)]
    sender.send_at([message] * options.requests, offsets_ns)
    sent = list(sender.take())
    if failed := [one.reply.status for one in sent if one.reply.status != "OK"]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    found = np.percentile([(one.reply.done_ns - one.due_ns) / 1e6 for one in sent], PERCENTS)
    return {f"p{name}": float(value) for name, value in zip(PERCENTS, found, strict=True)}


def answers(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each percentile of the latency."""
    tensors = {
        "x": np.zeros((options.nodes, FEATURES), np.float32),
        "edge_index": np.zeros((2, 5 * options.nodes), np.int64),
    }
    message = encode_request("gcn", tensors)
    rounds: dict[str, list[dict[str, float]]] = {"all": [], "kept": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name in rounds:
            own = folder / name
            own.mkdir()
            keep = {"keep": "5s"} if name == "kept" else {}
            sections: dict[str, dict[str, object]] = {
                "models": {"load": ["gcn"]},
                "server": {"front": "native"},
                "report": {**keep},
            }
            server = ServerProcess(own, sections=sections, usual_calibrations=True)
            servers[name] = stack.enter_context(server)
            latencies_ms(server, message, options)  # warm
        for number in range(options.rounds):
            for name in list(servers) if number % 2 else list(servers)[::-1]:
                rounds[name].append(latencies_ms(servers[name], message, options))
    rows = []
    for percentile in rounds["all"][0]:
        kept, everything = ([one[percentile] for one in rounds[name]] for name in ("kept", "all"))
        rows.append({
            "percentile": percentile,
            "all_ms": median(everything),
            "kept_ms": median(kept),
            "ratio": median_interval(ratios(kept, everything)),
        })  # fmt: skip
    return {"nodes": options.nodes, "rate_hz": options.rate, "rows": rows}


QUESTIONS = {"soak": soak, "answers": answers}

if __name__ == "__main__":
    question = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in QUESTIONS else "soak"
    SCRIPTS[question].main(QUESTIONS[question], __doc__)
