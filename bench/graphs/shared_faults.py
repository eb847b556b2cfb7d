"""Find out what requests see of lost servers and of changes, where a graph is shared out.

    python -m bench.graphs.shared_faults [--quick]

*Lost*: two servers in processes of their own hold the other part of a graph, or one does. One is
killed, or stopped so that it is silent; then this server gathers, as a request does. Told are how
many of the gathers failed, and how long each took. Patience is the default.

*Changed*: three servers in this process gather the features of all nodes at once, while changes are
sent to one after the other, each of which gives every node the number of the change. A gather that
has more than one number would have mixed two versions. Told is also how long it took from sending a
change until a gather of every server had it, and until it was answered: all had made it then.
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.script import Script, Table
from bench.kit.servers import free_ports
from bench.kit.shared_graph import OneGraph
from bench.kit.waiting import PATIENCE_S
from serve.cluster.shared_changes import SharedChanges
from serve.cluster.shared_rows import SharedRows
from serve.config_cluster import RowsConfig
from serve.errors import NotReady
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.resident import ResidentGraph
from serve.graphs.sharing import Parting
from serve.graphs.updates import Change

NODES, EDGES, FEATURES = 1000, 10_000, 16
ALL = np.arange(NODES)
CHANGED_SERVERS = 3
#: Of servers in one process, which stand still together.
PATIENT_MS = 10_000
LOG_BYTES = 4 << 30
SCRIPT = Script(
    "shared_faults",
    full={"repeats": 20, "gathers": 200, "answers": 100_000, "changes_s": 50.0},
    quick={"repeats": 1, "gathers": 5, "answers": 60},
    tables=[
        Table("Lost", "lost", {
            "what": "{what}", "replica": "{replica}", "gathers": "{gathers:,}",
            "failed": "{failed}", "first, ms": "{first_ms:.1f}", "slowest": "{slowest_ms:.1f}",
        }),
        Table("Changed", "changed", {
            "answers": "{answers:,}", "changes": "{changes:,}", "mixed": "{mixed}",
            "failed": "{failed}", "answered, ms": "{made_ms:.1f}",
            "seen by all, ms": "{seen_ms:.1f}", "p99": "{seen_p99_ms:.1f}",
            "gather, ms": "{ms:.1f}", "p99, ms": "{p99_ms:.1f}",
        }),
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each loss, and one for changes."""
    lost = [
        _lost(what, replicas, options.repeats, options.gathers)
        for what in ("killed", "stopped")
        for replicas in (1, 2)
    ]
    return {"lost": lost, "changed": [_changed(options.answers, options.changes_s)]}


def _lost(what: str, replicas: int, repeats: int, gathers: int) -> dict[str, Any]:
    """Return what gathers saw of servers that were killed or stopped."""
    failed, first_ms, all_ms = 0, [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder, _others(Path(folder), replicas) as others:
            graph, processes = others
            for _ in range(2 * replicas):
                graph.snapshot.features(ALL)
            pid = processes[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            took_ms = []
            for _ in range(gathers):
                began_ns = time.perf_counter_ns()
                try:
                    graph.snapshot.features(ALL)
                except NotReady:
                    failed += 1
                took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
            first_ms.append(took_ms[0])
            all_ms += took_ms
    return {
        "what": what, "replica": "yes" if replicas > 1 else "no", "gathers": len(all_ms),
        "failed": failed, "first_ms": round(float(np.median(first_ms)), 2),
        "slowest_ms": round(max(all_ms), 2),
    }  # fmt: skip


@contextmanager
def _others(place: Path, replicas: int) -> Iterator[tuple[ResidentGraph, list[SpawnProcess]]]:
    """Yield this server's graph, and the processes of the servers of the other part."""
    addresses = _stores(place, [0] + [1] * replicas)
    spawn = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    mine = SharedRows(0, addresses[0], place / "stores", None, RowsConfig().patience_ms)
    try:
        pipes = []
        for address in addresses[1:]:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, place, address))
            process.start()
            processes.append(process)
            pipes.append(ours)
        graph = _opened(place, mine)
        for pipe in pipes:
            if not pipe.poll(PATIENCE_S):
                raise AssertionError("a server of the other part does not start")
        yield graph, processes
    finally:
        mine.close()
        for process in processes:
            process.kill()
            process.join(PATIENCE_S)


