"""The solo times of each request of a workload in a live server.

Requests go one by one, with pauses in which cores cool down as they do at a light load: a core kept
hot by a tight loop would give times that no lone request sees.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.kit.echoes import UNLIMITED
from bench.kit.open_loop import Shapes
from bench.kit.processes import database_rows
from bench.kit.servers import ServerProcess
from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from serve.core.types import Bytes, Nanos, TaskEstimate
from serve.wire.messages import INFER_METHOD, decode_response
from serve.workload import PoolSpec, Trace, TraceHeader, TraceItem, WorkloadTask

REPEATS = 3
PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Solo:
    """Medians of one request."""

    #: Forward pass, and in the server from arrival to answer.
    run_ns: int
    solo_ns: int
    #: As the client sees it.
    client_ns: int
    peak_bytes: int
    reserve_bytes: int

    @property
    def estimate(self) -> TaskEstimate:
        """The estimate for a simulation that knows each request's own time."""
        return TaskEstimate(
            Bytes(self.peak_bytes), Bytes(self.reserve_bytes), Nanos(self.run_ns),
            Nanos(max(self.run_ns, self.solo_ns)),
        )  # fmt: skip


def measure_solo(
    server: ServerProcess, tasks: Sequence[WorkloadTask], pool: PoolSpec
) -> dict[WorkloadTask, Solo]:
    """Return the solo times of every task, each sent alone `REPEATS` times."""
    distinct = sorted(set(tasks))
    seen: dict[WorkloadTask, list[tuple[str, int]]] = defaultdict(list)
    with grpc.insecure_channel(server.target, UNLIMITED) as channel:
        call: Any = channel.unary_unary(INFER_METHOD)
        for task, message in [*zip(distinct, messages_of(distinct, pool), strict=True)] * REPEATS:
            time.sleep(PAUSE_S)
            started_ns = time.perf_counter_ns()
            answer = call(message)
            taken_ns = time.perf_counter_ns() - started_ns
            seen[task].append((str(decode_response(answer).parameters["request_uid"]), taken_ns))
    wait_for_rows(server, len(distinct) * REPEATS)
    kept = records(server.database)
    return {task: _solo([(kept[uid], ns) for uid, ns in rows]) for task, rows in seen.items()}


def _solo(rows: list[tuple[dict[str, Any], int]]) -> Solo:
    def median(name: str) -> int:
        value: float = statistics.median(row[name] for row, _ in rows)
        return round(value)

    return Solo(
        run_ns=median("run_ns"),
        solo_ns=median("latency_ns"),
        client_ns=round(statistics.median(ns for _, ns in rows)),
        peak_bytes=median("pmc_estimate_bytes"),
        reserve_bytes=median("reserve_bytes"),
    )


def messages_of(tasks: Sequence[WorkloadTask], pool: PoolSpec) -> tuple[bytes, ...]:
    """Return the encoded request of each task."""
    header = TraceHeader(workload="mix", seed=0, rate_hz=1.0, pool=pool)
    items = tuple(
        TraceItem(
            offset_ns=0, seed=0, model=task.model, dataset=task.graph.dataset,
            index=task.graph.index, num_nodes=task.graph.num_nodes, num_edges=task.graph.num_edges,
        )
        for task in tasks
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        Trace(header, items).save(Path(file.name))
        options = LoadOptions(target="", trace=Path(file.name))
        return make_plan(options, Shapes()).messages


def wait_for_rows(server: ServerProcess, count: int) -> None:
    """Wait until the report's database has `count` rows: they appear a little later."""
    give_up = time.monotonic() + 10
    while len(records(server.database)) < count and time.monotonic() < give_up:
        time.sleep(0.1)


def records(database: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the report's database by request uid."""
    return {row["request_uid"]: row for row in database_rows(database)}
