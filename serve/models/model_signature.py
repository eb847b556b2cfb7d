"""A model's signature: shapes and behaviour as probed. Plain data, so that it needs no torch."""

import os
from typing import Literal

import msgspec

#: Executors that run a package compiled for the model; see ``serve.lane.executors.compiled``.
PACKAGED = frozenset({"compiled", "csr_compiled"})


def compiler() -> str:
    """Return the name of the C++ compiler that builds packages."""
    return os.environ.get("CXX", "g++")


#: What a row of the output belongs to; a model that declares its outputs says so by their shapes.
Rows = Literal["node", "graph", "declared"]


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and behaviour of a model, as probed; shapes are 0 where the model declares them."""

    #: Columns of `x`.
    num_features: int
    #: Columns of `edge_attr`; None when the model does not take it.
    edge_dim: int | None
    #: Columns of the output, C.
    num_outputs: int
    #: One output row per node, or per graph of the batch.
    rows: Rows
    #: True when a graph of 0 nodes gives an output of 0 rows; otherwise the model raises.
    accepts_empty: bool
    #: True when a graph of nodes without edges runs.
    accepts_edgeless: bool
    #: True when a graph gives the same output again, up to rounding, after another graph ran.
    deterministic: bool
    #: Receptive field: output rows depend on features at most this many hops away. None when it is
    #: unbounded or unknown.
    hops: int | None = None
    #: Hops within which a sample must have all in-edges for a node's output row to equal that in
    #: the whole graph. None as above.
    exact_hops: int | None = None
    #: True when a disjoint union gives each graph the output it has alone: requests may be merged.
    mergeable: bool = False
    #: True when nodes of one graph must stand side by side: the values of `batch`, and of every
    #: other input that tells graphs, in ascending order.
    needs_sorted_batch: bool = False
    #: True when the serving executor takes int32 edges as they are.
    narrow_edges: bool = False
