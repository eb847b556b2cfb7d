"""Measure what operating the server costs a request, in processor time of the main process.

    python -m bench.host.operating [--quick] [--rounds 30] [--requests 600] [--rate 150]

A server gets the same requests of the demo's GCN at equal distances, round by round, in turns left
alone and operated: with a line of each request in the access log, the live page open in one client,
and the metrics scraped once in 5 s, as Prometheus would. It is one server, since two that are left
alone differ by 15 % (their places in memory and on cores), which no number of rounds shows. Rows,
sums for the live page and metrics are kept in any case, and are in both. Traces are off. What is
counted is the processor time of the main process by the kernel's account, from the first request to
a second after the last, when all rows are written; a request's share of it is compared between
neighbours in time. `added` has the median, and `interval` its 95 % bootstrap interval. Asked: at
most 3 %.
"""

import argparse
import http.client
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.kit.measure import median_interval
from bench.kit.processes import descendants, processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.waiting import wait_for
from loadgen.native import NativeSender
from serve.native import front_lacks
from serve.wire.messages import encode_request

FEATURES = 32
#: What is asked of the main process.
AIM = 0.03
_SCRAPE_S = 5.0
#: Key of the share of answers that get a line; a server takes it without a restart.
_SHARE = "access_log_share = "
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
        # A round takes about `_SCRAPE_S`: one scrape in its middle.
        wait_s = _SCRAPE_S / 2
        while not self._over.wait(wait_s):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            connection.close()
            self.scrapes += 1
            wait_s = _SCRAPE_S


def log_lines(server: ServerProcess, share: float) -> None:
    """Have that share of the answers get a line in the access log from now on."""
    head, _, rest = server.config.read_text().partition(_SHARE)
    _, end, tail = rest.partition("\n")
    server.config.write_text(f"{head}{_SHARE}{share}{end}{tail}")
    seen = len(server.log.read_text())
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "configuration" in server.log.read_text()[seen:], "the share in force")


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
    seen = {"scrapes": 0, "page_bytes": 0, "lines": 0}

    def round_us(server: ServerProcess, name: str) -> dict[str, float]:
        log_lines(server, float(name == "operated"))
        if name == "plain":
            return taken_us(server, message, options)
        with Operator(server.http_port).at_work() as operator:
            found = taken_us(server, message, options)
        seen["scrapes"] += operator.scrapes
        seen["page_bytes"] += operator.page_bytes
        return found

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "access.jsonl"
        sections: dict[str, dict[str, object]] = {
            "models": {"load": ["gcn"]},
            "server": {"front": "native"},
            "report": {"access_log": str(log), "access_log_share": 1.0},
        }
        with ServerProcess(Path(folder), sections=sections, usual_calibrations=True) as server:
            for name in rounds:
                round_us(server, name)  # warm
            for number in range(options.rounds):
                for name in list(rounds) if number % 2 else list(rounds)[::-1]:
                    rounds[name].append(round_us(server, name))
            seen["lines"] = log.read_bytes().count(b"\n")
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
