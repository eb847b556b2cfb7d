"""A chaos run's record that holds, as files; tests break it in one place each."""

import base64
import json
import sqlite3
from contextlib import closing

import numpy as np

from bench.chaos.checker import S, check

MODEL = "gcn"
#: Seconds at which the server's lives begin and end.
LIVES = ((1, 50, "killed", -9), (60, 100, "stopped", 0))
EXPECTED = {
    **{f"{MODEL}/{v}/{n}": np.full((3, 2), 10 * v + n, np.float32) for v in (1, 2) for n in (0, 1)},
    **{
        f"{MODEL}/1/held/{state}": np.arange(8, dtype=np.float32).reshape(4, 2) + state
        for state in range(4)
    },
}


class Written:
    """A record that holds, before a test breaks it."""

    def __init__(self, folder):
        self.folder = folder
        self.asked, self.ended, self.rows = {}, [], []
        self.answers = dict(EXPECTED)
        self.lost = {1: 0, 2: 0}
        self.lives = [
            {"ready": a * S, "ended": b * S, "how": how, "code": code, "took": S}
            for a, b, how, code in LIVES
        ]
        self.faults = [self.fault("graph updated", 66, 67, "version 2")]
        self.faults += [self.fault("lane killed", at, at + 1) for at in range(60, 90)]
        self.turns, self.pauses, self.stills = [], [], []
        self.samples = [
            {
                "at": n * S, "pid": 7, "calls": 1000.0 * n, "rss_bytes": 10**8, "fds": 40,
                "threads": 30, "gateways": {"9": {"rss_bytes": 10**8, "fds": 20, "threads": 10}},
                "lanes": {
                    str(70 + k): {
                        "private_bytes": 10**8, "fds": 20, "threads": 4, "temporary_files": 5
                    } for k in range(6)
                }, "processes": 6, "shared_files": 16, "temporary_files": 3,
                "database_bytes": 10**6, "port_answers": True, "ready": 200,
                "gnnserve_lanes_up": 2.0,
            }
            for n in range(60, 100)
        ]  # fmt: skip
        self.end = {
            "calls": 0, "own calls": 0, "lanes": 2, "lanes_up": 2, "reserved_bytes": 0,
            "waiting": 0, "staged_bytes": 0, "inside": 0, "regions": 0,
            "copies of models that are not served": 0, "processes left": 0,
            "shared memory left": 0, "files left": 0, "tracebacks": [],
            "journals": {"1-scheduler.journal": "", "2-scheduler.journal": ""}, "alone": True,
            "drain_s": 30.0,
        }  # fmt: skip
        self.add("first", 10, answer=f"{MODEL}/1/0", run=1)
        self.add("plain", 70, answer=f"{MODEL}/1/0")
        self.add("newer", 71, case=1, version="2", answer=f"{MODEL}/2/1")
        held = EXPECTED[f"{MODEL}/1/held/2"][[1, 3]]
        self.answers["some nodes"] = held
        self.add("nodes", 72, kind="nodes", ids=[1, 3], answer="some nodes", graph_version=2)
        self.add("refused", 73, status="RESOURCE_EXHAUSTED", reason="queue_full")
        self.add("wrong", 74, kind="invalid", status="INVALID_ARGUMENT", reason="invalid_input")
        self.add("bad", 75, kind="bad", status="INTERNAL", reason="model_error")
        self.add("away", 76, kind="cancelled", status="CANCELLED", reason="cancelled",
                 by_client=True)  # fmt: skip
        self.add("without", 55, status="UNAVAILABLE", run=None)  # the server is down
        self.end["calls"] = sum(row[0] == 2 for row in self.rows)

    @staticmethod
    def fault(name, begin, end, said=""):
        return {"name": name, "at": begin * S, "end": end * S, "said": said}

    def add(self, key, at, kind="tensors", case=0, ids=(), status="OK", answer="", version="1",
            graph_version=0, by_client=False, reason="", run=2, tenant=1, late=False,
            limit_s=0.0, latency_ns=S // 10):  # fmt: skip
        self.asked[key] = {
            "id": key, "at": round(at * S), "kind": kind, "model": MODEL, "case": case,
            "ids": list(ids), "tenant": tenant, "limit_s": limit_s,
        }  # fmt: skip
        outcome = {
            "id": key, "end": round(at * S) + S // 10, "status": status, "model": MODEL,
            "version": version, "answer": answer, "uid": f"u-{key}",
            "graph_version": graph_version, "by_client": by_client, "words": "",
            "late": late,
        }  # fmt: skip
        self.ended.append(outcome)
        if run is not None:
            self.rows.append((run, f"u-{key}", key, status, reason, 0, latency_ns))

    def end_of(self, key):
        return next(one for one in self.ended if one["id"] == key)

    def row_of(self, key):
        return next(n for n, row in enumerate(self.rows) if row[2] == key)

    def change_row(self, key, **fields):
        names = ("run", "uid", "client_id", "status", "reason", "left_out", "latency_ns")
        at = self.row_of(key)
        row = dict(zip(names, self.rows[at], strict=True)) | fields
        self.rows[at] = tuple(row[name] for name in names)

    def write(self):
        def lines(name, content):
            (self.folder / name).write_text("".join(json.dumps(one) + "\n" for one in content))

        lines("requests-0.jsonl", [*self.asked.values(), *self.ended])
        lines("answers-0.jsonl", [
            {
                "hash": name, "shape": array.shape,
                "content": base64.b64encode(array.tobytes()).decode(),
            }
            for name, array in self.answers.items()
        ])  # fmt: skip
        lines("faults.jsonl", self.faults)
        lines("turns.jsonl", self.turns)
        lines("pauses.jsonl", self.pauses)
        lines("stills.jsonl", self.stills)
        lines("samples.jsonl", self.samples)
        lines("lives.jsonl", self.lives)
        (self.folder / "end.json").write_text(json.dumps(self.end))
        np.savez(self.folder / "expected.npz", **EXPECTED)
        with closing(sqlite3.connect(self.folder / "report.db")) as db:
            db.execute(
                "CREATE TABLE request (run_id INT, request_uid TEXT, client_id TEXT, status TEXT,"
                " reason TEXT, left_out INT, latency_ns INT)"
            )
            db.execute("CREATE TABLE server (run_id INT, rows_lost INT)")
            db.executemany("INSERT INTO request VALUES (?, ?, ?, ?, ?, ?, ?)", self.rows)
            db.executemany("INSERT INTO server VALUES (?, ?)", self.lost.items())
            db.commit()

    def refused(self):
        """Write it, and return the names of what does not hold."""
        self.write()
        return [finding.name for finding in check(self.folder) if not finding.holds]
