"""Estimated against measured peak memory, for PyG models on subgraphs of the paper's datasets.

    python -m bench.models.pmc_accuracy [--quick] [--data FOLDER] [--minutes M]
        [--models gcn,sage,…] [--datasets pubmed,…] [--executors eager,…]

Each model is measured once per dataset as at load (`serve.lane.measure.calibrate.measure_memory`),
for each executor, then estimated and run on graphs of each dataset: 25 breadth-first balls of 10
nodes to the largest that fits in LIMIT_BYTES, and 10 each of 10 to 2,000 nodes, of the same with
self-loops, and of disjoint unions of 2 to 16 of them, as merged requests are.

This process has a lane's allocator and meter. `measured` is the peak of tensors in that run plus
the inputs; weights are in neither. Errors are signed: estimate ÷ measured − 1. An under-estimate is
a run for which the reserve was too small: inputs, tensors, what kernels took besides, and the
answer's place. For GCN, SAGE and GIN the cost functions of GNNSched's Table 2 × 1.1 are beside it,
written from the paper. `resident` compares the reserve with what the whole process took, as the
kernel saw it. Runs are kept in build/pmc_accuracy.jsonl; a later start goes on where the last one
ended, and writes bench/results/pmc_accuracy.json of all there is. `--fresh` starts anew.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.kit.architectures import ARCHITECTURES, BOUNDED, load, on_executor
from bench.kit.as_lane import become_lane
from bench.kit.resident import exact_pages, resident_bytes
from bench.kit.result import RESULTS, ROOT, write_result
from serve.estimate import Calibration, ModelEstimator, Overhead
from serve.estimate.calibration import Ramp, TimeFit
from serve.estimate.estimator import SAFETY_FACTOR
from serve.graphs.datasets import TABLE_4, Dataset, load_dataset
from serve.graphs.subgraphs import subgraphs
from serve.lane.executors import EXECUTORS, CannotRun
from serve.lane.measure.calibrate import Allocator, measure_memory
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.native import Meter

RESULT = RESULTS / "pmc_accuracy.json"
WORK = ROOT / "build" / "pmc_accuracy.jsonl"
#: Width and depth.
SIZES = {"small": (64, 3), "paper": (256, 8)}
#: Graphs that are estimated to need more are cut down to what fits.
LIMIT_BYTES = 640 << 20
#: Graphs of each kind beside those up to the largest.
OTHERS = 10
#: Below this, constants and rounding rule; errors are given above it only.
LARGE_BYTES = 10_000_000
#: Runs whose resident memory is looked at: every sixth graph of those that need no more.
RESIDENT_EVERY, RESIDENT_BYTES = 6, 256 << 20
#: What the paper multiplies its estimates by.
PAPER_FACTOR = 1.1
FOUR = ("gcn", "sage", "gin", "gat")

Inputs = dict[str, torch.Tensor]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    executor: str
    model: str
    size: str
    dataset: str
    pool: str
    num_nodes: int
    num_edges: int
    num_loops: int
    #: Inputs and the peak of tensors, and these with what kernels took.
    measured_bytes: int
    held_bytes: int
    output_bytes: int
    #: As a task runs with: its loops counted.
    estimate_bytes: int
    reserve_bytes: int
    #: As it was admitted with.
    admitted_bytes: int
    paper_bytes: int | None
    resident_bytes: int | None
    warning: str

    @property
    def underestimated(self) -> bool:
        """Whether a lane would have had less than the run took."""
        return self.held_bytes + self.output_bytes > self.reserve_bytes


@dataclass(frozen=True, slots=True)
class Graph:
    """What matters of a graph: its edges, and where its parts begin when it is a union."""

    num_nodes: int
    #: int64 [2, E]
    edge_index: np.ndarray[Any, Any]
    starts: tuple[int, ...] = (0,)

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])

    def cut(self, num_nodes: int) -> "Graph":
        """The first nodes and the edges between them."""
        inside = (self.edge_index < num_nodes).all(axis=0)
        return Graph(num_nodes, self.edge_index[:, inside])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models on two sets")
    parser.add_argument("--data", type=Path, default=os.environ.get("GNNSERVE_DATA"))
    parser.add_argument("--scale", type=float, default=0.1, help="of generated graphs")
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--datasets", default=",".join(TABLE_4))
    parser.add_argument("--executors", default=",".join(EXECUTORS))
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so long")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--tables", action="store_true", help="only print the tables of the docs")
    arguments = parser.parse_args()
    if arguments.tables:
        print(markdown(msgspec.json.decode(RESULT.read_bytes())))
        return
    meter = become_lane("bench.models.pmc_accuracy")
    stop_at = time.monotonic() + 60 * arguments.minutes
    if arguments.fresh:
        WORK.unlink(missing_ok=True)
    rows = _kept()
    done = {(row.executor, row.model, row.size, row.dataset) for row in rows}
    names = ("pubmed", "artist") if arguments.quick else tuple(arguments.datasets.split(","))
    count = 6 if arguments.quick else 25
    sources: dict[str, str] = {}
    refused: dict[str, str] = {}
    left = 0
    for name in names:
        folder = Path(arguments.data) if arguments.data else None
        dataset = load_dataset(name, folder=folder, scale=arguments.scale)
        sources[name] = dataset.source
        sizes = ("small",) if arguments.quick else tuple(SIZES)
        wanted = product(arguments.executors.split(","), sizes, arguments.models.split(","))
        jobs = [job for job in wanted if (job[0], job[2], job[1], name) not in done]
        in_time = jobs and time.monotonic() < stop_at
        pools = _pools(dataset, count) if in_time else {}
        for executor, size, model in track(jobs, name, console=Console(stderr=True)):
            if time.monotonic() > stop_at:
                left += 1
                continue
            try:
                found = list(_measure(executor, model, size, dataset, pools, meter))
            except CannotRun as error:
                refused[f"{executor} {model}"] = str(error)
                continue
            _keep(found)
            rows += found
    document = {
        "quick": arguments.quick,
        "safety_factor": SAFETY_FACTOR,
        "limit_bytes": LIMIT_BYTES,
        "datasets": sources,
        "cannot_run": refused,
        "jobs_left": left,
        "all": _summary(rows),
        "pools": [
            {"pool": pool} | _summary([row for row in rows if row.pool == pool])
            for pool in dict.fromkeys(row.pool for row in rows)
        ],
        "by_dataset": [
            {"dataset": name} | _summary([row for row in rows if row.dataset == name])
            for name in dict.fromkeys(row.dataset for row in rows)
        ],
        "models": [
            {"executor": key[0], "model": key[1], "size": key[2]}
            | _summary([row for row in rows if (row.executor, row.model, row.size) == key])
            for key in dict.fromkeys((row.executor, row.model, row.size) for row in rows)
        ],
    }
    write_result(RESULT, document)
    show(document)


def _kept() -> list[Row]:
    if not WORK.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in WORK.read_bytes().splitlines()]


def _keep(rows: list[Row]) -> None:
    WORK.parent.mkdir(exist_ok=True)
    with WORK.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _pools(dataset: Dataset, count: int) -> dict[str, list[Graph]]:
    """`count` graphs up to the largest, and `OTHERS` of each other kind, by its name."""
    rng = np.random.default_rng(1)

    def cut(seed: int, most: int, count: int = OTHERS) -> list[Graph]:
        found = subgraphs(
            dataset, count, seed=seed, min_nodes=10, max_nodes=most, max_edges=1_000_000
        )
        return [Graph(graph.num_nodes, graph.edge_index) for graph in found]

    small = cut(1, 2_000)
    return {
        "to_largest": cut(0, dataset.num_nodes, count),
        "to_2000": small,
        "with_loops": [_with_loops(graph, rng) for graph in cut(2, 2_000)],
        "union": [
            _union([small[i] for i in rng.integers(0, len(small), rng.integers(2, 17))])
            for _ in range(OTHERS)
        ],
    }


def _with_loops(graph: Graph, rng: np.random.Generator) -> Graph:
    """The graph with a loop at up to half of its nodes."""
    nodes = np.flatnonzero(rng.random(graph.num_nodes) < rng.uniform(0, 0.5))
    return Graph(graph.num_nodes, np.hstack([graph.edge_index, np.stack([nodes, nodes])]))


def _union(parts: list[Graph]) -> Graph:
    """The disjoint union, nodes and edges in order."""
    starts = np.cumsum([0, *(part.num_nodes for part in parts)])
    edges = [part.edge_index + start for part, start in zip(parts, starts, strict=False)]
    return Graph(int(starts[-1]), np.hstack(edges), tuple(starts[:-1].tolist()))


def _measure(
    executor: str,
    model: str,
    size: str,
    dataset: Dataset,
    pools: dict[str, list[Graph]],
    meter: Meter,
) -> Iterator[Row]:
    """Every run of one model on one dataset."""
    spec = TABLE_4[dataset.name]
    hidden, layers = SIZES[size]

    def make() -> tuple[LoadedModel, Signature]:
        return load(
            model,
            features=spec.num_features,
            hidden=hidden,
            classes=spec.num_classes,
            layers=layers,
        )

    _, signature = make()
    with tempfile.TemporaryDirectory() as folder:
        loaded = on_executor(make, executor, Path(folder) / "package")
    estimator = _estimator(executor, loaded, signature, meter)
    widths = [spec.num_features, *[hidden] * (layers - 1), spec.num_classes]
    for pool, graphs in pools.items():
        for index, whole in enumerate(graphs):
            graph = _fitting(whole, estimator)
            inputs = _inputs(graph, loaded, signature)

            def run(inputs: Inputs = inputs) -> torch.Tensor:
                return loaded.run(inputs)

            staged = sum(tensor.nbytes for tensor in inputs.values())
            live = meter.live_bytes()
            held = staged + meter.held_by(run)
            measured = staged + meter.peak_bytes() - live
            at = graph.num_nodes, graph.num_edges
            loops = int((graph.edge_index[0] == graph.edge_index[1]).sum())
            estimate = estimator.estimate(*at, loops)
            look = index % RESIDENT_EVERY == RESIDENT_EVERY - 1 and pool == "to_largest"
            yield Row(
                executor=executor,
                model=model,
                size=size,
                dataset=dataset.name,
                pool=pool,
                num_nodes=at[0],
                num_edges=at[1],
                num_loops=loops,
                measured_bytes=measured,
                held_bytes=held,
                output_bytes=estimator.output_bytes(*at),
                estimate_bytes=estimate.peak_bytes,
                reserve_bytes=estimate.reserve_bytes,
                admitted_bytes=estimator.estimate(*at).peak_bytes,
                paper_bytes=paper_bytes(model, widths, *at),
                resident_bytes=(
                    _resident(run, staged)
                    if look and LARGE_BYTES < measured < RESIDENT_BYTES
                    else None
                ),
                warning=estimator.calibration.warning,
            )


def _estimator(
    executor: str, loaded: LoadedModel, signature: Signature, meter: Meter
) -> ModelEstimator:
    """An estimator of memory only."""
    flat = Ramp((0.0,), (0.0,), (0.0,))
    time = TimeFit(
        constant_ns=1, nodes=flat, edges=flat, high_ratio=1, error_median=0, error_p95=0,
        samples=0, largest_nodes=0, largest_edges=0,
    )  # fmt: skip
    memory = measure_memory(
        loaded, signature, max_bytes=LIMIT_BYTES, allocator=Allocator(meter.held_by)
    )
    calibration = Calibration(
        model=loaded.spec.key, executor=executor, device="cpu", threads=1, memory=memory, time=time
    )
    return ModelEstimator(calibration, Overhead())


def _fitting(graph: Graph, estimator: ModelEstimator) -> Graph:
    """The graph, or the largest part of it in steps of a tenth that needs no more than allowed."""
    while estimator.estimate(graph.num_nodes, graph.num_edges).reserve_bytes > LIMIT_BYTES:
        graph = graph.cut(graph.num_nodes * 9 // 10)
    return graph


def _inputs(graph: Graph, loaded: LoadedModel, signature: Signature) -> Inputs:
    """As staged: seeded values, the graph's own edges; each part of a union a graph in `batch`."""
    size = max(2, graph.num_nodes), graph.num_edges
    inputs = probe_graph(*size, Shape.PLAIN, loaded.spec.inputs, signature)
    inputs["edge_index"] = torch.from_numpy(np.ascontiguousarray(graph.edge_index))
    if "batch" in inputs:
        part = np.searchsorted(graph.starts, np.arange(graph.num_nodes), side="right") - 1
        inputs["batch"] = torch.from_numpy(part)
    return inputs


