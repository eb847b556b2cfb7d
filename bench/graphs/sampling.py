"""Sampling and gathering from resident graphs: ours, vectorised numpy, and DGL's sampler.

    python -m bench.graphs.sampling [--quick] [--output FILE]

Graphs of the paper's sizes (generated, seeded). All take the same ids in turn, round by round;
ratios are per round, told as median with 5th and 95th percentile. DGL is compared where it is
installed (`pip install --no-deps dgl==2.1.0`, then scipy, pandas, requests, psutil, networkx): its
newer GraphBolt needs a torch of 2024 and is left out, its own C++ sampler works. PyG's
NeighborLoader needs pyg-lib or torch-sparse, neither of which installs here.
"""

import argparse
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kit.result import RESULTS, write_result
from serve.graphs.datasets import TABLE_4, load_dataset
from serve.graphs.load import OpenOptions, Parts, held
from serve.graphs.snapshot import Snapshot

RESULT = RESULTS / "sampling.json"
GRAPHS = ("pubmed", "artist", "amazon")
FANOUTS = (10, 10)
Ids = NDArray[np.int64]
#: Ids and a seed to the number of nodes and edges sampled.
Sampler = Callable[[Ids, int], tuple[int, int]]


class Stub(types.ModuleType):
    """A module with any name in it."""

    __path__: list[str] = []  # noqa: RUF012  as of a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def ours(snapshot: Snapshot) -> Sampler:
    """As the server does it, edges and nodes written out."""

    def sample(ids: Ids, seed: int) -> tuple[int, int]:
        found = snapshot.sample(ids, FANOUTS, seed)
        nodes = np.empty(found.num_nodes, np.int64)
        edges = np.empty((2, found.num_edges), np.int64)
        found.write_nodes(nodes)
        found.write_edges(edges, False)
        return found.num_nodes, found.num_edges

    return sample


def vectorised(snapshot: Snapshot) -> Sampler:
    """The same in numpy without a Python loop over nodes."""
    starts, indices = snapshot.base.starts, snapshot.base.values
    local = np.full(snapshot.num_nodes, -1, np.int64)

    def sample(ids: Ids, seed: int) -> tuple[int, int]:
        rng = np.random.default_rng(seed)
        nodes = [np.unique(ids)]
        local[nodes[0]] = np.arange(nodes[0].size)
        total, parts = nodes[0].size, []
        for fanout in FANOUTS:
            frontier = nodes[-1]
            lengths = starts[frontier + 1] - starts[frontier]
            rows = np.repeat(np.arange(frontier.size), lengths)
            begins = np.cumsum(lengths) - lengths
            places = np.arange(rows.size) - begins[rows]
            met = indices[starts[frontier][rows] + places]
            # The smallest of random keys of each row: a draw without replacement.
            order = np.lexsort((rng.random(rows.size), rows))
            kept = order[places < fanout]
            met, rows = met[kept], rows[kept]
            new = np.unique(met[local[met] < 0])
            local[new] = total + np.arange(new.size)
            parts.append(np.stack([local[met], local[frontier[rows]]]))
            nodes.append(new)
            total += new.size
        edges = np.concatenate(parts, axis=1)
        local[np.concatenate(nodes)] = -1
        return total, edges.shape[1]

    return sample


def dgl_sampler(snapshot: Snapshot) -> tuple[str, Sampler] | None:
    """DGL's NeighborSampler, which expands asked nodes again at every hop; None: not installed."""
    import torch

    # Its package imports GraphBolt, which has no build for this torch and is not used here.
    stub = sys.modules.setdefault("dgl.graphbolt", Stub("dgl.graphbolt"))
    try:
        import dgl  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    assert stub is sys.modules["dgl.graphbolt"]
    torch.set_num_threads(1)
    edges = snapshot.edges()
    graph = dgl.graph(
        (torch.from_numpy(edges[0]), torch.from_numpy(edges[1])), num_nodes=snapshot.num_nodes
    )
    graph.create_formats_()
    graph = graph.formats("csc")
    sampler = dgl.dataloading.NeighborSampler(list(FANOUTS))

    def sample(ids: Ids, seed: int) -> tuple[int, int]:
        dgl.seed(seed % 2**31)
        inputs, _, blocks = sampler.sample(graph, torch.from_numpy(np.unique(ids)))
        return int(inputs.numel()), sum(block.num_edges() for block in blocks)

    return f"dgl {dgl.__version__}", sample


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def spread(values: list[float]) -> dict[str, float]:
    """Median and 90 % range."""
    low, middle, high = np.percentile(values, [5, 50, 95])
    return {"p5": float(low), "p50": float(middle), "p95": float(high)}


