"""Forward passes by the server's executors against stock PyG, as a user would run each.

    python -m bench.models.executors [--quick] [--models gcn,sage,gin,gat] [--rounds N]
        [--architectures]

Three processes hold the same models (`serve.models.zoo`, 3 × 64 and 8 × 256, 100 features, 12
classes) and graphs (random, 10 edges a node), on one thread each: `stock` is plain PyG with the
environment as it is; `csr` and `csr_compiled` have a lane's allocator settings and the executor.
They are asked in turns, each graph `rounds` times after a warm-up, and wall time of each forward
pass counts. A ratio is stock ÷ executor per round; the median is given with the lowest and highest.
Peak memory is that of torch's allocator, traced. How long each model took to compile stands beside.

`--models` may also name those of `bench.kit.architectures`, at 3 × 64 and three sizes; with
`--architectures` all of them are. Where `csr`
knows no layer of a model it is PyG's own code with a lane's allocator, and `compiled` is in place
of `csr_compiled`. Which executor is fastest at which size is told for each model.

Beside it the roofline of `csr`: floating point operations of its linear maps ÷ the rate of a
[N, width] × [width, width] product measured in the same process, plus bytes its kernels along
edges must move ÷ the bandwidth of a copy of a [N, width] matrix, and how many times longer each
takes. Writes bench/results/executors.json, unless it is quick.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.result import RESULTS, write_result

RESULT = RESULTS / "executors.json"
#: Width and depth.
SHAPES = {"small": (64, 3), "paper": (256, 8)}
FEATURES, CLASSES, DEGREE = 100, 12, 10
NODES = (100, 300, 1_000, 3_000, 8_000, 20_000)
ZOO = ("gcn", "sage", "gin", "gat")
QUICK_NODES = (100, 1_000, 8_000)
#: Whichever is first ends the rounds of one graph.
LONGEST_S = 6.0


#: The processes; the first is what the others are compared with.
KINDS = ("stock", "csr", "csr_compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three sizes of graphs, 5 rounds")
    parser.add_argument("--models", default="gcn,sage,gin,gat")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--architectures", action="store_true")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (5 if arguments.quick else 15)
    processes = {kind: _start(kind) for kind in KINDS}
    models = arguments.models.split(",")
    asked = [(shape, model) for shape in SHAPES for model in models if model in ZOO]
    asked += [("architecture", model) for model in models if model not in ZOO]
    if arguments.architectures:
        from bench.kit.architectures import ARCHITECTURES

        asked += [("architecture", one) for one in ARCHITECTURES if one not in (*ZOO, *models)]
    rows = []
    for shape, model in asked:
        sizes = QUICK_NODES if arguments.quick or shape not in SHAPES else NODES
        rows += [_compare(processes, (model, shape, nodes), rounds) for nodes in sizes]
    for process in processes.values():
        process.send(None)
    document = {
        "quick": arguments.quick,
        "threads": 1,
        "ratios": {
            kind: {
                shape: _summary(
                    [row[kind]["ratio"] for row in rows if shape in ("all", row["shape"])]
                )
                for shape in ("all", *dict.fromkeys(row["shape"] for row in rows))
            }
            for kind in KINDS[1:]
        },
        "fastest": {
            f"{model} {shape}": {
                row["nodes"]: min(KINDS, key=lambda kind, row=row: row[kind]["ms"])  # type: ignore[misc]
                for row in rows
                if (row["model"], row["shape"]) == (model, shape)
            }
            for shape, model in asked
        },
        "rows": rows,
    }
    if not arguments.quick:
        write_result(RESULT, document)
    show(document)


def _start(kind: str) -> Connection:
    """A process of its own, with the environment it is to have from its first instruction."""
    from serve.server.lanes.processes import LANE_ENVIRONMENT

    own = LANE_ENVIRONMENT if kind != "stock" else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
    processes: dict[str, Connection], what: tuple[str, str, int], rounds: int
) -> dict[str, Any]:
    facts = {kind: _ask(process, ("hold", *what)) for kind, process in processes.items()}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    until = time.monotonic() + LONGEST_S
    while len(times["stock"]) < rounds and (len(times["stock"]) < 3 or time.monotonic() < until):
        for kind, process in processes.items():
            times[kind].append(_ask(process, "run"))
    bound_ms = facts["csr"].pop("roofline_ms")
    model, shape, nodes = what
    row: dict[str, Any] = {
        "model": model,
        "shape": shape,
        "nodes": nodes,
        "edges": DEGREE * nodes,
        "rounds": len(times["stock"]),
        "roofline_ms": round(bound_ms, 3),
    }
    for kind in KINDS:
        ratios = [theirs / own for theirs, own in zip(times["stock"], times[kind], strict=True)]
        own_ms = statistics.median(times[kind])
        row[kind] = facts[kind] | {
            "ms": round(own_ms, 4),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_low": round(min(ratios), 2),
            "ratio_high": round(max(ratios), 2),
            "over_roofline": round(own_ms / bound_ms, 2) if bound_ms else None,
        }
    return row


def _ask(process: Connection, question: Any) -> Any:
    process.send(question)
    return process.recv()


def _serve(kind: str, channel: Connection) -> None:
    """Answer until told to end."""
    import torch

    from serve.lane.measure.tracing import trace

    torch.set_num_threads(1)
    run: Callable[[], Any] = lambda: None  # noqa: E731
    held: dict[tuple[str, str], tuple[Any, Any, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while (question := channel.recv()) is not None:
            if question == "run":
                channel.send(_mean_ms(run))
                continue
            _, model, shape, nodes = question
            if (model, shape) not in held:
                held.clear()
                held[model, shape] = _loaded(kind, model, shape, Path(folder))
            loaded, signature, about = held[model, shape]
            inputs = _graph(nodes, loaded.spec.inputs, signature)

            def run(loaded: Any = loaded, inputs: Any = inputs) -> Any:
                return loaded.run(inputs)

            for _ in range(2):
                run()
            facts = about | {
                "peak_bytes": trace(run, loaded.module, nodes, DEGREE * nodes).peak_bytes
            }
            if kind == "csr":
                facts["roofline_ms"] = _roofline_ms(run, nodes, SHAPES.get(shape, (64, 3))[0])
            channel.send(facts)


def _loaded(kind: str, model: str, shape: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The model on the executor, its signature, and what is to be told of it."""
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
    for name in {"stock": (), "csr": ("csr",), "csr_compiled": ("csr_compiled", "compiled")}[kind]:
        started = time.monotonic()
        try:
            loaded = on_executor(make, name, folder / f"{model} {shape} {name}")
            if kind == "csr_compiled":
                about["compile_s"] = round(time.monotonic() - started, 1)
            break
        except CannotRun as error:
            about.setdefault("reason", str(error))
    return loaded, signature, {"executor": loaded.executor, **about}


