"""Time what a graph that is shared out costs a request, beside a server that has all features.

    python -m bench.graphs.shared_rows [--data FOLDER] [--quick]

The features of a real graph, 128 of float32, are shared out over four servers by METIS: three
processes that give rows, and this one, which prepares requests as a server does: it samples, with
fan-outs 10, 10, and gathers. The same requests are prepared from the whole graph in turns. Then the
link alone is asked for rows of all three others. All are on this machine; `key` tells whether what
is sent is encrypted. Processor times are those of this process and of the others.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kit.script import Script, Table
from bench.kit.servers import free_ports
from bench.kit.waiting import PATIENCE_S
from serve.cluster.shared_rows import SharedRows
from serve.graphs.datasets import load_dataset
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.partition import partition
from serve.graphs.resident import ResidentGraph
from serve.graphs.shared_column import SharedColumn
from serve.graphs.sharing import Parting
from serve.graphs.snapshot import Snapshot

PARTS, FEATURES, FANOUTS = 4, 128, (10, 10)
#: Longer than any stop of the machine: nothing is to fail here.
PATIENCE_MS = 10_000
SCRIPT = Script(
    "shared_rows",
    full={"data": None, "graph": "facebook_news", "ids": (1, 64), "requests": 2000,
          "rows": (24, 2400), "hot": 0.05, "method": "metis"},
    quick={"graph": "pubmed", "requests": 20, "method": "random"},
    tables=[
        Table("Prepared, and gathered by the link alone", "rows", {
            "what": "{what}", "key": "{key}", "elsewhere": "{elsewhere:,.0f}", "ms": "{ms:.2f}",
            "p99": "{p99_ms:.2f}", "whole, ms": "{whole_ms}", "added, ms": "{added_ms}",
            "processor, µs": "{cpu_us:,.0f}",
        })
    ],
)  # fmt: skip
Nodes = NDArray[np.int64]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each size of requests and of gathers, without and with a key."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    found = load_dataset(options.graph, folder=Path(data) if data else None)
    x = np.random.default_rng(0).random((found.num_nodes, FEATURES), dtype=np.float32)
    graph = GraphParts(found.num_nodes, found.edge_index, x, found.source)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        whole = _opened(graph, None).snapshot
        parts = partition(whole, PARTS, options.method)
        place = Path(folder)
        np.save(place / "parts.npy", parts)
        np.savez(place / "graph.npz", num_nodes=found.num_nodes, edge_index=found.edge_index, x=x)
        (place / "key").write_text("the-key-of-this-bench")
        for key in (None, place / "key"):
            with _servers(place, graph, key, options.hot) as (mine, shared, cpu_ns):
                for ids in options.ids:
                    asked = _requests(whole, parts, ids, options.requests)
                    rows.append(_prepared(asked, ids, whole, shared, mine, cpu_ns))
                rows += [
                    _gathered(count, parts, shared, options.requests, cpu_ns)
                    for count in options.rows
                ]
            for row in rows:
                row.setdefault("key", "yes" if key else "no")
    facts = {"graph": options.graph, "source": found.source, "nodes": whole.num_nodes}
    return {**facts, "requests": options.requests, "hot": options.hot, "rows": rows}


def _prepared(
    asked: list[Nodes], ids: int, whole: Snapshot, shared: Snapshot, mine: SharedRows,
    cpu_ns: Callable[[], int],
) -> dict[str, Any]:  # fmt: skip
    """Return what preparing the requests took, from the whole graph and from the shared one."""
    times: dict[str, list[int]] = {"whole": [], "shared": []}
    used_ns = sent = 0
    for seed, each in enumerate(asked):
        found = {}
        for name, snapshot in (("whole", whole), ("shared", shared)):
            before_ns, cpu_before_ns, had = time.perf_counter_ns(), cpu_ns(), mine.counts["bytes"]
            sample = snapshot.sample(each, FANOUTS, seed)
            nodes = np.empty(sample.num_nodes, np.int64)
            sample.write_nodes(nodes)
            found[name] = snapshot.features(nodes)
            times[name].append(time.perf_counter_ns() - before_ns)
            if name == "shared":
                used_ns += cpu_ns() - cpu_before_ns
                sent += mine.counts["bytes"] - had
        if (found["whole"] != found["shared"]).any():
            raise AssertionError(f"request {seed} got other features from the shared graph")
    alone_ms = float(np.median(times["whole"])) / 1e6
    return {
        "what": f"a request for {ids} ids", "whole_ms": f"{alone_ms:.2f}",
        "elsewhere": sent / len(asked) / (4 * FEATURES),
        **_times(times["shared"], used_ns),
        "added_ms": f"{float(np.median(times['shared'])) / 1e6 - alone_ms:.2f}",
    }  # fmt: skip


def _gathered(
    count: int, parts: NDArray[np.uint16], shared: Snapshot, repeats: int, cpu_ns: Callable[[], int]
) -> dict[str, Any]:
    """Return what it took to get `count` rows of the others, as many of each."""
    rng = np.random.default_rng(2)
    column = shared.column
    there = [np.flatnonzero((parts == part) & (_places(shared) < 0)) for part in range(1, PARTS)]
    target = np.empty((count, FEATURES), np.float32)
    times = []
    began_ns = cpu_ns()
    for _ in range(repeats):
        nodes = np.concatenate([rng.choice(of, count // len(there)) for of in there])
        before_ns = time.perf_counter_ns()
        column.gather(nodes, target)
        times.append(time.perf_counter_ns() - before_ns)
    return {"what": f"{count} rows of {len(there)} servers", "elsewhere": count, "whole_ms": "",
            "added_ms": "", **_times(times, cpu_ns() - began_ns)}  # fmt: skip


def _places(snapshot: Snapshot) -> NDArray[np.int32]:
    assert isinstance(snapshot.column, SharedColumn)
    return snapshot.column.places


def _times(times_ns: list[int], used_ns: int) -> dict[str, float]:
    return {
        "ms": round(float(np.median(times_ns)) / 1e6, 3),
        "p99_ms": round(float(np.quantile(times_ns, 0.99)) / 1e6, 3),
        "cpu_us": round(used_ns / len(times_ns) / 1e3, 1),
    }


def _requests(whole: Snapshot, parts: NDArray[np.uint16], ids: int, count: int) -> list[Nodes]:
    """Draw requests that would come here: for one node of this part, or for any nodes."""
    rng = np.random.default_rng(1)
    known = np.flatnonzero(parts == 0) if ids == 1 else np.arange(whole.num_nodes)
    return [rng.choice(known, ids) for _ in range(count)]


def _opened(graph: GraphParts, parting: Parting | None) -> ResidentGraph:
    return held("graph", graph, OpenOptions(parting=parting), lambda step, fraction: None)


@contextmanager
def _servers(
    place: Path, graph: GraphParts, key: Path | None, hot: float
) -> Iterator[tuple[SharedRows, Snapshot, Callable[[], int]]]:
    """Yield this server's rows and graph, and what tells the processor time of all servers."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(PARTS)]
    lines = [f"{address} {part}\n" for part, address in enumerate(addresses)]
    (place / "stores").write_text("".join(lines))
    spawn = multiprocessing.get_context("spawn")
    pipes, others = [], []
    for part, address in list(enumerate(addresses))[1:]:
        ours, theirs = spawn.Pipe()
        other = spawn.Process(target=_serve, args=(theirs, place, part, address, key, hot))
        other.start()
        pipes.append(ours)
        others.append(other)
    mine = SharedRows(0, addresses[0], place / "stores", key, PATIENCE_MS)
    try:
        shared = _opened(graph, Parting(place / "parts.npy", hot, mine)).snapshot
        for pipe in pipes:
            _heard(pipe)

        def cpu_ns() -> int:
            for pipe in pipes:
                pipe.send(True)
            return time.process_time_ns() + sum(map(_heard, pipes))

        yield mine, shared, cpu_ns
    finally:
        mine.close()
        for pipe in pipes:
            pipe.close()
        for other in others:
            other.join(PATIENCE_S)
            other.kill()


def _heard(pipe: Connection) -> int:
    """Return what another process says; raises AssertionError when it says nothing."""
    if not pipe.poll(PATIENCE_S):
        raise AssertionError("a server of a part says nothing")
    said: int = pipe.recv()
    return said


def _serve(
    pipe: Connection, place: Path, part: int, address: str, key: Path | None, hot: float
) -> None:
    """Give rows of one part, and tell this process's processor time, until the pipe is closed."""
    rows = SharedRows(part, address, place / "stores", key, PATIENCE_MS)
    with np.load(place / "graph.npz") as archive:
        graph = GraphParts(int(archive["num_nodes"]), archive["edge_index"], archive["x"], "file")
    _opened(graph, Parting(place / "parts.npy", hot, rows))
    try:
        pipe.send(0)
        while pipe.recv():
            pipe.send(time.process_time_ns())
    except (EOFError, OSError):
        pass
    finally:
        rows.close()


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