def measure_sampling(snapshot: Snapshot, num_ids: int, rounds: int) -> dict[str, Any]:
    """Every sampler on the same ids, in turn."""
    samplers = {"ours": ours(snapshot), "numpy": vectorised(snapshot)}
    other = dgl_sampler(snapshot)
    if other is not None:
        samplers[other[0]] = other[1]
    times: dict[str, list[float]] = {name: [] for name in samplers}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in samplers}
    for turn in range(rounds + 2):
        ids = np.random.default_rng(turn).integers(0, snapshot.num_nodes, num_ids)
        for name, sample in samplers.items():
            took, size = timed(lambda sample=sample, ids=ids, turn=turn: sample(ids, turn))  # type: ignore[misc]
            if turn >= 2:
                times[name].append(took)
                sizes[name].append(size)
    rows: dict[str, Any] = {}
    for name, found in times.items():
        nodes, edges = (float(np.median([size[at] for size in sizes[name]])) for at in (0, 1))
        seconds = float(np.median(found))
        rows[name] = {
            "us": seconds * 1e6,
            "nodes": nodes,
            "edges": edges,
            "nodes_per_s": nodes / seconds,
            "edges_per_s": edges / seconds,
            "time_over_ours": spread(
                [one / base for one, base in zip(found, times["ours"], strict=True)]
            ),
        }
    return rows


def measure_gather(snapshot: Snapshot, num_ids: int, rounds: int) -> dict[str, Any]:
    """Rows of a sample's nodes into one block, against numpy and a plain copy of as many bytes."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, snapshot.num_nodes, num_ids)
    sample = snapshot.sample(ids, FANOUTS, 0)
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    target = np.zeros((nodes.size, snapshot.num_features), np.float32)
    source = np.ones_like(target)
    base = np.asarray(snapshot.x)
    works: dict[str, Callable[[], Any]] = {
        "ours": lambda: snapshot.gather(nodes, target),
        "numpy": lambda: np.take(base, nodes, axis=0, out=target, mode="clip"),
        "copy": lambda: np.copyto(target, source),
    }
    # What a server's memory is like between requests: something else was in the caches.
    other = np.ones(8 << 20, np.float32)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            other += 1
            times[name].append(timed(work)[0])
    return {
        "bytes": target.nbytes,
        "gb_per_s": {name: target.nbytes / np.median(t) / 1e9 for name, t in times.items()},
        "ours_over_copy": spread(
            [copy / one for one, copy in zip(times["ours"], times["copy"], strict=True)]
        ),
        "ours_over_numpy": spread(
            [other / one for one, other in zip(times["ours"], times["numpy"], strict=True)]
        ),
    }


def snapshot_of(name: str) -> Snapshot:
    """The graph with float32 features, as a server would hold it."""
    dataset = load_dataset(name)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((dataset.num_nodes, TABLE_4[name].num_features), dtype=np.float32)
    parts = Parts(dataset.num_nodes, dataset.edge_index, x, dataset.source)
    return held(name, parts, OpenOptions(), lambda *_: None).snapshot


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rounds = 20 if options.quick else 100
    graphs: dict[str, Any] = {}
    for name in GRAPHS:
        snapshot = snapshot_of(name)
        rows = graphs[name] = {
            "nodes": snapshot.num_nodes,
            "edges": snapshot.num_edges,
            "features": snapshot.num_features,
            "sampling": {k: measure_sampling(snapshot, k, rounds) for k in (64, 1024)},
            "gather": {k: measure_gather(snapshot, k, rounds) for k in (64, 1024)},
        }
        for count, found in rows["sampling"].items():
            for sampler, row in found.items():
                ratio = row["time_over_ours"]["p50"]
                print(
                    f"{name:7} {count:5} ids {sampler:10} {row['us']:9.0f} us "
                    f"{row['nodes_per_s'] / 1e6:6.1f} M nodes/s {row['edges_per_s'] / 1e6:6.1f} "
                    f"M edges/s {ratio:6.2f} x ours"
                )
        for count, row in rows["gather"].items():
            print(f"{name:7} {count:5} ids gather GB/s {row['gb_per_s']}")
    result = {
        "command": "python -m bench.graphs.sampling" + (" --quick" if options.quick else ""),
        "rounds": rounds,
        "fanouts": FANOUTS,
        "graphs": graphs,
    }
    write_result(options.output, result)


if __name__ == "__main__":
    main()
