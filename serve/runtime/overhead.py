"""What the server itself adds to a run, measured at start on its own way through the engine."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.estimate.estimator import Overhead
from serve.runtime import clock
from serve.runtime.api import InferCall, Tensor

if TYPE_CHECKING:
    from serve.runtime.registry import ModelEntry

#: Until it is measured.
ASSUMED = Overhead(base_ns=200_000, ns_per_kib=100)
#: Nodes of the graphs sent, with 10 edges a node.
PROBE_NODES = (16, 1024, 8192)
PROBE_REPEATS = 12


def probe_call(entry: "ModelEntry", num_nodes: int) -> InferCall:
    """A request for a random graph of `num_nodes` nodes with every input the model takes."""
    rng = np.random.default_rng(num_nodes)
    num_edges = 10 * num_nodes
    width = entry.signature.num_features
    arrays: dict[str, tuple[str, np.ndarray[Any, np.dtype[Any]]]] = {
        "x": ("FP32", rng.standard_normal((num_nodes, width), dtype=np.float32)),
        "edge_index": ("INT64", rng.integers(0, num_nodes, (2, num_edges), dtype=np.int64)),
        "edge_weight": ("FP32", np.ones(num_edges, np.float32)),
        "edge_attr": ("FP32", np.ones((num_edges, entry.signature.edge_dim or 1), np.float32)),
        "batch": ("INT64", np.zeros(num_nodes, np.int64)),
    }
    tensors = {}
    for name in entry.spec.inputs:
        datatype, array = arrays[name]
        tensors[name] = Tensor(datatype, array.shape, array.tobytes())
    return InferCall(entry.spec.name, "", tensors, clock.now_ns())


def fit_overhead(samples: Sequence[tuple[int, int]]) -> Overhead:
    """The line through the median of each size: (input bytes, added ns) pairs in.

    Neither its start nor its slope is negative.
    """
    by_size: dict[int, list[int]] = {}
    for size_bytes, added_ns in samples:
        by_size.setdefault(size_bytes, []).append(added_ns)
    points = [(size / 1024, median(added)) for size, added in sorted(by_size.items())]
    sizes, added = np.array(points).T
    if len(points) == 1:
        return Overhead(float(added[0]), 0.0)
    # Weighted by 1 ÷ time: relative errors count, as targets are relative too.
    slope, base = np.polyfit(sizes, added, 1, w=1 / np.maximum(added, 1.0))
    if base <= 0:
        return Overhead(float(added[0]), max(0.0, float(slope)))
    return Overhead(float(base), max(0.0, float(slope)))
