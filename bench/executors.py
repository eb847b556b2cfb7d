"""Forward passes by the server's executor against stock PyG, as a user would run each.

    python -m bench.executors [--quick] [--models gcn,sage,gin,gat] [--rounds N]

Two processes hold the same models (`serve.models.zoo`, 3 × 64 and 8 × 256, 100 features, 12
classes) and graphs (random, 10 edges a node), on one thread each: `stock` is plain PyG with the
environment as it is; `csr` has a lane's allocator settings and the executor. They are asked in
turns, each graph `rounds` times after a warm-up, and wall time of each forward pass counts. A ratio
is stock ÷ csr per round; the median is given with the lowest and highest. Peak memory is that of
torch's allocator, traced.

Beside it the roofline of `csr`: floating point operations of its linear maps ÷ the rate of a
[N, width] × [width, width] product measured in the same process, plus bytes its kernels along
edges must move ÷ the bandwidth of a copy of a [N, width] matrix, and how many times longer the pass
takes. Writes bench/results/executors.json.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import machine_facts

RESULT = Path(__file__).parent / "results" / "executors.json"
#: Width and depth.
SHAPES = {"small": (64, 3), "paper": (256, 8)}
FEATURES, CLASSES, DEGREE = 100, 12, 10
NODES = (100, 300, 1_000, 3_000, 8_000, 20_000)
QUICK_NODES = (100, 1_000, 8_000)
#: Whichever is first ends the rounds of one graph.
LONGEST_S = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three sizes of graphs, 5 rounds")
    parser.add_argument("--models", default="gcn,sage,gin,gat")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    rounds = arguments.rounds or (5 if arguments.quick else 15)
    rows = []
    stock, csr = _start("stock"), _start("csr")
    for shape in SHAPES:
        for model in arguments.models.split(","):
            sizes = QUICK_NODES if arguments.quick else NODES
            rows += [_compare(stock, csr, (model, shape, nodes), rounds) for nodes in sizes]
    for process in (stock, csr):
        process.send(None)
    document = {
        "machine": machine_facts(),
        "load_average": os.getloadavg(),
        "quick": arguments.quick,
        "threads": 1,
        "geometric_mean": _geometric([row["ratio"] for row in rows]),
        "geometric_mean_by_shape": {
            shape: _geometric([row["ratio"] for row in rows if row["shape"] == shape])
            for shape in SHAPES
        },
        "lowest": min(row["ratio"] for row in rows),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    show(document)


def _start(kind: str) -> Connection:
    """A process of its own, with the environment it is to have from its first instruction."""
    from serve.runtime.processes import LANE_ENVIRONMENT

    own = LANE_ENVIRONMENT if kind == "csr" else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(own)
    try:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        context.Process(target=_serve, args=(kind, there), daemon=True).start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return here


def _compare(
    stock: Connection, csr: Connection, what: tuple[str, str, int], rounds: int
) -> dict[str, Any]:
    facts = [_ask(process, ("hold", *what)) for process in (stock, csr)]
    pairs: list[tuple[float, float]] = []
    until = time.monotonic() + LONGEST_S
    while len(pairs) < rounds and (len(pairs) < 3 or time.monotonic() < until):
        pairs.append((_ask(stock, "run"), _ask(csr, "run")))
    ratios = [theirs / ours for theirs, ours in pairs]
    ours_ms = statistics.median(ours for _, ours in pairs)
    bound_ms = facts[1]["roofline_ms"]
    model, shape, nodes = what
    return {
        "model": model,
        "shape": shape,
        "nodes": nodes,
        "edges": DEGREE * nodes,
        "rounds": len(pairs),
        "stock_ms": round(statistics.median(theirs for theirs, _ in pairs), 3),
        "csr_ms": round(ours_ms, 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_low": round(min(ratios), 2),
        "ratio_high": round(max(ratios), 2),
        "stock_peak_bytes": facts[0]["peak_bytes"],
        "csr_peak_bytes": facts[1]["peak_bytes"],
        "roofline_ms": round(bound_ms, 3),
        "over_roofline": round(ours_ms / bound_ms, 2),
    }


def _ask(process: Connection, question: Any) -> Any:
    process.send(question)
    return process.recv()


def _serve(kind: str, channel: Connection) -> None:
    """Answer until told to end."""
    import torch

    from bench.architectures import NODE_INPUTS, wrap
    from serve.models import zoo
    from serve.models.executors import with_executor
    from serve.models.tracing import trace

    torch.set_num_threads(1)
    run: Callable[[], Any] = lambda: None  # noqa: E731
    while (question := channel.recv()) is not None:
        if question == "run":
            channel.send(_mean_ms(run))
            continue
        _, model, shape, nodes = question
        hidden, layers = SHAPES[shape]
        torch.manual_seed(nodes)
        factory = getattr(zoo, model)
        module = factory(FEATURES, CLASSES, hidden_channels=hidden, num_layers=layers)
        loaded, _ = wrap(module, model, NODE_INPUTS, FEATURES)
        inputs = {
            "x": torch.randn(nodes, FEATURES),
            "edge_index": torch.randint(nodes, (2, DEGREE * nodes)),
        }
        if kind == "csr":
            loaded = with_executor(loaded, "csr")

        def run(loaded: Any = loaded, inputs: Any = inputs) -> Any:
            return loaded.run(inputs)

        for _ in range(2):
            run()
        facts: dict[str, float] = {
            "peak_bytes": trace(run, loaded.module, nodes, DEGREE * nodes).peak_bytes
        }
        if kind == "csr":
            facts["roofline_ms"] = _roofline_ms(run, nodes, hidden)
        channel.send(facts)


def _mean_ms(run: Callable[[], Any]) -> float:
    """Mean of as many passes as fit ten milliseconds, at least one: PyG in a loop."""
    started = time.perf_counter_ns()
    passes = 0
    while True:
        run()
        passes += 1
        took_ns = time.perf_counter_ns() - started
        if took_ns > 10_000_000:
            return took_ns / passes / 1e6


def _roofline_ms(run: Callable[[], Any], nodes: int, width: int) -> float:
    """What the pass's linear maps and kernels need at the rates of this process."""
    import torch

    from serve.models.executors import kernels

    functional: Any = torch.nn.functional
    counts = {"flops": 0.0, "bytes": 0.0}
    linear, aggregate, attend = functional.linear, kernels.aggregate, kernels.attend

    def counted_linear(x: Any, weight: Any, *more: Any) -> Any:
        counts["flops"] += 2.0 * x.shape[0] * weight.numel()
        return linear(x, weight, *more)

    def counted_aggregate(graph: Any, x: Any, weight: Any = None, *more: Any, **named: Any) -> Any:
        a_slot = 4 * x.shape[1] + 4 + (0 if weight is None else 4)
        counts["bytes"] += graph.slots * a_slot + x.nbytes * (
            2 if named.get("skip") is not None else 1
        )
        return aggregate(graph, x, weight, *more, **named)

    def counted_attend(graph: Any, score: Any, left: Any, right: Any, value: Any, heads: int,
                       **named: Any) -> Any:  # fmt: skip
        out = attend(graph, score, left, right, value, heads, **named)
        counts["bytes"] += graph.slots * (4 * value.shape[1] + 4 + 8 * heads) + out.nbytes
        return out

    functional.linear, kernels.aggregate, kernels.attend = (
        counted_linear, counted_aggregate, counted_attend,
    )  # fmt: skip
    try:
        run()
    finally:
        functional.linear, kernels.aggregate, kernels.attend = linear, aggregate, attend
    x, weight = torch.randn(nodes, width), torch.randn(width, width)
    target = torch.empty_like(x)
    with torch.inference_mode():
        product_ns = _best_ns(lambda: linear(x, weight))
        copy_ns = _best_ns(lambda: target.copy_(x))
    return (
        counts["flops"] / (2.0 * nodes * width * width) * product_ns
        + counts["bytes"] / (2.0 * x.nbytes) * copy_ns
    ) / 1e6


