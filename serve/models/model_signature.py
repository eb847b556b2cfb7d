"""What probing found out about a model; plain data, so that no torch is needed to hold it."""

import os
from typing import Literal

import msgspec

#: Executors that run a package compiled for the model; see ``serve.lane.executors.compiled``.
PACKAGED = frozenset({"compiled", "csr_compiled"})


def compiler() -> str:
    """Name of the C++ compiler that packages are made with."""
    return os.environ.get("CXX", "g++")


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and behaviour of a model, as probed."""

    #: Columns of `x`.
    num_features: int
    #: Columns of `edge_attr`; None: the model does not take it.
    edge_dim: int | None
    #: Columns of the output, C.
    num_outputs: int
    #: One output row per node, or per graph of the batch.
    rows: Literal["node", "graph"]
    #: A graph of 0 nodes gives an output of 0 rows; otherwise it raises.
    accepts_empty: bool
    #: A graph of nodes without edges runs.
    accepts_edgeless: bool
    #: The same graph gives the same output again but for rounding, another graph run in between.
    deterministic: bool
    #: Rows depend on features at most so many hops away; None: any number, or not found out.
    hops: int | None = None
    #: With all in-edges of every node less than so many hops away, a node's row is what it is in
    #: the whole graph; None as above.
    exact_hops: int | None = None
    #: A disjoint union of graphs gives each the output it has alone, so requests may be merged.
    mergeable: bool = False
    #: As it is served, edges may be int32 and are not widened on the way.
    narrow_edges: bool = False
