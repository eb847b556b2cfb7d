"""Check merged requests on a resident graph: each must have the answer it has alone.

    python -m bench.gpu.unions [--quick] [--dry]

The graph's features are bytes, then half floats, then floats, which lanes gather and convert for
one request of a union after the other: the host frees the memory of the first before the device has
read it. Through the server's engine, with one lane, so that requests wait, and with estimates by
which merging always pays. Needs msgspec.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace

from bench.gpu.engines import FEATURES, Bench, nodes_call
from bench.gpu.kit import Result, run
from serve.config import GraphConfig
from serve.core.types import Nanos, TaskEstimate
from serve.estimate.estimator import ModelEstimator
from serve.graphs.generate import generate_edges

LIMIT = 1e-4
MODELS = "gcn", "sage"
Kind = Literal["uint8", "float16", "float32"]
KINDS: tuple[Kind, ...] = ("uint8", "float16", "float32")


def body(result: Result, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.dry, arguments.quick)
        bench.write()
        for kind in KINDS:
            with result.part(kind):
                unions(result, bench, kind)


def unions(result: Result, bench: Bench, kind: Kind) -> None:
    short = bench.quick or bench.dry
    waves, at_once = (2, 16) if bench.dry else (4, 32) if short else (20, 64)
    graphs = (held(bench, kind),)
    with always_merged(), bench.engine("slack", "rolling", 1, graphs=graphs) as (engine, _):
        nodes = engine.graphs("g")[0].num_nodes
        found_kind = engine.graphs("g")[0].feature_dtype
        result.check(f"features are {kind}", found_kind == kind, found_kind)
        rng = np.random.default_rng(1)
        asked = [
            (MODELS[index % len(MODELS)], rng.integers(0, nodes, 64), index)
            for index in range(at_once)
        ]

        def ask(job: tuple[str, Any, int]) -> Any:
            name, ids, seed = job
            return engine.submit(nodes_call(ids, seed, name)).result()

        alone = [ask(job).output for job in asked]
        worst, merged = 0.0, Counter[int]()
        with ThreadPoolExecutor(at_once) as threads:
            for _ in range(waves):
                for wanted, answer in zip(alone, threads.map(ask, asked), strict=True):
                    scale = max(float(np.abs(wanted).max()), 1e-6)
                    error = float(np.abs(answer.output - wanted).max()) / scale
                    worst = max(worst, error if np.isfinite(error) else float("inf"))
                    merged[answer.record.merged] += 1
        restarts = engine.snapshot().lane_restarts
    result.put(f"requests by how many ran as one, {kind}", dict(sorted(merged.items())))
    result.check(f"{kind}: requests were merged", max(merged) > 1)
    result.check(f"{kind}: merged answers within {LIMIT}", worst <= LIMIT, worst)
    result.check(f"{kind}: no lane was lost", restarts == 0, restarts)


@contextmanager
def always_merged() -> Iterator[None]:
    """Make a union take next to no time by estimate while open."""
    predicted = ModelEstimator.union

    def union(self: ModelEstimator, sizes: Sequence[tuple[int, int]]) -> TaskEstimate:
        return replace(predicted(self, sizes), run_ns=Nanos(1))

    with patch.object(ModelEstimator, "union", union):
        yield


def held(bench: Bench, kind: Kind) -> GraphConfig:
    """Return a graph whose features the server keeps as `kind`."""
    nodes = 2_000 if bench.dry else 100_000
    rng = np.random.default_rng(0)
    edges = generate_edges(nodes, 15 * nodes, rng).astype(np.int64)
    x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    if kind == "uint8":
        # A bag of words.
        x = (x > 1).astype(np.float32)
    path = bench.folder / f"{kind}.npz"
    np.savez(path, num_nodes=nodes, edge_index=edges, x=x)
    return GraphConfig(
        name="g", file=str(path), hot_memory="off",
        feature_dtype="float16" if kind == "float16" else "float32",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    run("unions", __doc__, body)
