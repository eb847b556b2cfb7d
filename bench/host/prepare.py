"""Is preparing hidden? How long idle lanes wait for the host, by itself and under load.

    python -m bench.host.prepare [--quick]

Clients keep 1, 4 or 16 requests in flight (one request each at a time; GCN of the demo, graphs of
3,000 nodes and 30,000 edges, so that staging has 630 KB to check and copy). Figures are the
server's own account in its report's database. `hidden` is the share of all preparing during which
no idle lane waited for it; `delayed` the share of launches an idle lane did wait for; `cost` what
that waiting was of the lanes' time. With 1 in flight nothing runs that preparing could hide behind.
Writes bench/results/prepare.json.
"""

import argparse
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from serve.client import Client

NODES, EDGES, FEATURES = 3_000, 30_000, 32
IN_FLIGHT = (1, 4, 16)
REQUESTS = 400
SECTIONS: dict[str, dict[str, object]] = {"device": {"memory_budget": "8 GiB"}}
RESULT = RESULTS / "prepare.json"
#: Of every request that was answered, in order of arrival.
COLUMNS = ("prepare_ns", "prepare_exposed_ns", "queue_ns", "run_ns", "violated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    arguments = parser.parse_args()
    count = REQUESTS // 4 if arguments.quick else REQUESTS
    result = {}
    for in_flight in IN_FLIGHT:
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess(
                Path(folder), policy="slack", discipline="preemptive", sections=SECTIONS
            ) as server,
        ):
            send(server, count, in_flight)
            server.stop()
            result[str(in_flight)] = figures(server.database, in_flight)
    content = {"quick": arguments.quick, "by_in_flight": result}
    write_result(RESULT, content)
    show(result)


def send(server: ServerProcess, count: int, in_flight: int) -> None:
    """`count` requests, as many at a time."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NODES, FEATURES), dtype=np.float32)
    edge_index = rng.integers(0, NODES, (2, EDGES), dtype=np.int32)
    with Client(server.target) as client, ThreadPoolExecutor(in_flight) as threads:
        asked = [
            threads.submit(client.infer, "gcn", x=x, edge_index=edge_index) for _ in range(count)
        ]
        for answer in asked:
            answer.result()


def figures(database: Path, in_flight: int) -> dict[str, Any]:
    """What the server kept, without the first requests, which start together or cold."""
    query = f"SELECT {', '.join(COLUMNS)} FROM request WHERE status = 'OK' ORDER BY row_id"
    with closing(sqlite3.connect(database)) as connection:
        rows = np.array(connection.execute(query).fetchall())[2 * in_flight :]
    prepare, exposed, queue, run, _ = rows.T
    return {
        "requests": len(rows),
        "prepare_us": quantiles(prepare / 1e3),
        "exposed_us": quantiles(exposed / 1e3),
        "queue_us": quantiles(queue / 1e3),
        "run_us": quantiles(run / 1e3),
        "hidden": round(1 - float(exposed.sum() / prepare.sum()), 4),
        "delayed": round(float((exposed > 0).mean()), 4),
        "cost": round(float(exposed.sum() / (exposed.sum() + run.sum())), 4),
    }


def quantiles(values: Any) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 90, 99)}


def show(result: dict[str, dict[str, Any]]) -> None:
    names = ("in flight", "prepare p50, p99", "hidden", "launches delayed", "cost")
    table = Table(*names, title="Preparing behind other work")
    for in_flight, row in result.items():
        prepare = row["prepare_us"]
        table.add_row(
            in_flight,
            f"{prepare['p50']:,.0f}, {prepare['p99']:,.0f} µs",
            *(f"{row[name]:.1%}" for name in ("hidden", "delayed", "cost")),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
