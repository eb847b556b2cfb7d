"""Requests the server sends through its own engine at start, to learn what it adds to a run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.runtime import clock
from serve.runtime.api import InferCall, Tensor

if TYPE_CHECKING:
    from serve.runtime.registry import ModelEntry
    from serve.runtime.ticket import RequestTicket

#: Until it is measured: base in ns, ns per KiB of inputs.
ASSUMED = (200_000, 100)
#: Nodes of the graphs sent, with 10 edges a node.
PROBE_NODES = (16, 1024, 8192)
PROBE_REPEATS = 12


def time_overhead(
    entries: Sequence["ModelEntry"], submit: Callable[[InferCall], "RequestTicket"]
) -> list[tuple[int, int]]:
    """(Input bytes, ns that the server added to the run) of requests that waited for nothing.

    They are the fastest model's: there is less to wait for, and less noise from the runs.
    """
    samples: list[tuple[int, int]] = []
    most = PROBE_NODES[-1], 10 * PROBE_NODES[-1]
    for entry in sorted(entries, key=lambda entry: entry.estimator.run_ns(*most))[:1]:
        for num_nodes in PROBE_NODES:
            for _ in range(PROBE_REPEATS):
                ticket = submit(probe_call(entry, num_nodes))
                record = ticket.result().record
                samples.append((ticket.input_bytes, record.latency_ns - record.run_ns))
    return samples


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
