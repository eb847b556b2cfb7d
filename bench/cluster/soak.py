"""Ask two servers 100,000 requests while they are killed, frozen and stopped; check the answers.

    python -m bench.cluster.soak [--quick] [--requests 100000]

Callers ask a client that knows both servers. Every few seconds one of them, in turn, is killed and
started again, frozen for two seconds, or stopped in order and started again; the other serves
meanwhile. Every request must have exactly one answer, the one that a server gave alone before.
"""

import argparse
import itertools
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.client import Client
from serve.client.errors import ClientError

NODES, EDGES, FEATURES = 40, 120, 32
CASES = 5
KINDS = ("killed", "frozen", "stopped")
_FROZEN_S = 2.0

SCRIPT = Script(
    "cluster_soak",
    full={"requests": 100_000, "every_s": 5.0, "callers": 4},
    quick={"requests": 200, "every_s": 0.5, "callers": 2},
    tables=[
        Table("Requests to two servers that end and freeze", "rows", {
            "requests": "{requests:,}", "right": "{right:,}", "wrong": "{wrong}",
            "failed": "{failed}", "without or with two answers": "{not_once}",
            "killed": "{killed}", "frozen": "{frozen}", "stopped": "{stopped}",
            "sent again": "{again}", "slowest, s": "{slowest_s:.1f}",
        })
    ],
)  # fmt: skip


def graph(case: int) -> dict[str, Any]:
    """Return the inputs of a case, of a size of its own."""
    rng = np.random.default_rng(case)
    x = rng.standard_normal((NODES + case, FEATURES), np.float32)
    return {"x": x, "edge_index": rng.integers(0, NODES, (2, EDGES))}


class Callers:
    """Threads that ask without a pause, and the answers by request."""

    def __init__(
        self, client: Client, expected: Sequence[Any], requests: int, callers: int
    ) -> None:
        """Begin to ask `requests` requests."""
        self._client, self._expected = client, expected
        self._graphs = [graph(case) for case in range(CASES)]
        self._next = itertools.count()
        self._requests = requests
        #: By request, how many answers of each kind it had.
        self.found: list[Counter[str]] = [Counter() for _ in range(requests)]
        self.failures: list[ClientError] = []
        self.again, self.slowest_s = 0, 0.0
        self._threads = [threading.Thread(target=self._ask) for _ in range(callers)]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """True while a thread asks."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def answered(self) -> int:
        """Requests that have ended."""
        return sum(map(bool, self.found))

    def join(self) -> None:
        """Return once every request has ended."""
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while (number := next(self._next)) < self._requests:
            case = number % CASES
            began_s = time.monotonic()
            try:
                answer = self._client.infer(
                    "gcn", request_id=f"soak-{number}", **self._graphs[case]
                )
            except ClientError as error:
                self.failures.append(error)
                self.found[number]["failed"] += 1
                continue
            right = answer.request_id == f"soak-{number}" and np.allclose(
                answer.output, self._expected[case], rtol=1e-3, atol=1e-4
            )
            self.found[number]["right" if right else "wrong"] += 1
            self.again += answer.qos.attempts > 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)


def disturb(server: ServerProcess, kind: str) -> None:
    """Kill, freeze or stop a server; it serves again at the end."""
    if kind == "frozen":
        os.killpg(server.pid, signal.SIGSTOP)
        try:
            time.sleep(_FROZEN_S)
        finally:
            os.killpg(server.pid, signal.SIGCONT)
        return
    if kind == "killed":
        server.kill()
    else:
        assert server.stop() == 0
    server.start()
    server.wait_ready()


def soak(requests: int, every_s: float, callers: int) -> dict[str, Any]:
    """Return what became of the requests; every kind of disturbance happens at least once."""
    did: Counter[str] = Counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            sections: dict[str, dict[str, object]] = {"models": {"load": ["gcn"]}}
            server = ServerProcess(folder / name, sections=sections, own_group=True)
            servers.append(stack.enter_context(server))
        with Client(servers[0].target) as alone:
            expected = [alone.infer("gcn", **graph(case)).output for case in range(CASES)]
        target = ",".join(server.target for server in servers)
        client = stack.enter_context(Client(target, timeout_s=PATIENCE_S))
        asking = Callers(client, expected, requests, callers)
        stack.callback(asking.join)
        turns = itertools.cycle(itertools.product(KINDS, servers))
        while asking.busy or len(did) < len(KINDS):
            kind, server = next(turns)
            disturb(server, kind)
            did[kind] += 1
            time.sleep(every_s)
        asking.join()
    sums = sum(asking.found, Counter[str]())
    return {
        "requests": requests, **{kind: did[kind] for kind in KINDS},
        **{kind: sums[kind] for kind in ("right", "wrong", "failed")},
        "not_once": sum(one.total() != 1 for one in asking.found),
        "again": asking.again, "slowest_s": asking.slowest_s,
        "failures": sorted({str(error) for error in asking.failures}),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return one row; raises SystemExit when a request has not had its one right answer."""
    row = soak(options.requests, options.every_s, options.callers)
    if row["right"] != row["requests"]:
        raise SystemExit(f"not every request had its answer: {row}")
    return {"rows": [row]}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
