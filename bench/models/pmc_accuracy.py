"""Compare estimated with measured peak memory, for PyG models on subgraphs of the paper's datasets.

    python -m bench.models.pmc_accuracy [--quick] [--data FOLDER] [--models gcn,sage,…]
        [--datasets pubmed,…] [--executors eager,…] [--fresh]

Each model is measured once a dataset and executor as at load (`serve.lane.measure.calibrate`),
then estimated and run on graphs of each dataset: 25 breadth-first balls of 10 nodes to the largest
that fits in LIMIT_BYTES, and 10 each of 10 to 2,000 nodes, of the same with self-loops, and of
disjoint unions of 2 to 16 of them, as merged requests are.

The process has a lane's allocator and meter. `measured` is the peak of tensors in that run plus the
inputs, without weights. Errors are estimate ÷ measured − 1. An under-estimate is a run whose
reserve was too small for inputs, tensors, what kernels took besides, and the answer. For GCN, SAGE
and GIN the cost functions of GNNSched's Table 2 × 1.1 stand beside it, written from the paper.
Runs are kept in build/pmc_accuracy.jsonl, from which a later start goes on; `--fresh` starts anew.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.kit.architectures import ARCHITECTURES, BOUNDED, load, on_executor
from bench.kit.as_lane import become_lane
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from serve.estimate import Calibration, ModelEstimator, Overhead
from serve.estimate.calibration import Ramp, TimeFit
from serve.estimate.estimator import SAFETY_FACTOR
from serve.graphs.datasets import TABLE_4, Dataset, load_dataset
from serve.graphs.subgraphs import subgraphs
from serve.lane.executors import EXECUTORS, CannotRun
from serve.lane.measure.allocator import Allocator
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.native import Meter

WORK = ROOT / "build" / "pmc_accuracy.jsonl"
#: Width and depth.
SIZES = {"small": (64, 3), "paper": (256, 8)}
#: Graphs that are estimated to need more are cut down to what fits.
LIMIT_BYTES = 640 << 20
#: Graphs of each kind beside those up to the largest.
OTHERS = 10
#: Below this, constants and rounding rule; errors are given above it only.
LARGE_BYTES = 10_000_000
#: What the paper multiplies its estimates by.
PAPER_FACTOR = 1.1
FOUR = ("gcn", "sage", "gin", "gat")

SCRIPT = Script(
    "pmc_accuracy",
    full={
        "data": None, "scale": 0.1, "models": tuple(ARCHITECTURES), "datasets": tuple(TABLE_4),
        "executors": tuple(EXECUTORS), "sizes": tuple(SIZES), "graphs": 25, "fresh": False,
    },
    quick={"models": ("gcn",), "datasets": ("pubmed",), "executors": ("csr",), "sizes": ("small",),
           "graphs": 6, "scale": 0.02, "fresh": True},
    tables=[
        Table("Peak memory: estimate ÷ measured − 1, peaks over 10 MB", "models", {
            "executor": "{executor}", "model": "{model} {size}", "runs": "{runs}",
            "lowest": "{error_low:+.2%}", "highest": "{error_high:+.2%}",
            "under-estimates": "{underestimates}", "need ÷ reserve": "{need_share_of_reserve_max}",
            "Table 2 × 1.1": "{paper_error_low:+.0%} to {paper_error_high:+.0%}",
        })
    ],
)  # fmt: skip

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
    warning: str

    @property
    def underestimated(self) -> bool:
        """Return True when a lane would have had less than the run took."""
        return self.held_bytes + self.output_bytes > self.reserve_bytes


@dataclass(frozen=True, slots=True)
class Graph:
    """The edges of a graph, and where the parts of a union begin."""

    num_nodes: int
    #: int64 [2, E]
    edge_index: np.ndarray[Any, Any]
    starts: tuple[int, ...] = (0,)

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])

    def cut(self, num_nodes: int) -> "Graph":
        """Return the first nodes and the edges between them."""
        inside = (self.edge_index < num_nodes).all(axis=0)
        return Graph(num_nodes, self.edge_index[:, inside])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing; return summaries of all runs there are."""
    meter = become_lane("bench.models.pmc_accuracy")
    work = WORK.with_suffix(".quick") if options.quick else WORK
    if options.fresh:
        work.unlink(missing_ok=True)
    rows = kept_rows(work)
    done = {(row.executor, row.model, row.size, row.dataset) for row in rows}
    data = options.data or os.environ.get("GNNSERVE_DATA")
    sources: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in options.datasets:
        dataset = load_dataset(name, folder=Path(data) if data else None, scale=options.scale)
        sources[name] = dataset.source
        jobs = [
            (executor, model, size)
            for executor, model, size in product(options.executors, options.models, options.sizes)
            if (executor, model, size, name) not in done
        ]
        pools = pools_of(dataset, options.graphs) if jobs else {}
        for executor, model, size in jobs:
            try:
                found = list(runs(executor, model, size, dataset, pools, meter))
            except CannotRun as error:
                refused[f"{executor} {model}"] = str(error)
                continue
            keep(work, found)
            rows += found
    return {
        "safety_factor": SAFETY_FACTOR,
        "limit_bytes": LIMIT_BYTES,
        "datasets": sources,
        "cannot_run": refused,
        "all": summary(rows),
        "pools": summaries(rows, "pool"),
        "by_dataset": summaries(rows, "dataset"),
        "models": summaries(rows, "executor", "model", "size"),
    }


