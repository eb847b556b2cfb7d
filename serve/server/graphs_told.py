"""The sizes of a request's graphs, for models whose estimates depend on them."""

from typing import Any

import numpy as np

from serve.estimate.graph_sizes import GraphSizes, graph_sizes, one_graph, same_graphs
from serve.native import PlainRequest
from serve.server.api import InferCall, Tensor
from serve.server.catalogue import ModelEntry

_Array = np.ndarray[Any, np.dtype[Any]]


def graphs_told(call: InferCall, entry: ModelEntry, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return what `counts` go on with, of a request whose values are not checked yet.

    Empty where the model's estimates do not depend on it.
    """
    if not entry.estimator.counts_graphs:
        return ()
    arrays = {}
    most = max(counts[position] for _, position in entry.spec.batches)
    for name, _ in entry.spec.batches:
        if (tensor := call.tensors.get(name)) is None:
            continue
        values = np.empty(tensor.shape, np.int64)
        copy_tensor(tensor, values)
        # Others are refused when they are staged.
        if not values.size or (int(values.min()) >= 0 and int(values.max()) < most):
            arrays[name] = values
    return entry.estimator.graphs.told(graph_sizes(entry.spec.batches, arrays, counts))


def graphs_staged(
    request: PlainRequest, entry: ModelEntry, counts: tuple[int, ...]
) -> tuple[int, ...]:
    """Return what `counts` go on with, of a request that the front has checked and staged.

    Empty where the model's estimates do not depend on it.
    """
    if not entry.estimator.counts_graphs:
        return ()
    found = request.graph_sizes
    return entry.estimator.graphs.told(
        same_graphs([
            GraphSizes(*found[name]) if name in found else one_graph(counts[position])
            for name, position in entry.spec.batches
        ])
    )  # fmt: skip


def copy_tensor(source: Tensor, target: _Array) -> None:
    """Copy a request's tensor; INT32 becomes INT64 where that is the declared datatype."""
    flat = target.reshape(-1)
    narrow = source.datatype == "INT32" and target.dtype == np.int64
    read = np.dtype("<i4") if narrow else target.dtype.newbyteorder("<")
    start = 0
    for piece in source.pieces():
        part = np.frombuffer(piece, read)
        flat[start : start + part.size] = part
        start += part.size