def _best_ns(run: Callable[[], Any]) -> int:
    best = 1 << 62
    for _ in range(15):
        started = time.perf_counter_ns()
        run()
        best = min(best, time.perf_counter_ns() - started)
    return best


def _geometric(values: list[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 2) if values else 0.0


def show(document: dict[str, Any]) -> None:
    table = Table(title="forward pass, one thread: stock PyG ÷ csr")
    for column in ("model", "nodes", "stock ms", "csr ms", "ratio", "lowest, highest",
                   "peak ÷ stock's", "÷ roofline"):  # fmt: skip
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in document["rows"]:
        table.add_row(
            f"{row['model']} {row['shape']}",
            f"{row['nodes']:,}",
            f"{row['stock_ms']:.2f}",
            f"{row['csr_ms']:.3f}",
            f"{row['ratio']:.1f}",
            f"{row['ratio_low']:.1f}, {row['ratio_high']:.1f}",
            f"{row['csr_peak_bytes'] / row['stock_peak_bytes']:.2f}",
            f"{row['over_roofline']:.1f}",
        )
    Console(width=110).print(table)
    by_shape = document["geometric_mean_by_shape"]
    Console().print(
        f"geometric mean {document['geometric_mean']}"
        f" (small {by_shape['small']}, paper {by_shape['paper']}), lowest {document['lowest']}"
    )


if __name__ == "__main__":
    main()
