"""Measure what a front before servers costs, and a client that knows several.

    python -m bench.cluster.front [--quick] [--rounds 3000]

Two real servers, GCN, one request at a time and in turns: straight to one server after the other;
over HAProxy (``gnnserve front``) before both; by a client that knows both. A server that answers
every other request finds colder caches, so all ways ask both. `added_us` is what a way adds to the
straight one, the median of the differences between neighbours in time with its 95 % bootstrap
interval. Processor time is that of all processes together, of whole blocks of requests in turns: it
holds while nothing else runs.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.measure import elapsed_us, in_turns, median_interval, percentiles
from bench.kit.processes import descendants, processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess, free_ports
from bench.kit.waiting import wait_for
from serve.client import Client
from serve.cluster.front import Front

FEATURES = 32
#: Nodes with five edges each: about 10 KB and 1 MB in a request.
NODES = {"10 KB": 48, "1 MB": 4_800}
STRAIGHT, FRONT, KNOWING = "straight", "over the front", "by a client that knows both"
#: What is asked at 10 KB and at 1 MB: added time and processor time, µs.
AIMS = {("10 KB", FRONT): (200, 150), ("1 MB", FRONT): (1300,)}

SCRIPT = Script(
    "cluster_front",
    full={"rounds": 3000, "blocks": 20, "block": 200},
    quick={"rounds": 10, "blocks": 2, "block": 5},
    tables=[
        Table("One request at a time", "rows", {
            "request": "{size}", "way": "{way}", "p50, µs": "{p50:,.0f}", "p99, µs": "{p99:,.0f}",
            "added": "{added_us[0]:,.0f} ({added_us[1]:,.0f} to {added_us[2]:,.0f})",
            "aim": "{aim_us}", "processor, µs": "{cpu_us:,.0f}",
            "processor added": "{cpu_added_us[0]:,.0f}", "its aim": "{cpu_aim_us}",
        })
    ],
)  # fmt: skip


@contextmanager
def clients() -> Iterator[tuple[dict[str, list[Client]], list[int]]]:
    """Yield the clients of each way, and the processes that requests keep busy."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for name in ("first", "second"):
            own = folder / name
            own.mkdir()
            sections: dict[str, dict[str, object]] = {"models": {"load": ["gcn"]}}
            servers.append(stack.enter_context(
                ServerProcess(own, sections=sections, usual_calibrations=True)
            ))  # fmt: skip
        (port,) = free_ports(1)
        targets = [server.target for server in servers]
        front = Front("127.0.0.1", port, targets, folder)
        stack.callback(front.stop)
        front.start()
        wait_for(lambda: front.ready_count == 2 or front.failure, "both to be ready")
        found = {
            STRAIGHT: [Client(target) for target in targets],
            FRONT: [Client(f"127.0.0.1:{port}")],
            KNOWING: [Client(",".join(targets))],
        }
        for client in chain(*found.values()):
            stack.enter_context(client)
        # The front's process is a child of this one, as are the servers.
        yield found, [os.getpid(), *descendants(os.getpid())]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each size and way."""
    rows = []
    with clients() as (asked, pids):
        for size, nodes in NODES.items():
            rng = np.random.default_rng(0)
            tensors = {
                "x": rng.standard_normal((nodes, FEATURES), np.float32),
                "edge_index": rng.integers(0, nodes, (2, 5 * nodes)),
            }
            calls = {way: partial(_ask, cycle(own), tensors) for way, own in asked.items()}
            rounds = options.rounds if size == "10 KB" else max(3, options.rounds // 5)
            times = in_turns(
                {way: partial(elapsed_us, call) for way, call in calls.items()},
                rounds, warm_up=max(1, rounds // 20),
            )  # fmt: skip
            spent = in_turns(
                {way: partial(spent_us, call, options.block, pids) for way, call in calls.items()},
                options.blocks,
            )
            rows += [_row(size, way, times, spent) for way in calls]
    return {"rows": rows}


def _ask(clients: Iterator[Client], tensors: dict[str, Any]) -> None:
    """Send a request by the next of the clients."""
    next(clients).infer("gcn", **tensors)


def spent_us(call: Callable[[], object], count: int, pids: list[int]) -> float:
    """Return the processor time of a call with all its processes, the mean of `count`."""
    before_ns = sum(map(_processor_ns, pids))
    for _ in range(count):
        call()
    return (sum(map(_processor_ns, pids)) - before_ns) / count / 1e3


def _processor_ns(pid: int) -> int:
    try:
        return processor_ns(pid)
    except FileNotFoundError:  # it has ended: a calibrator
        return 0


def _row(
    size: str, way: str, times: dict[str, list[float]], spent: dict[str, list[float]]
) -> dict[str, Any]:
    aims = dict(zip(("aim_us", "cpu_aim_us"), AIMS.get((size, way), ()), strict=False))
    return {
        "size": size, "way": way, **percentiles(times[way], (50, 99)),
        "added_us": _added(times, way),
        "cpu_us": float(np.median(spent[way])), "cpu_added_us": _added(spent, way),
        **aims,
    }  # fmt: skip


def _added(found: dict[str, list[float]], way: str) -> list[float]:
    return median_interval(np.array(found[way]) - np.array(found[STRAIGHT]), 1)


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
