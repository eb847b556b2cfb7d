"""Samples of a graph of which the rows of edges are on several servers.

What a node draws depends on seed, hop and node alone, and each node draws once, at the hop that
reaches it. So its owner draws for it what one machine would have drawn. The rows that were drawn
are a graph of their own, and who takes all neighbours of that meets nodes and edges in the order
in which one machine would have met them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from serve import native
from serve.graphs.csr import NO_ROWS, Ids, Rows, joined, offsets
from serve.graphs.edges import NO_IDS, Edges

#: What `sample_neighbours` adds to the seed at each hop, see ``csrc/src/sampling.cpp``.
_HOP_STEP = 0x9E3779B97F4A7C15
#: Returns what each of some nodes draws at a hop, a row for each.
Draw = Callable[[Ids, int], Rows]


def seed_of_hop(seed: int, hop: int) -> int:
    """Return the seed with which a sample of one hop draws what `seed` draws at that hop."""
    return (seed + hop * _HOP_STEP) % 2**64


def drawn(edges: Edges, nodes: Ids, fanout: int, hop_seed: int) -> Rows:
    """Return the in-neighbours that each of `nodes` [K], which are distinct, draws at a hop."""
    sample = native.sample_neighbours(edges.topology, nodes, [fanout], hop_seed)
    ends = np.empty((2, sample.num_edges), np.int64)
    sample.write_edges(ends, False)
    met = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(met)
    return Rows(offsets(np.bincount(ends[1], minlength=nodes.size)), met[ends[0]])


def joined_rows(ids: Ids, fanouts: Sequence[int], num_nodes: int, draw: Draw) -> native.Topology:
    """Return the rows that a sample draws for `ids`, as edges of the `num_nodes` nodes.

    `ids` are nodes. `draw` is called once for each hop that reaches nodes, with these, ascending.
    """
    reached = frontier = np.unique(ids)
    nodes, rows = [NO_IDS], [NO_ROWS]
    for hop, fanout in enumerate(fanouts):
        if not frontier.size or fanout == 0:
            break
        found = draw(frontier, hop)
        nodes.append(frontier)
        rows.append(found)
        frontier = np.setdiff1d(found.values, reached)
        reached = np.union1d(reached, frontier)
    who = np.concatenate(nodes)
    order = np.argsort(who)
    ordered = joined(rows).take(order)
    values = np.ascontiguousarray(ordered.values, np.int64)
    return native.Topology(
        num_nodes, NO_ROWS.starts, NO_ROWS.values, False, who[order], ordered.starts, values
    )


def joined_sample(
    ids: Ids, fanouts: Sequence[int], num_nodes: int, seed: int, draw: Draw
) -> native.Sample:
    """Return the sample that one machine with all edges would draw; see `joined_rows`."""
    # No row has more than the fan-out, so all of it is taken, in its order.
    topology = joined_rows(ids, fanouts, num_nodes, draw)
    return native.sample_neighbours(topology, ids, fanouts, seed)
