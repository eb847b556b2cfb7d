"""What a server that has just started promises lone requests, and what they then take.

    python -m bench.host.first_promise [--quick] [--starts 10] [--against CHECKOUT] [--out FILE]

Each start is a server of its own on the demo models, calibrated before. It is sent graphs of 30 to
10,000 nodes with 10 edges a node, one by one in an order of their own, with pauses in which cores
cool down; all of them once (`first`), then again (`second`), by when requests have corrected what
the server knows. Measured is latency ÷ solo estimate, both in the server; beyond the QoS factor, 2,
a lone request would come late. Another checkout, with its own `.venv`, takes its turns in between.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from bench.kit.solo import UNLIMITED, records, wait_for_rows
from serve.wire.messages import INFER_METHOD, decode_response, encode_request

RESULT = RESULTS / "first_promise.json"
MODELS = ("gcn", "sage", "gin", "gat")
NODES = (30, 100, 300, 1_000, 3_000, 10_000)
EDGES_PER_NODE, FEATURES = 10, 32
ROUNDS = ("first", "second")
PAUSE_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=10, help="servers started of each checkout")
    parser.add_argument("--quick", action="store_true", help="2 starts")
    parser.add_argument("--against", type=Path, help="another checkout, set up")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    checkouts: dict[str, Path | None] = {"this": None}
    if options.against is not None:
        checkouts["other"] = options.against.resolve()
    ratios: dict[str, list[float]] = defaultdict(list)
    messages = {(m, n): message(m, n) for m, n in itertools.product(MODELS, NODES)}
    for seed in range(2 if options.quick else options.starts):
        for label, checkout in checkouts.items():
            for name, found in one_start(checkout, messages, seed).items():
                ratios[f"{label}, {name}"] += found
    results = {name: summary(found) for name, found in ratios.items()}
    show(results)
    content = {"pause_s": PAUSE_S, "latency_over_solo": results}
    write_result(options.out, content)


def message(model: str, num_nodes: int) -> bytes:
    """A request for a random graph."""
    rng = np.random.default_rng(num_nodes)
    x = rng.standard_normal((num_nodes, FEATURES), dtype=np.float32)
    edges = rng.integers(0, num_nodes, (2, EDGES_PER_NODE * num_nodes))
    return encode_request(model, {"x": x, "edge_index": edges})


def one_start(
    checkout: Path | None, messages: dict[tuple[str, int], bytes], seed: int
) -> dict[str, list[float]]:
    """latency ÷ solo estimate of all requests, by round and in the round by size."""
    found: dict[str, list[float]] = defaultdict(list)
    order = list(messages)
    random.Random(seed).shuffle(order)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(
            Path(folder), policy="slack", discipline="preemptive", checkout=checkout,
            calibration_s=6.0,
        ) as server,
        grpc.insecure_channel(server.target, UNLIMITED) as channel,
    ):  # fmt: skip
        call: Any = channel.unary_unary(INFER_METHOD)
        names: dict[str, tuple[str, str]] = {}
        for name, key in itertools.product(ROUNDS, order):
            time.sleep(PAUSE_S)
            answer = decode_response(call(messages[key]))
            names[str(answer.parameters["request_uid"])] = name, f"{name}, {key[1]:,} nodes"
        wait_for_rows(server, len(names))
        for uid, row in records(server.database).items():
            for name in names[uid]:
                found[name].append(row["latency_ns"] / row["solo_estimate_ns"])
    return found


def summary(ratios: list[float]) -> dict[str, float]:
    p5, p50, p95, p99 = np.quantile(ratios, (0.05, 0.5, 0.95, 0.99))
    return {
        "requests": len(ratios),
        "p5": round(p5, 3), "p50": round(p50, 3), "p95": round(p95, 3), "p99": round(p99, 3),
        "share_beyond_2": round(float(np.mean(np.array(ratios) > 2.0)), 4),
    }  # fmt: skip


def show(results: dict[str, dict[str, float]]) -> None:
    table = Table("latency ÷ solo estimate", "requests", "p5", "p50", "p95", "p99", "beyond 2")
    for name, found in sorted(results.items(), key=lambda item: item[0].count(",")):
        table.add_row(
            name, str(found["requests"]),
            *(f"{found[key]:.2f}" for key in ("p5", "p50", "p95", "p99")),
            f"{found['share_beyond_2']:.1%}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