def _serve(pipe: Connection, place: Path, address: str) -> None:
    """Give rows of the other part until killed."""
    rows = SharedRows(1, address, place / "stores", None, RowsConfig().patience_ms)
    _opened(place, rows)
    pipe.send(True)
    signal.pause()


def _changed(answers: int, changes_s: float) -> dict[str, Any]:
    """Return what gathers saw of `changes_s` changes a second, until there are `answers`."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        addresses = _stores(place, list(range(CHANGED_SERVERS)))
        servers = [
            SharedRows(part, address, place / "stores", None, PATIENT_MS)
            for part, address in enumerate(addresses)
        ]
        try:
            graphs = [_opened(place, rows) for rows in servers]
            for rows, address in zip(servers, addresses, strict=True):
                rows.order_changes(address, place / "changes.log", LOG_BYTES)
            orders = [rows.changes for rows in servers if rows.changes is not None]
            for order, graph in zip(orders, graphs, strict=True):
                order.follow(OneGraph(graph), lambda step, share: None, PATIENCE_S)
            return _gathered_among_changes(graphs, orders, answers, changes_s)
        finally:
            for rows in servers:
                rows.close()


def _gathered_among_changes(
    graphs: list[ResidentGraph], orders: list[SharedChanges], answers: int, changes_s: float
) -> dict[str, Any]:
    mixed = failed = 0
    times_ns: list[int] = []
    began_ns: dict[int, int] = {}
    made_ns: list[int] = []
    #: By server, when a gather first had the change.
    seen_ns: list[dict[int, int]] = [{} for _ in graphs]
    lock = threading.Lock()

    def gather(number: int) -> None:
        nonlocal mixed, failed
        while len(times_ns) < answers:
            before_ns = time.perf_counter_ns()
            try:
                found = graphs[number].snapshot.features(ALL)
            except NotReady:
                with lock:
                    failed += 1
                continue
            now_ns = time.perf_counter_ns()
            seen_ns[number].setdefault(int(found[0, 0]), now_ns)
            with lock:
                mixed += int((found != found[0, 0]).any())
                times_ns.append(now_ns - before_ns)

    def change(value: int) -> None:
        new = Change(set_ids=ALL, set_x=np.full((NODES, FEATURES), value, np.float32))
        began_ns[value] = time.perf_counter_ns()
        orders[value % len(orders)].change(graphs[0].name, new, None)
        made_ns.append(time.perf_counter_ns() - began_ns[value])

    change(0)
    threads = [threading.Thread(target=gather, args=(number,)) for number in range(len(graphs))]
    for thread in threads:
        thread.start()
    value = 0
    while len(times_ns) < answers:
        value += 1
        change(value)
        time.sleep(1 / changes_s)
    for thread in threads:
        thread.join(PATIENCE_S)
    by_all = [
        max(seen[one] for seen in seen_ns) - began_ns[one]
        for one in began_ns
        if one and all(one in seen for seen in seen_ns)
    ]
    return {
        "answers": len(times_ns), "changes": value, "mixed": mixed, "failed": failed,
        **_quantiles("made_", made_ns), **_quantiles("seen_", by_all), **_quantiles("", times_ns),
    }  # fmt: skip


def _quantiles(name: str, times_ns: list[int]) -> dict[str, float]:
    found = np.array(times_ns or [0]) / 1e6
    return {
        f"{name}ms": round(float(np.median(found)), 2),
        f"{name}p99_ms": round(float(np.quantile(found, 0.99)), 2),
    }


def _stores(place: Path, parts: list[int]) -> list[str]:
    """Write the files of servers of these parts; return the address of each."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(parts))]
    lines = [f"{address} {part}\n" for address, part in zip(addresses, parts, strict=True)]
    (place / "stores").write_text("".join(lines))
    np.save(place / "parts.npy", ALL % len(set(parts)))
    return addresses


def _opened(place: Path, rows: SharedRows) -> ResidentGraph:
    rng = np.random.default_rng(0)
    x = rng.random((NODES, FEATURES), dtype=np.float32)
    parts = GraphParts(NODES, rng.integers(0, NODES, (2, EDGES)), x, "made")
    options = OpenOptions(parting=Parting(place / "parts.npy", 0.0, rows))
    return held("graph", parts, options, lambda step, fraction: None)


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
