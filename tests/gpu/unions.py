"""Check merged requests on a resident graph: each must have the answer it has alone.

    python -m tests.gpu.unions [--quick] [--dry]

The graph's features are bytes, then half floats, then floats, which lanes gather and convert for
one request of a union after the other: the host frees the memory of the first before the device has
read it. Through the server's engine, with one lane, so that requests wait, and with estimates by
which merging always pays. Needs msgspec.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace

from bench.gpu.engines import Bench, nodes_call, run_on_engine
from bench.gpu.kit import Result, relative_error
from serve.config import GraphConfig
from serve.core.types import Nanos, TaskEstimate
from serve.estimate.estimator import ModelEstimator

LIMIT = 1e-4
MODELS = "gcn", "sage"
Kind = Literal["uint8", "float16", "float32"]
KINDS: tuple[Kind, ...] = ("uint8", "float16", "float32")


def body(result: Result, bench: Bench) -> None:
    for kind in KINDS:
        with result.part(kind):
            unions(result, bench, kind)


def unions(result: Result, bench: Bench, kind: Kind) -> None:
    waves, at_once = (2, 16) if bench.dry else (4, 32) if bench.short else (20, 64)
    graphs = (held(bench, kind),)
    with always_merged(), bench.engine("slack", "rolling", 1, graphs=graphs) as (engine, _):
        (resident,) = engine.graphs("g")
        found_kind = resident.feature_dtype
        result.check(f"features are {kind}", found_kind == kind, found_kind)
        rng = np.random.default_rng(1)
        ids = rng.integers(0, resident.num_nodes, (at_once, 64))

        def ask(seed: int) -> Any:
            name = MODELS[seed % len(MODELS)]
            return engine.submit(nodes_call(ids[seed], seed, name)).result()

        alone = [ask(seed).output for seed in range(at_once)]
        worst, merged = 0.0, Counter[int]()
        with ThreadPoolExecutor(at_once) as threads:
            for _ in range(waves):
                for expected, answer in zip(alone, threads.map(ask, range(at_once)), strict=True):
                    worst = max(worst, relative_error(answer.output, expected))
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

    def union(self: ModelEstimator, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate:
        return replace(predicted(self, sizes), run_ns=Nanos(1))

    with patch.object(ModelEstimator, "union", union):
        yield


def held(bench: Bench, kind: Kind) -> GraphConfig:
    """Return a graph whose features the server keeps as `kind`."""
    return bench.resident_graph(
        kind, 2_000 if bench.dry else 100_000, binary=kind == "uint8", hot_memory="off",
        feature_dtype="float16" if kind == "float16" else "float32",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_on_engine("unions", __doc__, body)
