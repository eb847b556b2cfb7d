"""Records with defaults, and a small queue simulation that makes many realistic ones."""

import heapq
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from serve.obs.frame import Frame
from serve.obs.read import read_rows, read_runs, reading
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.report import Report, report_of
from serve.obs.schema import migrate
from serve.obs.selection import Selection
from serve.obs.summary import Summary

MS = 1_000_000
START_UNIX_NS = 1_790_000_000 * 1_000_000_000
RUN = ServerRun(
    started_unix_ns=START_UNIX_NS - 1_000 * MS,
    version="0.1.0",
    device="cpu",
    lanes=4,
    budget_bytes=2**30,
    policy="slack",
    discipline="rolling",
    window="adaptive",
    qos_factor=2.0,
    pid=4711,
)


def record(uid: str = "r1", **fields) -> RequestRecord:
    """Return a request on lane 0 that was answered in 10 ms, within its target of 20 ms."""
    facts = {
        "request_uid": uid,
        "model": "gcn",
        "version": "1",
        "arrived_unix_ns": START_UNIX_NS,
        "num_nodes": 1000,
        "num_edges": 8000,
        "policy": "slack",
        "discipline": "rolling",
        "executor": "csr",
        "device": "cpu",
        "lane": 0,
        "attempt": 1,
        "group_id": 1,
        "group_size": 1,
        "queue_ns": 2 * MS,
        "prepare_ns": 1 * MS,
        "quet_ns": 2 * MS,
        "run_ns": 7 * MS,
        "answer_ns": 1 * MS,
        "latency_ns": 10 * MS,
        "solo_estimate_ns": 10 * MS,
        "run_estimate_ns": 7 * MS,
        "qos_target_ns": 20 * MS,
        "pmc_estimate_bytes": 100 * 2**20,
        "reserve_bytes": 110 * 2**20,
        "pmc_measured_bytes": 98 * 2**20,
    }
    return RequestRecord(**(facts | fields))


def late(uid: str = "late", cause: str = "queue", **fields) -> RequestRecord:
    """Return a late answer: 40 ms against a target of 20 ms, most of it in the queue."""
    facts = {"queue_ns": 32 * MS, "quet_ns": 32 * MS, "latency_ns": 40 * MS}
    return record(uid, violated=True, cause=cause, **(facts | fields))


def unanswered(uid: str, status: str, reason: str, **fields) -> RequestRecord:
    """Return a request without a result that never reached a lane."""
    facts = {"lane": -1, "group_id": -1, "run_ns": 0, "pmc_measured_bytes": None}
    return record(uid, status=status, reason=reason, **(facts | fields))