def _resident(run: Callable[[], torch.Tensor], staged: int) -> int | None:
    with exact_pages() as exact:
        rise = resident_bytes(run) if exact else None
    return None if rise is None else staged + rise


def paper_bytes(model: str, widths: list[int], num_nodes: int, num_edges: int) -> int | None:
    """GNNSched's estimate: its Table 2 over the layers' operators, inputs live throughout.

    Propagate makes E × F_in for the time it runs and N × F_in; Matmul and Linear make N × F_out.
    GCN transforms first and propagates over N more edges; SAGE and GIN aggregate first. Read
    kindly: GCN holds two temporaries, as its weighted messages need, and its own loops. Weights
    are left out, as everywhere here. None for models the paper has no functions for.
    """
    n, e = num_nodes, num_edges
    peak = 0
    for a, b in pairwise(widths):
        if model == "gcn":
            live = [n * (a + b), n * b + 2 * (n + e) * b + n * b + 6 * (n + e)]
        elif model == "sage":
            live = [n * a + e * a + n * a, n * (a + a + b)]
        elif model == "gin":
            hidden = widths[1]
            live = [n * a + e * a + n * a, n * (a + hidden), n * (hidden + b)]
        else:
            return None
        peak = max(peak, *live)
    return int(PAPER_FACTOR * (4 * peak + 4 * n * widths[0] + 16 * e))


