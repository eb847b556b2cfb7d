"""Requests the server sends through its own engine at start, to learn what one takes alone.

A server that gets a request now and then runs it on cores that had nothing to do for a while, and
these are slower at first: kernels, caches and clock have to come back. Requests sent back to back
would promise times that no lone request ever sees.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from serve.core.types import Nanos
from serve.runtime import clock
from serve.runtime.api import InferCall, Tensor

if TYPE_CHECKING:
    from serve.estimate import Overhead
    from serve.runtime.registry import ModelEntry
    from serve.runtime.ticket import RequestTicket

#: Until it is measured: base in ns, ns per KiB of inputs.
ASSUMED = (200_000, 100)
#: A request that comes after so long with nothing to do, and stays alone, shows a solo time.
IDLE_NS = Nanos(10_000_000)
#: Nodes of the graphs sent, with 10 edges a node.
PROBE_NODES = (16, 1024, 8192)
PROBE_EDGES_PER_NODE = 10
#: Enough to fill the window that corrections look at.
PROBE_REPEATS = 4


def learn_overhead(
    overhead: "Overhead",
    entries: Sequence["ModelEntry"],
    submit: Callable[[InferCall], "RequestTicket"],
) -> None:
    """Send lone requests to every model; calibrates `overhead`, then corrects each solo time.

    What all models have in common is asked of the fastest: there is less noise from its runs. They
    take turns, as no model finds the caches as its own last run has left them.
    """
    if not entries:
        return
    sizes = [(nodes, PROBE_EDGES_PER_NODE * nodes) for nodes in PROBE_NODES]
    probes = [(entry, size, probe_call(entry, *size)) for size in sizes for entry in entries]
    fastest = min(entries, key=lambda entry: entry.estimator.run_ns(*sizes[-1]))
    beyond_run: list[tuple[int, int]] = []
    taken: list[tuple[ModelEntry, tuple[int, int], int]] = []
    for entry, size, call in probes * PROBE_REPEATS:
        threading.Event().wait(IDLE_NS / 1e9)
        ticket = submit(msgspec.structs.replace(call, arrived_ns=clock.now_ns()))
        latency_ns = ticket.result().record.latency_ns
        taken.append((entry, size, latency_ns))
        if entry is fastest:
            beyond_run.append(
                (ticket.input_bytes, latency_ns - int(entry.estimator.fitted_ns(*size)))
            )
    overhead.calibrate(beyond_run)
    for entry, size, latency_ns in taken:
        entry.estimator.observe_solo(*size, latency_ns)


def probe_call(entry: "ModelEntry", num_nodes: int, num_edges: int) -> InferCall:
    """A request for a random graph with every input the model takes."""
    rng = np.random.default_rng(num_nodes)
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