def summaries(rows: Sequence[Row], *names: str) -> list[dict[str, Any]]:
    """Return a summary for each value of the fields."""
    keys = [tuple(getattr(row, name) for name in names) for row in rows]
    return [
        dict(zip(names, key, strict=True))
        | summary([row for row, its in zip(rows, keys, strict=True) if its == key])
        for key in dict.fromkeys(keys)
    ]


def kept_rows(path: Path) -> list[Row]:
    """Return the runs of earlier starts."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()]


def keep(path: Path, rows: list[Row]) -> None:
    """Append the runs."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def pools_of(dataset: Dataset, count: int) -> dict[str, list[Graph]]:
    """Return `count` graphs up to the largest, and `OTHERS` of each other kind, by kind."""
    rng = np.random.default_rng(1)
    small = cut(dataset, 1, 2_000, OTHERS)
    return {
        "to_largest": cut(dataset, 0, dataset.num_nodes, count),
        "to_2000": small,
        "with_loops": [_with_loops(graph, rng) for graph in cut(dataset, 2, 2_000, OTHERS)],
        "union": [
            _union([small[i] for i in rng.integers(0, len(small), rng.integers(2, 17))])
            for _ in range(OTHERS)
        ],
    }


def cut(
    dataset: Dataset, seed: int, most_nodes: int, count: int, most_edges: int = 1_000_000
) -> list[Graph]:
    """Return `count` subgraphs of 10 nodes and more."""
    found = subgraphs(
        dataset, count, seed=seed, min_nodes=10, max_nodes=most_nodes, max_edges=most_edges
    )
    return [Graph(graph.num_nodes, graph.edge_index) for graph in found]


def _with_loops(graph: Graph, rng: np.random.Generator) -> Graph:
    """Return the graph with a loop at up to half of its nodes."""
    nodes = np.flatnonzero(rng.random(graph.num_nodes) < rng.uniform(0, 0.5))
    return Graph(graph.num_nodes, np.hstack([graph.edge_index, np.stack([nodes, nodes])]))


def _union(parts: list[Graph]) -> Graph:
    """Return the disjoint union, nodes and edges in order."""
    starts = np.cumsum([0, *(part.num_nodes for part in parts)])
    edges = [part.edge_index + start for part, start in zip(parts, starts, strict=False)]
    return Graph(int(starts[-1]), np.hstack(edges), tuple(starts[:-1].tolist()))


def runs(
    executor: str,
    model: str,
    size: str,
    dataset: Dataset,
    pools: dict[str, list[Graph]],
    meter: Meter,
) -> Iterator[Row]:
    """Yield every run of one model on one dataset."""
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
    estimator = estimator_of(executor, loaded, signature, meter)
    widths = [spec.num_features, *[hidden] * (layers - 1), spec.num_classes]
    for pool, graphs in pools.items():
        for whole in graphs:
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
            estimate = estimator.estimate(*at, num_loops=loops)
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
                warning=estimator.calibration.warning,
            )