def _summary(rows: list[Row]) -> dict[str, Any]:
    large = [row for row in rows if row.measured_bytes >= LARGE_BYTES]
    error = [row.estimate_bytes / row.measured_bytes - 1 for row in large]
    admitted = [row.admitted_bytes / row.measured_bytes - 1 for row in large]
    of_four = [e for row, e in zip(large, error, strict=True) if row.model in FOUR]
    linear = [e for row, e in zip(large, error, strict=True) if row.model not in BOUNDED]
    paper = [row.paper_bytes / row.measured_bytes - 1 for row in large if row.paper_bytes]
    below = [row.paper_bytes < row.measured_bytes for row in rows if row.paper_bytes]
    needed = [(row.held_bytes + row.output_bytes) / row.reserve_bytes for row in rows]
    resident = [row.resident_bytes / row.reserve_bytes for row in rows if row.resident_bytes]
    return {
        "runs": len(rows),
        "runs_large": len(large),
        "peak_bytes_largest": max((row.measured_bytes for row in rows), default=0),
        "error_low": _lowest(error),
        "error_high": _highest(error),
        "admitted_error_high": _highest(admitted),
        "error_worst_of_four": _highest([abs(e) for e in of_four]),
        "error_worst_of_linear": _highest([abs(e) for e in linear]),
        "underestimates": sum(row.underestimated for row in rows),
        "need_share_of_reserve_max": _highest(needed),
        "need_share_of_reserve_median": _rounded(np.median(needed)) if needed else None,
        "paper_error_low": _lowest(paper),
        "paper_error_high": _highest(paper),
        "paper_runs": len(below),
        "paper_underestimates": sum(below) if below else None,
        "resident_runs": len(resident),
        "resident_share_of_reserve_max": _highest(resident),
        "warnings": sorted({row.warning for row in rows} - {""}),
    }