def traffic(count: int, seed: int = 1, load: float = 0.3, lanes: int = 4) -> list[RequestRecord]:
    """`count` requests, least slack first on `lanes` lanes at offered load `load`."""
    rng = random.Random(seed)
    speed = {"gcn": 1.0, "sage": 0.7, "gin": 0.6, "gat": 2.4}
    free: list[tuple[int, int]] = [(0, lane) for lane in range(lanes)]
    pending: list[tuple[int, int]] = []
    drafts = [_draft(rng, speed) for _ in range(count)]
    mean_ns = sum(draft["solo"] for draft in drafts) / max(count, 1)
    now, records, busy = 0, [], []
    for draft in drafts:
        burst = 2.2 if (now // (1_000 * MS)) % 12 == 7 else 0.9
        now += int(rng.expovariate(load * burst * lanes / mean_ns))
        draft["arrived"] = now
    upcoming = 0
    while upcoming < count or pending:
        at, lane = heapq.heappop(free)
        if not pending:
            at = max(at, drafts[upcoming]["arrived"])
        while upcoming < count and drafts[upcoming]["arrived"] <= at:
            draft = drafts[upcoming]
            heapq.heappush(pending, (draft["arrived"] + draft["solo"], upcoming))
            upcoming += 1
        index = heapq.heappop(pending)[1]
        busy = [end for end in busy if end > at]
        entry = _finish(rng, drafts[index], index, at, lane, len(busy), len(pending))
        records.append(entry)
        end = at + entry.run_ns if entry.lane >= 0 else at
        busy.append(end)
        heapq.heappush(free, (end, lane))
    return records


def _draft(rng: random.Random, speed: dict[str, float]) -> dict:
    model = rng.choice(list(speed))
    nodes = int(100 * 80 ** rng.random())
    edges = int(nodes * rng.uniform(4, 14))
    run = int((0.4 + nodes / 900 + edges / 6000) * speed[model] * MS)
    return {"model": model, "nodes": nodes, "edges": edges, "run": run, "solo": run + MS // 2}


def _finish(
    rng: random.Random, draft: dict, index: int, at: int, lane: int, beside: int, waiting: int
) -> RequestRecord:
    uid = f"{rng.getrandbits(64):016x}"
    estimate = int(draft["nodes"] * 4096 + draft["edges"] * 520 + 2e5)
    common = {
        "uid": uid,
        "model": draft["model"],
        "num_nodes": draft["nodes"],
        "num_edges": draft["edges"],
        "arrived_unix_ns": START_UNIX_NS + draft["arrived"],
        "solo_estimate_ns": draft["solo"],
        "run_estimate_ns": draft["run"],
        "qos_target_ns": 2 * draft["solo"],
        "pmc_estimate_bytes": estimate,
        "reserve_bytes": -(-int(estimate * 1.1) // 512) * 512,
        "backlog_ns": waiting * 6 * MS // 4,
    }
    waited = at - draft["arrived"]
    if waited > 150 * MS:
        facts = {"latency_ns": 150 * MS, "quet_ns": 0, "queue_ns": 150 * MS}
        return unanswered(**common, status="DEADLINE_EXCEEDED", reason="deadline", **facts)
    if rng.random() < 0.004:
        reason = rng.choice(["queue_full", "too_big"])
        facts = {"latency_ns": 60_000, "quet_ns": 0, "queue_ns": 0, "prepare_ns": 0}
        return unanswered(**common, status="RESOURCE_EXHAUSTED", reason=reason, **facts)
    slow = rng.choice((1.7, 2.3)) if rng.random() < 0.012 else 1.0
    run = int(draft["run"] * rng.lognormvariate(0.02, 0.08) * slow * (1 + 0.06 * beside))
    prepare = int((0.15 * MS + draft["nodes"] * 40) * rng.lognormvariate(0, 0.9))
    exposed = prepare if waited < prepare else 0
    answer = int(rng.uniform(0.05, 0.25) * MS)
    waited += int(0.1 * MS)
    latency = waited + exposed + run + answer
    violated = latency > common["qos_target_ns"]
    excess = "estimate" if slow > 1.0 else "interference"
    shares = {"queue": waited, excess: run - draft["run"], "prepare": 6 * exposed}
    cause = max(shares, key=shares.get) if violated else ""
    if cause == "queue" and waiting > 20:
        cause = "overload"
    return record(
        **common,
        lane=lane,
        group_id=index // 3,
        group_size=min(3, 1 + beside),
        co_runners=beside,
        queue_ns=waited,
        prepare_ns=prepare,
        prepare_exposed_ns=exposed,
        quet_ns=waited + exposed,
        run_ns=run,
        answer_ns=answer,
        latency_ns=latency,
        violated=violated,
        cause=cause,
        pmc_measured_bytes=int(estimate * rng.lognormvariate(-0.02, 0.03)),
    )


def summary_of(rows: Sequence[RequestRecord], chosen: Selection | None = None) -> Summary:
    """Return what a report shows of records, by way of a database in memory."""
    names = ("run_id", *RequestRecord.__struct_fields__)
    with closing(sqlite3.connect(":memory:")) as db:
        migrate(db)
        db.executemany(
            f"INSERT INTO request ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            ((0, *msgspec.structs.astuple(row)) for row in rows),
        )
        return Summary({"": db}, chosen or Selection())


def build_report(rows: Sequence[RequestRecord], runs: Sequence[ServerRun]) -> Report:
    """Return the report over records."""
    return report_of(summary_of(rows), runs)


def read_database(path: Path, chosen: Selection | None = None) -> tuple[Frame, list[ServerRun]]:
    """Return the chosen rows of a database, and its runs."""
    with reading(path) as db:
        runs = read_runs(db, chosen or Selection())
    return Frame.of_rows(read_rows(path, chosen)), runs
