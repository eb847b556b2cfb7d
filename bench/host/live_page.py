"""Measure what a view of the live page takes when the database holds a million requests.

    python -m bench.host.live_page [--quick] [--rows 1000000] [--span 3000] [--seconds 30]

A real server starts on a database with a row for each request of the last `span` seconds, of four
models and three tenants, and the sums that the page reads, as the server wrote them. Requests go
on at `rate` a second. In each window of time one client after the other opens a view; `first_ms` is
the time from its question until all numbers are there. Then one of them stays for `seconds`, and
`share` is the processor time that the gateway takes meanwhile beyond what it takes without a
viewer, as a share of one core. The requests of a second and the story of one are looked up too.
`shown_s` is the time from an answer at its client until the page's stream counts it. Asked: 200 ms
a view, 2 % of a core a viewer, and 2 s.
"""

import argparse
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.host.report_size import requests
from bench.kit.beside import beside
from bench.kit.processes import descendants, processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from gnnserve import Client
from serve.obs.live.tally import ServerState
from serve.obs.live.view import WINDOWS
from serve.obs.record import ServerRun
from serve.obs.store import RecordStore

_NS = 10**9
_LIMIT_S = 30.0
#: Asked: time of a view, a viewer's share of a core, and the delay of a request.
AIM_MS, AIM_SHARE, AIM_SHOWN_S = 200.0, 0.02, 2.0
_LANES = 4
SCRIPT = Script(
    "live_page",
    full={"rows": 1_000_000, "span": 3000, "seconds": 30, "opens": 5, "rate": 20, "shown": 10},
    quick={"rows": 3000, "span": 30, "seconds": 2, "opens": 1, "rate": 10, "shown": 1},
    tables=[
        Table("A view", "views", {
            "view": "{view}", "time, ms": "{first_ms:.0f}", "most, ms": "{most_ms:.0f}",
            "KB": "{kilobytes:,.0f}", "share of a core": "{share}",
        })
    ],
)  # fmt: skip


def make_database(path: Path, rows: int, span_s: int) -> None:
    """Write rows and sums of requests that ended in the last seconds, as a server does."""
    begin_s = int(time.time()) - span_s
    run = ServerRun(
        started_unix_ns=begin_s * _NS,
        version="0",
        device="cpu",
        lanes=_LANES,
        budget_bytes=4 * 2**30,
        policy="slack",
        discipline="preemptive",
        window="adaptive",
        qos_factor=2.0,
        pid=1,
    )
    store = RecordStore(path, run)
    written_s = begin_s
    for record in requests(rows, begin_s * _NS, (span_s - 1) * _NS):
        second = (record.arrived_unix_ns + record.latency_ns) // _NS
        if second > written_s:
            store.tell(ServerState(second % 5, 2**20 * (second % 300), _LANES), written_s)
            store.commit(written_s)
            written_s = second
        store.insert(record)
        store.count(record, second)
    store.commit(written_s)
    store.close()


