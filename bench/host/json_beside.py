"""Measure how late small gRPC requests are while others of 50 MB of JSON arrive.

    python -m bench.host.json_beside [--quick] [--rounds N]

A client asks the demo's GCN at a fixed pace by gRPC, in turns

- alone,
- while another process sends a large graph by gRPC, again and again, with pauses,
- while that process sends the same graph as JSON over HTTP, as often.

Both large ways make a lane run the same graph. What JSON costs beyond that is the ratio of the
client's p99 in the third way to that in the second; `over_grpc` of a way has the median of that
ratio over the rounds with a 95 % bootstrap interval.
"""

import argparse
import http.client
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.measure import in_turns, median_interval, percentiles, ratios
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from serve.client import Client

FEATURES = 32
SECTIONS: dict[str, dict[str, object]] = {
    "server": {"max_message": "128 MiB"},
    "models": {"load": ["gcn"]},
    "device": {"memory_budget": "6 GiB"},
}
SCRIPT = Script(
    "json_beside",
    full={"rounds": 20, "seconds": 10.0, "rate": 50.0, "json_mb": 50, "pause_s": 2.0},
    quick={"rounds": 3, "seconds": 1.0, "rate": 20.0, "json_mb": 2, "pause_s": 0.1},
    tables=(
        Table(
            "latency of small gRPC requests, ms",
            "ways",
            {
                "beside": "{way}",
                "p50": "{p50}",
                "p99": "{p99}",
                "÷ beside gRPC": "{over_grpc[0]:.2f} ({over_grpc[1]:.2f} to {over_grpc[2]:.2f})",
                "large answers": "{large}",
            },
        ),
    ),
)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return latencies by way, and the ratios of their p99."""
    body, arrays = large_request(options.json_mb)
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), sections=SECTIONS)
        with server, Client(server.target) as client:
            senders = {
                "nothing": None,
                "gRPC": partial(send_grpc, server.target, arrays),
                "JSON": partial(send_json, server.http_port, body),
            }

            def beside(name: str) -> tuple[list[float], int]:
                with sending(senders[name], options.pause_s) as large:
                    return paced(client, options.rate, options.seconds), large.value

            found = in_turns({name: partial(beside, name) for name in senders}, options.rounds)
    worst = {
        name: [float(np.percentile(latencies, 99)) for latencies, _ in rounds]
        for name, rounds in found.items()
    }
    return {
        "json_bytes": len(body),
        "ways": [
            {
                "way": name,
                **percentiles(np.concatenate([one for one, _ in rounds]), (50, 99), 2),
                "over_grpc": median_interval(ratios(worst[name], worst["gRPC"])),
                "large": sum(count for _, count in rounds),
            }
            for name, rounds in found.items()
        ],
    }


def large_request(json_mb: float) -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """Return a request as JSON of that size, and its arrays."""
    digits = 9  # 0.1234567 and a comma
    nodes = int(json_mb * 1e6 / digits / FEATURES)
    x = np.random.default_rng(0).random((nodes, FEATURES), np.float32).round(6)
    edges = np.stack([np.arange(nodes), np.roll(np.arange(nodes), 1)])
    inputs = [
        {"name": name, "datatype": datatype, "shape": array.shape,
         "data": array.reshape(-1).tolist()}
        for name, datatype, array in (("x", "FP32", x.astype(np.float64).round(6)),
                                      ("edge_index", "INT64", edges))
    ]  # fmt: skip
    binary = {"binary_data_output": True}
    return json.dumps({"inputs": inputs, "parameters": binary}).encode(), {
        "x": x,
        "edge_index": edges,
    }


def paced(client: Client, rate: float, seconds: float) -> list[float]:
    """Ask at a fixed pace; return latencies in ms, from the time at which each was due."""
    x = np.zeros((100, FEATURES), np.float32)
    edges = np.zeros((2, 500), np.int64)
    started = time.perf_counter()
    latencies = []
    for number in range(int(rate * seconds)):
        due = started + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        client.infer("gcn", x=x, edge_index=edges)
        latencies.append((time.perf_counter() - due) * 1e3)
    return latencies


def send_json(port: int, body: bytes) -> None:
    """Send the large request once by HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v2/models/gcn/infer", body)
    answer = connection.getresponse()
    told = answer.read()
    connection.close()
    assert answer.status == 200, told[:1000]


def send_grpc(target: str, arrays: dict[str, Any]) -> None:
    """Send the large request once by gRPC."""
    with Client(target, max_message_bytes=1 << 30) as client:
        client.infer("gcn", **arrays)


@contextmanager
def sending(send: Any, pause_s: float) -> Iterator[Any]:
    """Call `send` in another process inside the block; yield the counter of its calls."""
    context = multiprocessing.get_context("spawn")
    count, ready, stop = context.Value("i", 0), context.Event(), context.Event()
    if send is None:
        yield count
        return
    process = context.Process(target=_repeat, args=(send, pause_s, count, ready, stop))
    process.start()
    try:
        ready.wait()
        yield count
    finally:
        stop.set()
        process.join()
        assert process.exitcode == 0


def _repeat(send: Any, pause_s: float, count: Any, ready: Event, stop: Event) -> None:
    ready.set()
    while not stop.is_set():
        send()
        count.value += 1
        stop.wait(pause_s)


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
