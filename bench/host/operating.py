"""Measure what operating the server costs a request, in processor time of the main process.

    python -m bench.host.operating [--quick] [--rounds 30] [--requests 600] [--rate 150]

Two servers get the same requests of the demo's GCN at equal distances, in turns. The plain one is
left alone. The operated one writes an access log of every request, has the live page open in one
client and its metrics scraped every 5 s, as Prometheus would. Traces are off. What is counted is
the processor time of the main process by the kernel's account, from the first request to a second
after the last, when all rows are written; a request's share of it is compared between neighbours in
time. `added` has the median, and `interval` its 95 % bootstrap interval. Asked: at most 3 %.
"""

import argparse
import http.client
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.kit.measure import median_interval
from bench.kit.processes import descendants, processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from loadgen.native import NativeSender
from serve.native import front_lacks
from serve.wire.messages import encode_request

FEATURES = 32
#: What is asked of the main process.
AIM = 0.03
_SCRAPE_S = 5.0
#: Rows are written within this time.
_WRITTEN_S = 1.0
LIMIT_S = 30.0
SCRIPT = Script(
    "operating",
    full={"rounds": 30, "requests": 600, "rate": 150.0, "nodes": 100},
    quick={"rounds": 2, "requests": 20, "rate": 50.0, "nodes": 20},
    tables=[
        Table("Processor time of a request, µs", "rows", {
            "process": "{process}", "plain": "{plain_us:,.0f}", "operated": "{operated_us:,.0f}",
            "added": "{added[0]:.1%}", "from": "{added[1]:.1%}", "to": "{added[2]:.1%}",
        })
    ],
)  # fmt: skip


class Operator:
    """Keeps the live page open and scrapes the metrics, on threads of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        #: Scrapes, and bytes that the page got.
        self.scrapes = self.page_bytes = 0
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._watch,
                         self._scrape)]  # fmt: skip

    @contextmanager
    def at_work(self) -> Iterator["Operator"]:
        """Begin, and end when left."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(LIMIT_S)

    def _watch(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        connection.request("GET", "/live/events")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise RuntimeError(f"/live/events answers {answer.status}")
        while not self._over.is_set() and (data := answer.read1(1 << 16)):
            self.page_bytes += len(data)
        connection.close()

    def _scrape(self) -> None:
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            connection.close()
            self.scrapes += 1
            self._over.wait(_SCRAPE_S)


def taken_us(
    server: ServerProcess, message: bytes, options: argparse.Namespace
) -> dict[str, float]:
    """Send a round; return processor time of a request in the main process and in the gateway."""
    pids = {"main process": server.pid}
    for pid, command in descendants(server.pid).items():
        if "serve.rest" in command:
            pids["HTTP gateway"] = pid
    before = {name: processor_ns(pid) for name, pid in pids.items()}
    sender = NativeSender(server.target, LIMIT_S)
    offsets_ns = [round(number / options.rate * 1e9) for number in range(options.requests)]
    sender.send_at([message] * options.requests, offsets_ns)
    failed = [one.reply.status for one in sender.take() if one.reply.status != "OK"]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    time.sleep(_WRITTEN_S)
    return {
        name: (processor_ns(pid) - before[name]) / 1e3 / options.requests
        for name, pid in pids.items()
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each process, with what operating adds to it."""
    if lacks := front_lacks():
        raise SystemExit(f"this bench needs the native front: {lacks}")
    tensors = {
        "x": np.zeros((options.nodes, FEATURES), np.float32),
        "edge_index": np.zeros((2, 5 * options.nodes), np.int64),
    }
    message = encode_request("gcn", tensors)
    rounds: dict[str, list[dict[str, float]]] = {"plain": [], "operated": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name in rounds:
            own = folder / name
            own.mkdir()
            log = {"access_log": str(own / "access.jsonl")} if name == "operated" else {}
            sections: dict[str, dict[str, object]] = {
                "models": {"load": ["gcn"]},
                "server": {"front": "native"},
                "report": {**log},
            }
            server = ServerProcess(own, sections=sections, usual_calibrations=True)
            servers[name] = stack.enter_context(server)
        operator = stack.enter_context(Operator(servers["operated"].http_port).at_work())
        for server in servers.values():
            taken_us(server, message, options)  # warm
        for number in range(options.rounds):
            order = list(servers) if number % 2 else list(servers)[::-1]
            for name in order:
                rounds[name].append(taken_us(servers[name], message, options))
        seen = {"scrapes": operator.scrapes, "page_bytes": operator.page_bytes}
    rows = []
    for process in rounds["plain"][0]:
        plain, operated = ([one[process] for one in rounds[name]] for name in rounds)
        added = np.array(operated) / np.array(plain) - 1
        rows.append({
            "process": process,
            "plain_us": median(plain),
            "operated_us": median(operated),
            "added": median_interval(added, 4),
        })  # fmt: skip
    return {"nodes": options.nodes, "rate_hz": options.rate, "aim": AIM, **seen, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