def estimator_of(
    executor: str, loaded: LoadedModel, signature: Signature, meter: Meter
) -> ModelEstimator:
    """Return an estimator of memory only."""
    flat = Ramp((0.0,), (0.0,), (0.0,))
    time = TimeFit(
        constant_ns=1, ramps=(flat, flat), high_ratio=1, error_median=0, error_p95=0,
        samples=0, largest=(0, 0),
    )  # fmt: skip
    memory = measure_memory(
        loaded, signature, max_bytes=LIMIT_BYTES, allocator=Allocator(meter.held_by)
    )
    calibration = Calibration(
        model=loaded.spec.key, executor=executor, device="cpu", threads=1, memory=memory, time=time
    )
    return ModelEstimator(calibration, Overhead())


def _fitting(graph: Graph, estimator: ModelEstimator) -> Graph:
    """Return the graph, cut by a tenth until it needs no more than allowed."""
    while estimator.estimate(graph.num_nodes, graph.num_edges).reserve_bytes > LIMIT_BYTES:
        graph = graph.cut(graph.num_nodes * 9 // 10)
    return graph


def _inputs(graph: Graph, loaded: LoadedModel, signature: Signature) -> Inputs:
    """Return inputs as staged: seeded values, the graph's own edges, unions in `batch`."""
    size = max(2, graph.num_nodes), graph.num_edges
    inputs = probe_graph(*size, Shape.PLAIN, loaded.spec.inputs, signature)
    inputs["edge_index"] = torch.from_numpy(np.ascontiguousarray(graph.edge_index))
    if "batch" in inputs:
        part = np.searchsorted(graph.starts, np.arange(graph.num_nodes), side="right") - 1
        inputs["batch"] = torch.from_numpy(part)
    return inputs


def paper_bytes(model: str, widths: list[int], num_nodes: int, num_edges: int) -> int | None:
    """Return GNNSched's estimate: its Table 2 over the layers' operators, inputs live throughout.

    Propagate makes E × F_in for the time it runs and N × F_in; Matmul and Linear make N × F_out.
    GCN transforms first and propagates over N more edges; SAGE and GIN aggregate first. In its
    favour GCN holds two temporaries, as its weighted messages need, and its own loops. Weights
    are left out. Returns None for models the paper has no functions for.
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


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    large = [row for row in rows if row.measured_bytes >= LARGE_BYTES]
    error = [row.estimate_bytes / row.measured_bytes - 1 for row in large]
    admitted = [row.admitted_bytes / row.measured_bytes - 1 for row in large]
    of_four = [e for row, e in zip(large, error, strict=True) if row.model in FOUR]
    linear = [e for row, e in zip(large, error, strict=True) if row.model not in BOUNDED]
    paper = [row.paper_bytes / row.measured_bytes - 1 for row in large if row.paper_bytes]
    below = [row.paper_bytes < row.measured_bytes for row in rows if row.paper_bytes]
    needed = [(row.held_bytes + row.output_bytes) / row.reserve_bytes for row in rows]
    return {
        "runs": len(rows),
        "runs_large": len(large),
        "peak_bytes_largest": max((row.measured_bytes for row in rows), default=0),
        "error_low": _extreme(min, error),
        "error_high": _extreme(max, error),
        "admitted_error_high": _extreme(max, admitted),
        "error_worst_of_four": _extreme(max, [abs(e) for e in of_four]),
        "error_worst_of_linear": _extreme(max, [abs(e) for e in linear]),
        "underestimates": sum(row.underestimated for row in rows),
        "need_share_of_reserve_max": _extreme(max, needed),
        "need_share_of_reserve_median": _rounded(np.median(needed)) if needed else None,
        "paper_error_low": _extreme(min, paper),
        "paper_error_high": _extreme(max, paper),
        "paper_runs": len(below),
        "paper_underestimates": sum(below) if below else None,
        "warnings": sorted({row.warning for row in rows} - {""}),
    }


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def _extreme(choose: Callable[[list[float]], float], values: list[float]) -> float | None:
    return _rounded(choose(values)) if values else None


if __name__ == "__main__":
    become_lane("bench.models.pmc_accuracy")
    SCRIPT.main(measure, __doc__)