class Stream:
    """One open view of the page."""

    def __init__(self, port: int, query: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
        self._connection.request("GET", f"/live/events?{query}")
        self._answer = self._connection.getresponse()
        if self._answer.status != http.client.OK:
            raise RuntimeError(f"/live/events answers {self._answer.status}")
        self._left = b""
        self.bytes = 0

    def next(self) -> dict[str, Any]:
        """Wait for numbers; returns them."""
        while (end := self._left.find(b"\n\n")) < 0:
            data = self._answer.read1(1 << 20)
            if not data:
                raise RuntimeError("the stream of the live page ended")
            self._left += data
        event, self._left = self._left[:end], self._left[end + 2 :]
        self.bytes = len(event)
        found: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def close(self) -> None:
        """Leave the view."""
        self._connection.close()


@contextmanager
def asked(server: ServerProcess, rate: int) -> Iterator[None]:
    """Send small requests, so many a second, until left."""

    def send(over: threading.Event) -> None:
        with Client(server.target) as client:
            while not over.wait(1 / rate):
                ask(client)

    with beside(send):
        yield


def ask(client: Client, **more: Any) -> None:
    """Send one small request."""
    client.infer(
        "gcn", x=np.zeros((20, 32), np.float32), edge_index=np.zeros((2, 40), np.int64), **more
    )


def opened(port: int, query: str, opens: int) -> tuple[list[float], int]:
    """Open a view several times; returns the times until it has numbers, in ms, and bytes."""
    times: list[float] = []
    size = 0
    for _ in range(opens):
        began = time.perf_counter()
        stream = Stream(port, query)
        stream.next()
        times.append((time.perf_counter() - began) * 1e3)
        size = stream.bytes
        stream.close()
        time.sleep(0.3)
    return times, size


def looked_up(port: int, path: str, opens: int) -> tuple[list[float], int, Any]:
    """Ask for a path several times; returns the times in ms, the size and the answer."""
    times: list[float] = []
    data = b""
    for _ in range(opens):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        data = answer.read()
        times.append((time.perf_counter() - began) * 1e3)
        connection.close()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{path} answers {answer.status}: {data[:200]!r}")
    return times, len(data), json.loads(data)


def share_of(pid: int, seconds: float) -> float:
    """Return the share of a core that a process takes for so long."""
    began, before = time.monotonic(), processor_ns(pid)
    time.sleep(seconds)
    return (processor_ns(pid) - before) / 1e9 / (time.monotonic() - began)


def shown_s(server: ServerProcess, times: int) -> list[float]:
    """Return the times from an answer until the stream of its own tenant counts the request."""
    found: list[float] = []
    with Client(server.target) as client:
        for number in range(times):
            name = f"shown {number}"
            stream = Stream(server.http_port, f"tenant=shown%20{number}")
            stream.next()
            time.sleep(0.37 * number % 1)  # at any moment of the page's second
            ask(client, tenant=name)
            answered = time.perf_counter()
            while not sum(point[1] for point in stream.next()["points"]):
                pass
            found.append(time.perf_counter() - answered)
            stream.close()
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each view, and the delays."""
    views = []
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(
            Path(folder), sections={"models": {"load": ["gcn"]}}, usual_calibrations=True
        )
        make_database(server.database, options.rows, options.span)
        with server, asked(server, options.rate):
            (gateway,) = [
                pid for pid, line in descendants(server.pid).items() if "serve.rest" in line
            ]
            port, length = server.http_port, options.seconds
            share_of(gateway, 3.0)
            for window in WINDOWS:
                times, size = opened(port, f"window={window}", options.opens)
                alone = share_of(gateway, length / 2)
                stream = Stream(port, f"window={window}")
                reader = threading.Thread(target=_read, args=(stream,), daemon=True)
                reader.start()
                share_of(gateway, 2.0)
                watched = share_of(gateway, length)
                stream.close()
                views.append(_row(f"window of {window}", times, size, f"{watched - alone:.2%}"))
            now_s = int(time.time()) - 20
            path = f"/live/requests?from={now_s}&until={now_s + 1}"
            times, size, found = looked_up(port, path, options.opens)
            views.append(_row("requests of a second", times, size))
            one = found["requests"][0]
            path = f"/live/requests/{one['request_uid']}"
            times, size, _ = looked_up(port, f"{path}?at={one['arrived_unix_us']}", options.opens)
            views.append(_row("story of one of them", times, size))
            times, size, _ = looked_up(port, path, options.opens)
            views.append(_row("story by its id alone", times, size))
            delays = shown_s(server, options.shown)
    return {
        "rows": options.rows,
        "aims": {"ms": AIM_MS, "share": AIM_SHARE, "shown_s": AIM_SHOWN_S},
        "shown_s": {"median": median(delays), "most": max(delays)},
        "views": views,
    }


def _read(stream: Stream) -> None:
    try:
        while True:
            stream.next()
    except (OSError, RuntimeError, ValueError, AttributeError):
        pass  # closed


def _row(view: str, times: list[float], size: int, share: str = "") -> dict[str, Any]:
    return {"view": view, "first_ms": median(times), "most_ms": max(times),
            "kilobytes": size / 1e3, "share": share}  # fmt: skip


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
