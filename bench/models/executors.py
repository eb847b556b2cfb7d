"""Measure forward passes by the server's executors against stock PyG, as a user would run each.

    python -m bench.models.executors [--quick] [--models gcn,sage,gin,gat] [--rounds 15]

Three processes hold the same models (`serve.models.zoo`, 3 × 64 and 8 × 256, 100 features, 12
classes) and graphs (random, 10 edges a node), on one thread each: `stock` is plain PyG with the
environment as it is; `csr` and `csr_compiled` have a lane's allocator settings and the executor.
They are asked in turns, and the wall time of each forward pass counts. A ratio is stock ÷ executor
of one round; the median is given with the lowest and highest. Peak memory is that of torch's
allocator, traced.

`--models` may also name those of `bench.kit.architectures`, which run at 3 × 64. A model without a
layer that `csr` knows runs PyG's own code with a lane's allocator, and `compiled` in place of
`csr_compiled`.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.kit.measure import in_turns, ratios, spread
from bench.kit.script import Script, Table

#: Width and depth.
SHAPES = {"small": (64, 3), "paper": (256, 8)}
FEATURES, CLASSES, DEGREE = 100, 12, 10
ZOO = ("gcn", "sage", "gin", "gat")
#: The processes; the first is what the others are compared with.
KINDS = ("stock", "csr", "csr_compiled")
EXECUTORS_OF = {"stock": (), "csr": ("csr",), "csr_compiled": ("csr_compiled", "compiled")}
#: No round of one graph begins after this time.
LONGEST_S = 6.0
SCRIPT = Script(
    "executors",
    full={"models": ZOO, "rounds": 15, "nodes": (100, 300, 1_000, 3_000, 8_000, 20_000)},
    quick={"models": ZOO[:1], "rounds": 3, "nodes": (100,)},
    tables=[
        Table("Forward pass, one thread", "rows", {
            "model": "{model} {shape}", "nodes": "{nodes:,}", "stock, ms": "{stock[ms]:.2f}",
            "csr, ms": "{csr[ms]:.3f}", "csr_compiled, ms": "{csr_compiled[ms]:.3f}",
            "stock ÷ csr": "{csr[ratio]:.1f}", "stock ÷ csr_compiled": "{csr_compiled[ratio]:.1f}",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and size, and geometric means of the ratios."""
    processes = {kind: start(kind) for kind in KINDS}
    asked = [(model, shape) for shape in SHAPES for model in options.models if model in ZOO]
    asked += [(model, "architecture") for model in options.models if model not in ZOO]
    rows = [
        compared(processes, (model, shape, nodes), options.rounds)
        for model, shape in asked
        for nodes in options.nodes
    ]
    for process in processes.values():
        process.send(None)
    shapes = ("all", *dict.fromkeys(row["shape"] for row in rows))
    means = {kind: {shape: means_of(rows, kind, shape) for shape in shapes} for kind in KINDS[1:]}
    return {"threads": 1, "ratios": means, "rows": rows}


def means_of(rows: list[dict[str, Any]], kind: str, shape: str) -> dict[str, float]:
    """Return the geometric mean and the lowest ratio of the executor."""
    found = [row[kind]["ratio"] for row in rows if shape in ("all", row["shape"])]
    mean = statistics.geometric_mean(found)
    return {"geometric_mean": round(mean, 2), "lowest": min(found)}


def start(kind: str) -> Connection:
    """Return the pipe of a new process, which has its environment from its first instruction."""
    from serve.server.lanes.processes import LANE_ENVIRONMENT

    own = LANE_ENVIRONMENT if kind != "stock" else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(own)
    try:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        context.Process(target=serve, args=(kind, there), daemon=True).start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return here


def compared(
    processes: dict[str, Connection], case: tuple[str, str, int], rounds: int
) -> dict[str, Any]:
    """Return times, ratios and peaks of all kinds on one graph."""
    facts = {kind: ask(process, case) for kind, process in processes.items()}
    ways = {kind: partial(ask, process, "run") for kind, process in processes.items()}
    times = in_turns(ways, rounds, warm_up=0, limit_s=LONGEST_S)
    model, shape, nodes = case
    row: dict[str, Any] = {"model": model, "shape": shape, "nodes": nodes, "edges": DEGREE * nodes}
    for kind in KINDS:
        middle, low, high = spread(ratios(times["stock"], times[kind]), 2)
        row[kind] = facts[kind] | {
            "ms": round(statistics.median(times[kind]), 4),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
        }
    return row


def ask(process: Connection, question: Any) -> Any:
    """Return the process's answer: facts of a model and graph to hold, or the ms of a run."""
    process.send(question)
    return process.recv()


def serve(kind: str, channel: Connection) -> None:
    """Answer until told to end."""
    import torch

    from serve.lane.measure.tracing import trace

    torch.set_num_threads(1)
    run: Callable[[], Any] = lambda: None  # noqa: E731
    held: dict[tuple[str, str], tuple[Any, Any, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while (question := channel.recv()) is not None:
            if question == "run":
                channel.send(mean_ms(run))
                continue
            model, shape, nodes = question
            if (model, shape) not in held:
                held.clear()
                held[model, shape] = loaded_on(kind, model, shape, Path(folder))
            loaded, signature, about = held[model, shape]
            run = partial(loaded.run, graph_for(nodes, loaded.spec.inputs, signature))
            for _ in range(2):
                run()
            peak_bytes = trace(run, loaded.module, nodes, DEGREE * nodes).peak_bytes
            channel.send(about | {"peak_bytes": peak_bytes})


def loaded_on(kind: str, model: str, shape: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model on the executor, its signature, and facts for the result."""
    import torch

    from bench.kit.architectures import NODE_INPUTS, load, on_executor, wrap
    from serve.lane.executors import CannotRun
    from serve.models import zoo

    def make() -> tuple[Any, Any]:
        if shape not in SHAPES:
            return load(model, features=FEATURES)
        hidden, layers = SHAPES[shape]
        torch.manual_seed(0)
        factory = getattr(zoo, model)
        module = factory(FEATURES, CLASSES, hidden_channels=hidden, num_layers=layers)
        return wrap(module, model, NODE_INPUTS, FEATURES)

    loaded, signature = make()
    about: dict[str, Any] = {}
    for name in EXECUTORS_OF[kind]:
        started_s = time.monotonic()
        try:
            loaded = on_executor(make, name, folder / f"{model} {shape} {name}")
            about["ready_s"] = round(time.monotonic() - started_s, 1)
            break
        except CannotRun as error:
            about.setdefault("reason", str(error))
    return loaded, signature, {"executor": loaded.executor, **about}


def graph_for(nodes: int, names: tuple[str, ...], signature: Any) -> dict[str, Any]:
    """Return the inputs of those names for a seeded random graph."""
    import torch

    torch.manual_seed(nodes)
    edges = DEGREE * nodes
    made = {
        "x": torch.randn(nodes, FEATURES),
        "edge_index": torch.randint(nodes, (2, edges)),
        "edge_weight": torch.rand(edges),
        "edge_attr": torch.rand(edges, signature.edge_dim or 0),
        "batch": torch.zeros(nodes, dtype=torch.int64),
    }
    return {name: made[name] for name in names}


def mean_ms(run: Callable[[], Any]) -> float:
    """Return the mean of as many passes as fit into ten milliseconds, at least one."""
    started_ns = time.perf_counter_ns()
    passes = 0
    while (took_ns := time.perf_counter_ns() - started_ns) < 10_000_000 or not passes:
        run()
        passes += 1
    return took_ns / passes / 1e6


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