def _lowest(values: list[float]) -> float | None:
    return _rounded(min(values)) if values else None


def _highest(values: list[float]) -> float | None:
    return _rounded(max(values)) if values else None


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def show(document: dict[str, Any]) -> None:
    table = Table(title="peak memory: estimate ÷ measured − 1, peaks over 10 MB")
    for column in ("executor", "model", "size", "runs", "lowest", "highest", "under-\nestimates",
                   "need ÷\nreserve", "resident ÷\nreserve", "Table 2 × 1.1",
                   "its under-\nestimates"):  # fmt: skip
        table.add_column(column)
    for row in document["models"]:
        resident, low = row["resident_share_of_reserve_max"], row["paper_error_low"]
        error = row["error_low"] is not None
        table.add_row(
            row["executor"],
            row["model"] + (" *" if row["warnings"] else ""),
            row["size"],
            str(row["runs"]),
            f"{row['error_low']:+.2%}" if error else "",
            f"{row['error_high']:+.2%}" if error else "",
            str(row["underestimates"]),
            f"{row['need_share_of_reserve_max']:.3f}",
            "" if resident is None else f"{resident:.2f}",
            "" if low is None else f"{low:+.0%} … {row['paper_error_high']:+.0%}",
            "" if low is None else f"{row['paper_underestimates']} of {row['paper_runs']}",
        )
    console = Console(width=150)
    console.print(table)
    console.print("* an upper bound by its own account: its memory is not linear in N and E")
    total = document["all"]
    console.print(
        f"{total['runs']} runs, {total['underestimates']} under-estimates; worst error of the four "
        f"{total['error_worst_of_four'] or 0:.2%}, "
        f"of all linear {total['error_worst_of_linear'] or 0:.2%}; "
        f"{document['jobs_left']} jobs left"
    )