def _graph(nodes: int, names: tuple[str, ...], signature: Any) -> dict[str, Any]:
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

    from serve.lane.executors import kernels

    functional: Any = torch.nn.functional
    counts = {"flops": 0.0, "bytes": 0.0}
    linear, aggregate, attend = functional.linear, kernels.aggregate, kernels.attend
    combine = kernels.combine

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

    def counted_combine(graph: Any, width: int, *more: Any, **named: Any) -> Any:
        rows = [one for one in (named.get("x"), named.get("value")) if one is not None]
        counts["bytes"] += graph.slots * (4 * width * len(rows) + 4)
        counts["bytes"] += sum(
            named[name].nbytes for name in ("edge", "target", "skip") if named.get(name) is not None
        )
        if named.get("edge_map") is not None:
            counts["flops"] += 2.0 * named["edge"].shape[0] * named["edge_map"].numel()
        out = combine(graph, width, *more, **named)
        counts["bytes"] += out.nbytes
        return out

    functional.linear, kernels.aggregate, kernels.attend, kernels.combine = (
        counted_linear, counted_aggregate, counted_attend, counted_combine,
    )  # fmt: skip
    try:
        run()
    finally:
        functional.linear, kernels.aggregate, kernels.attend = linear, aggregate, attend
        kernels.combine = combine
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


def _summary(ratios: list[float]) -> dict[str, float]:
    """Geometric mean and lowest."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {"geometric_mean": round(mean, 2), "lowest": min(ratios)}


def show(document: dict[str, Any]) -> None:
    table = Table(title="forward pass, one thread: stock PyG ÷ executor")
    for column in ("model", "nodes", "stock ms", "csr ms", "compiled ms", "csr", "compiled",
                   "peak ÷ stock's", "÷ roofline"):  # fmt: skip
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in document["rows"]:
        stock, csr, compiled = (row[kind] for kind in KINDS)
        table.add_row(
            f"{row['model']} {row['shape']}",
            f"{row['nodes']:,}",
            f"{stock['ms']:.2f}",
            f"{csr['ms']:.3f}",
            f"{compiled['ms']:.3f}",
            f"{csr['ratio']:.1f} ({csr['ratio_low']:.1f}, {csr['ratio_high']:.1f})",
            f"{compiled['ratio']:.1f} ({compiled['ratio_low']:.1f}, {compiled['ratio_high']:.1f})",
            f"{csr['peak_bytes'] / stock['peak_bytes']:.2f},"
            f" {compiled['peak_bytes'] / stock['peak_bytes']:.2f}",
            "" if csr["over_roofline"] is None
            else f"{csr['over_roofline']:.1f}, {compiled['over_roofline']:.1f}",
        )  # fmt: skip
    Console(width=130).print(table)
    for kind, by_shape in document["ratios"].items():
        for shape, found in by_shape.items():
            print(f"{kind}, {shape}: geometric mean {found['geometric_mean']},"
                  f" lowest {found['lowest']}")  # fmt: skip


if __name__ == "__main__":
    main()
