"""A request by node id prepared for a lane: neighbours sampled, features gathered, all staged.

This runs in the thread that serves the request, without the interpreter lock, while lanes run
other requests.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from serve import native
from serve.errors import InvalidInput
from serve.estimate.sampling import SampleProbe
from serve.graphs.snapshot import Snapshot
from serve.ipc.shared_pool import SharedPool
from serve.server import clock
from serve.server.api import InferCall, node_ids_of
from serve.server.catalogue import ModelEntry
from serve.server.feature_tables import table_of
from serve.server.node_requests import NodeRequest
from serve.server.staging import (
    GATHERED_AT,
    GATHERED_IDS,
    GATHERED_NEW,
    Layout,
    Staged,
    count_loops,
    plan_layout,
    stage_indices,
    take_block,
)


@dataclass(frozen=True, slots=True)
class PreparedNodes:
    """A sampled subgraph in the shared pool."""

    #: The layout of all inputs in the pool, features included even where a lane gathers them.
    layout: Layout
    staged: Staged
    found: SampleProbe
    #: A copy of the ids that are answered here: the client may overwrite its own memory.
    ids: np.ndarray
    #: For each of these, its row of the output.
    positions: np.ndarray
    #: The version that was sampled; held until no lane needs its features.
    snapshot: Snapshot
    #: How long other servers took to draw and to give their features.
    network_ns: int = 0


def derived_seed(request_uid: str) -> int:
    """Return the seed of a request that brought none; the same uid gives the same seed."""
    return int.from_bytes(hashlib.sha256(request_uid.encode()).digest()[:8]) >> 1


def prepare_nodes(
    request: NodeRequest, call: InferCall, entry: ModelEntry, seed: int, pool: SharedPool
) -> PreparedNodes:
    """Sample the neighbourhood and stage it in a block of the pool, features gathered or listed.

    Raises InvalidInput for an id that is no node and for a sample that the model cannot take,
    QueueFull when the pool has no room, NotReady when another server did not give its part.
    """
    # The graph may change meanwhile: the request sees one version throughout.
    snapshot = request.graph.snapshot
    ids = read_ids(call, request.graph.name, snapshot.num_nodes)
    if call.split is not None:
        ids = ids[call.split.own]
    started_ns = clock.now_ns()
    sample, nodes, network_ns = _draw(snapshot, ids, request, seed)
    num_nodes, num_edges = sample.num_nodes, sample.num_edges
    if num_edges == 0 and not entry.signature.accepts_edgeless:
        raise InvalidInput(
            f"input 'node_ids': its nodes have no in-edges in graph '{request.graph.name}', and "
            f"model '{entry.spec.name}' cannot take a graph of 0 edges"
        )
    positions = np.empty(request.num_ids, np.int64)
    sample.write_positions(positions)
    order, output_bytes = entry.spec.inputs, entry.estimator.output_bytes(num_nodes, num_edges)
    shapes = {"x": (num_nodes, snapshot.num_features), "edge_index": (2, num_edges)}
    narrow = request.narrow_edges
    layout = in_pool = plan_layout(shapes, order, output_bytes, narrow_edges=narrow)
    lists: dict[str, np.ndarray] = {}
    table = table_of(request.graph, snapshot) if request.in_place else None
    if table is not None:
        rows, at, new = snapshot.patched(nodes)
        if request.hot_set is not None:
            request.hot_set.count(table.number, np.delete(rows, at) if at.size else rows)
        lists = {GATHERED_IDS: rows, GATHERED_AT: at, GATHERED_NEW: new}
        in_place = {"edge_index": (2, num_edges)} | {name: a.shape for name, a in lists.items()}
        in_pool = plan_layout(in_place, (*order, *lists), output_bytes, narrow_edges=narrow)
    block = take_block(pool, in_pool.size_bytes)
    staged = in_pool.at(block)
    try:
        network_ns += _fill(staged, snapshot, sample, nodes, pool)
    except BaseException:
        pool.free(block)
        raise
    # Nothing below raises: from here on the caller must free the block.
    for ref in staged.inputs:
        if ref.name in lists:
            pool.array(ref.offset_bytes, ref.dtype, ref.shape)[:] = lists[ref.name]
    if table is not None:
        staged = staged.gathering(table)
    num_loops = count_loops(staged, pool) if entry.estimator.counts_loops else None
    took_ns = clock.now_ns() - started_ns
    found = SampleProbe(request.num_ids, (num_nodes, num_edges), took_ns, num_loops)
    return PreparedNodes(layout, staged, found, ids, positions, snapshot, network_ns)


def stage_again(prepared: PreparedNodes, request: NodeRequest, seed: int, pool: SharedPool) -> None:
    """Write the same inputs to the same block again: a run may have overwritten them.

    The sample is drawn again rather than kept, so requests that run once pay nothing.
    """
    snapshot = prepared.snapshot
    sample, nodes, _ = _draw(snapshot, prepared.ids, request, seed)
    _fill(prepared.staged, snapshot, sample, nodes, pool)


def read_ids(call: InferCall, graph: str, num_nodes: int) -> np.ndarray:
    """Return a copy of the request's ids; raises InvalidInput for one that is no node."""
    node_type, tensor = call.asked
    ids = np.empty(tensor.shape[0], np.int64)
    bad = stage_indices(tensor, ids.view(np.uint8).data, num_nodes)
    if bad is not None:
        raise InvalidInput(
            f"input '{node_ids_of(node_type).name}' [{bad[0]}] is {bad[1]}; it must be in "
            f"[0, {num_nodes}), the nodes of graph '{graph}'"
        )
    return ids


def _draw(
    snapshot: Snapshot, ids: np.ndarray, request: NodeRequest, seed: int
) -> tuple[native.Sample, np.ndarray, int]:
    """Return the sample, its nodes, and how long other servers took to draw, in ns.

    Deterministic in snapshot, request and seed but for that time.
    """
    sample, network_ns = snapshot.sampled(ids, request.fanouts, seed & (2**64 - 1))
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    return sample, nodes, network_ns


def _fill(
    staged: Staged, snapshot: Snapshot, sample: native.Sample, nodes: np.ndarray, pool: SharedPool
) -> int:
    """Write the model's inputs to their places in the pool; return how long others took, in ns."""
    network_ns = 0
    for ref in staged.inputs:
        target = pool.array(ref.offset_bytes, ref.dtype, ref.shape)
        if ref.name == "edge_index":
            sample.write_edges(target, ref.dtype == "int32")
        elif ref.name == "x":
            network_ns += snapshot.gather(nodes, target)
    return network_ns