def markdown(document: dict[str, Any]) -> str:
    """The tables of docs/measurements/estimates.md."""
    lines = [
        "| graphs | runs | GCN, SAGE, GIN, GAT | the other linear ones | above reserve |",
        "|---|---|---|---|---|",
    ]
    for row in [*document["pools"], *document["by_dataset"]]:
        name = row.get("pool") or row["dataset"]
        worst = [f"{row[key] or 0:.2%}" for key in ("error_worst_of_four", "error_worst_of_linear")]
        lines.append(
            f"| {name} | {row['runs']:,} | {' | '.join(worst)} | {row['underestimates']} |"
        )
    lines += [
        "",
        "| executor | models | runs | estimate ÷ measured − 1 | above reserve "
        "| need ÷ reserve | resident ÷ reserve | Table 2 × 1.1 (below need) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alike: dict[tuple[str, bool, str, str], list[dict[str, Any]]] = {}
    for row in document["models"]:
        low, high = row["error_low"] or 0.0, row["error_high"] or 0.0
        error = f"{high:.2%}" if abs(low - high) < 5e-5 else f"{low:.2%} to {high:.2%}"
        paper = "" if row["paper_error_low"] is None else row["model"]
        alike.setdefault((row["executor"], bool(row["warnings"]), error, paper), []).append(row)
    for (executor, bound, error, paper), rows in alike.items():
        names = ", ".join(f"{row['model']} {row['size']}" for row in rows)
        need = max(row["need_share_of_reserve_max"] for row in rows)
        resident = max((row["resident_share_of_reserve_max"] or 0.0 for row in rows), default=0.0)
        table_2 = "no formula"
        if paper:
            low = min(row["paper_error_low"] for row in rows)
            high = max(row["paper_error_high"] for row in rows)
            below = sum(row["paper_underestimates"] for row in rows)
            table_2 = f"{low:+.0%} to {high:+.0%} ({below} of {sum(r['paper_runs'] for r in rows)})"
        lines.append(
            f"| `{executor}` | {names}{' (upper bound)' if bound else ''} "
            f"| {sum(row['runs'] for row in rows):,} | {error} "
            f"| {sum(row['underestimates'] for row in rows)} | {need:.3f} "
            f"| {resident:.2f} | {table_2} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
