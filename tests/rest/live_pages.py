"""A gateway with the live page, before a database with minutes of requests that ended just now."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from serve.obs.live.tally import ServerState
from serve.obs.live.training import ShownJob
from serve.obs.record import RequestRecord
from serve.obs.sink import RecordSink
from serve.obs.store import RecordStore
from tests.obs.builders import RUN, traffic
from tests.rest.conftest import Gateway


class LiveServer(NamedTuple):
    """What the tests of the page use."""

    gateway: Gateway
    sink: RecordSink
    rows: Sequence[RequestRecord]

    @property
    def origin(self) -> str:
        """Address of the page without its path."""
        return f"http://127.0.0.1:{self.gateway.port}"


def recent(count: int, seconds: float, seed: int = 1, **fields: object) -> list[RequestRecord]:
    """Return requests that arrived within the last seconds, in order."""
    rows = traffic(count, seed)
    first, last = rows[0].arrived_unix_ns, max(row.arrived_unix_ns for row in rows)
    begin, span = time.time_ns() - int(seconds * 1e9), int((seconds - 3) * 1e9)
    return [
        msgspec.structs.replace(
            row,
            arrived_unix_ns=begin + (row.arrived_unix_ns - first) * span // max(last - first, 1),
            **fields,
        )
        for row in rows
    ]


def fill(database: Path, rows: Sequence[RequestRecord], seed: int = 1) -> None:
    """Write requests and states to a database as a server does, second by second."""
    rng = random.Random(seed)
    started = msgspec.structs.replace(RUN, started_unix_ns=time.time_ns() - 10**12)
    store = RecordStore(database, started)
    by_second: dict[int, list[RequestRecord]] = {}
    for row in rows:
        by_second.setdefault((row.arrived_unix_ns + row.latency_ns) // 10**9, []).append(row)
    store._buckets._open_s = 0
    for second in range(min(by_second), int(time.time()) + 1):
        for row in by_second.get(second, ()):
            store.insert(row)
            store.count(row, second)
        store.tell(ServerState(rng.randrange(6), 2**20 * rng.randrange(300), RUN.lanes), second)
        store.commit(second)
    store.close()


def training(job_id: int, state: str, epochs_done: int, **facts: object) -> ShownJob:
    """Return a job of 200 epochs of 13 ms."""
    known = {"model": "gcn", "graph": "cora", "epochs": 200, "loss": 0.52, "epoch_ns": 13_000_000}
    unknown = {"version": 0, "message": ""}
    return msgspec.convert(
        {"job_id": job_id, "state": state, "epochs_done": epochs_done, **known, **unknown, **facts},
        ShownJob,
    )


@contextmanager
def live_server(
    folder: Path, rows: Sequence[RequestRecord], jobs: tuple[ShownJob, ...] = ()
) -> Iterator[LiveServer]:
    """Serve the page before a database with these rows, and a sink that adds more."""
    database = folder / "live.db"
    if rows:
        fill(database, rows)
    run = msgspec.structs.replace(RUN, started_unix_ns=time.time_ns())
    with ExitStack() as stack:
        sink = RecordSink(RecordStore(database, run))
        stack.callback(sink.close)
        sink.watch_state(lambda: ServerState(0, 0, RUN.lanes))
        sink.watch_jobs(lambda: jobs)
        stack.callback(setattr, Gateway, "database", Gateway.database)
        Gateway.database = database
        yield LiveServer(Gateway(stack), sink, rows)
