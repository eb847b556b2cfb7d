"""Servers that share out a small graph, in one process, and one that has all of it."""

from contextlib import ExitStack, contextmanager

import numpy as np

from bench.kit.servers import free_ports
from bench.kit.shared_graph import OneGraph
from serve.cluster.shared_rows import SharedRows
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.sharing import Parting

NODES, EDGES, FEATURES = 60, 400, 5
#: Longer than any stop of a busy machine.
PATIENT_MS = 10_000


def parts_of_graph(num_nodes=NODES, kind=np.float32):
    """Return a random graph; its features are stored as `kind`."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((num_nodes, FEATURES)).astype(np.float32)
    if kind is np.uint8:
        x = rng.integers(0, 255, (num_nodes, FEATURES)).astype(np.float32)
    return GraphParts(num_nodes, rng.integers(0, num_nodes, (2, EDGES)), x, "made")


def sampled(snapshot, ids, fanouts, seed):
    """Return a sample's nodes, its edges, the places of `ids`, and the nodes' features."""
    sample = snapshot.sample(ids, fanouts, seed)
    nodes, edges = np.empty(sample.num_nodes, np.int64), np.empty((2, sample.num_edges), np.int64)
    places = np.empty(ids.size, np.int64)
    sample.write_nodes(nodes)
    sample.write_edges(edges, False)
    sample.write_positions(places)
    return nodes, edges, places, snapshot.features(nodes)


def opened(parts, options):
    return held("made", parts, options, lambda step, share: None)


class Cluster:
    """Servers of a graph in `count` parts, `replicas` of each part."""

    def __init__(
        self, folder, count, *, replicas=1, hot=0.0, key=None, patience_ms=PATIENT_MS,
        dtype="float32", graph=None, with_edges=False,
    ):  # fmt: skip
        self.folder, self.count = folder, count
        self.graph = graph = graph or parts_of_graph()
        parts_file, stores = folder / "parts.npy", folder / "stores"
        parts = np.random.default_rng(1).permutation(np.arange(graph.num_nodes) % count)
        np.save(parts_file, parts.astype(np.uint16))
        ports = free_ports(count * replicas)
        stores.write_text("".join(f"127.0.0.1:{p} {n % count}\n" for n, p in enumerate(ports)))
        self.parts = parts
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.rows, self.graphs = [], []
        for number, address in enumerate(self.addresses):
            rows = SharedRows(number % count, address, stores, key, patience_ms)
            self.rows.append(rows)
            parting = Parting(parts_file, hot, rows, with_edges=with_edges)
            options = OpenOptions(feature_dtype=dtype, parting=parting)
            self.graphs.append(opened(graph, options))
        self.whole = opened(graph, OpenOptions(feature_dtype=dtype))

    def order_changes(self, log_bytes=1 << 20, numbers=None):
        """Have the servers of these numbers, by default all, agree on changes."""
        for number in range(len(self.rows)) if numbers is None else numbers:
            log = self.folder / "changes.log"
            self.rows[number].order_changes(self.addresses[number], log, log_bytes)
        for number in range(len(self.rows)) if numbers is None else numbers:
            self.follow(number)

    def follow(self, number):
        graphs = OneGraph(self.graphs[number])
        self.rows[number].changes.follow(graphs, lambda step, share: None, PATIENT_MS / 1000)

    def restart(self, number):
        """Close the server, and start one in its place, with the graph as it was first."""
        self.rows[number].close()
        address = self.addresses[number]
        part = number % self.count
        rows = SharedRows(part, address, self.folder / "stores", None, PATIENT_MS)
        self.rows[number] = rows
        parting = Parting(self.folder / "parts.npy", 0.0, rows)
        self.graphs[number] = opened(self.graph, OpenOptions(parting=parting))

    def close(self):
        for rows in self.rows:
            rows.close()


@contextmanager
def cluster(*arguments, **options):
    with ExitStack() as stack:
        found = Cluster(*arguments, **options)
        stack.callback(found.close)
        yield found
