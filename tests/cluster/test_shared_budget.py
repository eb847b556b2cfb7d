"""A graph of four times the memory that a server may take, which five servers hold together."""

from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from bench.kit.servers import free_ports
from serve.cluster.shared_rows import SharedRows
from serve.config import load_config
from serve.errors import NotReady
from serve.graphs.load import OpenOptions, open_graph
from serve.server.graphs import GraphStore
from tests.cluster.sharing import PATIENT_MS

NODES, EDGES, FEATURES, SERVERS = 500, 4_000, 64, 5
CONFIG = """
[cluster.rows]
listen = "127.0.0.1:1"
servers_file = "stores"
[[graph]]
name = "large"
file = "large"
memory_map = "never"
"""
APART = CONFIG + 'parts = "parts.npy"\nshare = "all"\n'


def silent(step, share):
    pass


def store_of(folder, text, budget_bytes, rows=None):
    """Return the graphs of a server with that configuration and memory, opened."""
    path = folder / "gnnserve.toml"
    path.write_text(text)
    found = GraphStore(load_config(path), budget_bytes, lambda: None, rows=rows)
    found.open(silent)
    return found


def test_five_servers_serve_a_graph_of_four_times_the_memory_of_one(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "large").mkdir()
    np.save(tmp_path / "large" / "edge_index.npy", rng.integers(0, NODES, (2, EDGES)))
    np.save(tmp_path / "large" / "x.npy", rng.standard_normal((NODES, FEATURES), np.float32))
    np.save(tmp_path / "parts.npy", np.arange(NODES) % SERVERS)
    ports = free_ports(SERVERS)
    lines = [f"127.0.0.1:{port} {part}\n" for part, port in enumerate(ports)]
    (tmp_path / "stores").write_text("".join(lines))
    whole = open_graph("large", tmp_path / "large", OpenOptions(), silent).snapshot
    budget_bytes = whole.held_bytes // 4
    with pytest.raises(NotReady, match=f"the device has {budget_bytes}"):
        store_of(tmp_path, CONFIG, budget_bytes)
    with ExitStack() as stack:
        stores = []
        for part, port in enumerate(ports):
            rows = SharedRows(part, f"127.0.0.1:{port}", tmp_path / "stores", None, PATIENT_MS)
            stack.callback(rows.close)
            stores.append(store_of(tmp_path, APART, budget_bytes, rows))
        ids = rng.integers(0, NODES, 20)
        expected = gathered(whole, ids)
        for store in stores:
            assert gathered(store.get("large").snapshot, ids) == expected


def gathered(snapshot, ids):
    """Return the nodes of a sample and their features, as bytes."""
    sample = snapshot.sample(ids, [5, 5], 1)
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    return nodes.tobytes(), snapshot.features(nodes).tobytes()
