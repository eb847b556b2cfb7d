"""Compare sampling and gathering from resident graphs with vectorised numpy and DGL's sampler.

    python -m bench.graphs.sampling [--quick] [--rounds 100]

Graphs of the paper's sizes (generated, seeded). All take the same ids in turns; ratios are by
round, as median with 5th and 95th percentile. DGL is compared where it is installed (`pip install
--no-deps dgl==2.1.0`, then scipy, pandas, requests, psutil, networkx): its newer GraphBolt needs a
torch of 2024, its own C++ sampler works. PyG's NeighborLoader needs pyg-lib or torch-sparse, which
do not install.
"""

import argparse
import sys
import types
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kit.measure import elapsed_us, in_turns, percentiles, ratios
from bench.kit.script import Script, Table
from serve.graphs.datasets import TABLE_4, load_dataset
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.snapshot import Snapshot

FANOUTS = (10, 10)
SCRIPT = Script(
    "sampling",
    full={"rounds": 100, "graphs": ("pubmed", "artist", "amazon"), "ids": (64, 1024)},
    quick={"rounds": 3, "graphs": ("pubmed",), "ids": (64,)},
    tables=[
        Table("Sampling", "sampling", {
            "graph": "{graph}", "ids": "{ids:,}", "sampler": "{sampler}", "µs": "{us:,.0f}",
            "nodes": "{nodes:,.0f}", "edges": "{edges:,.0f}",
            "time ÷ ours": "{time_over_ours[p50]:.2f}",
        }),
        Table("Gathering", "gathering", {
            "graph": "{graph}", "ids": "{ids:,}", "GB/s": "{gb_per_s[ours]:.1f}",
            "÷ copy": "{ours_over_copy[p50]:.2f}", "÷ numpy": "{ours_over_numpy[p50]:.2f}",
        }),
    ],
)  # fmt: skip
Ids = NDArray[np.int64]
#: Ids and a seed to the number of nodes and edges sampled.
Sampler = Callable[[Ids, int], tuple[int, int]]


class Stub(types.ModuleType):
    """A module in which every name is found."""

    __path__: list[str] = []  # noqa: RUF012  as of a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def ours(snapshot: Snapshot) -> Sampler:
    """Return the server's sampler, which writes nodes and edges out."""

    def sample(ids: Ids, seed: int) -> tuple[int, int]:
        found = snapshot.sample(ids, FANOUTS, seed)
        nodes = np.empty(found.num_nodes, np.int64)
        edges = np.empty((2, found.num_edges), np.int64)
        found.write_nodes(nodes)
        found.write_edges(edges, False)
        return found.num_nodes, found.num_edges

    return sample


def vectorised(snapshot: Snapshot) -> Sampler:
    """Return a sampler in numpy without a Python loop over nodes."""
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
            # The smallest random keys of each row are a draw without replacement.
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
    """Return DGL's name and sampler, which expands asked nodes again at every hop.

    Returns None where DGL is not installed.
    """
    import torch

    # The package imports GraphBolt, which has no build for this torch and is not used here.
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


def range_of(values: list[float]) -> dict[str, float]:
    """Return the median and the 90 % range."""
    return percentiles(values, (5, 50, 95), 3)


def sampling_rows(snapshot: Snapshot, num_ids: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each sampler, all on the same ids in turns."""
    samplers = {"ours": ours(snapshot), "numpy": vectorised(snapshot)}
    other = dgl_sampler(snapshot)
    if other is not None:
        samplers[other[0]] = other[1]
    turns = dict.fromkeys(samplers, 0)
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in samplers}

    def timed(name: str) -> float:
        turns[name] += 1
        ids = np.random.default_rng(turns[name]).integers(0, snapshot.num_nodes, num_ids)
        return elapsed_us(lambda: sizes[name].append(samplers[name](ids, turns[name])))

    times = in_turns({name: partial(timed, name) for name in samplers}, rounds, warm_up=2)
    rows = []
    for name, found in times.items():
        nodes, edges = (float(np.median([size[at] for size in sizes[name]])) for at in (0, 1))
        us = float(np.median(found))
        rows.append(
            {
                "sampler": name,
                "us": us,
                "nodes": nodes,
                "edges": edges,
                "nodes_per_s": nodes / us * 1e6,
                "edges_per_s": edges / us * 1e6,
                "time_over_ours": range_of(ratios(found, times["ours"])),
            }
        )
    return rows


def gathering_row(snapshot: Snapshot, num_ids: int, rounds: int) -> dict[str, Any]:
    """Return the rate of gathering a sample's rows, against numpy and a copy of as many bytes."""
    ids = np.random.default_rng(0).integers(0, snapshot.num_nodes, num_ids)
    sample = snapshot.sample(ids, FANOUTS, 0)
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    target = np.zeros((nodes.size, snapshot.num_features), np.float32)
    source, base = np.ones_like(target), np.asarray(snapshot.x)
    works: dict[str, Callable[[], Any]] = {
        "ours": lambda: snapshot.gather(nodes, target),
        "numpy": lambda: np.take(base, nodes, axis=0, out=target, mode="clip"),
        "copy": lambda: np.copyto(target, source),
    }
    # Between requests other data goes through the caches.
    other = np.ones(8 << 20, np.float32)

    def timed(work: Callable[[], Any]) -> float:
        np.add(other, 1, out=other)
        return elapsed_us(work)

    times = in_turns({name: partial(timed, work) for name, work in works.items()}, rounds)
    return {
        "bytes": target.nbytes,
        "gb_per_s": {name: target.nbytes / np.median(us) / 1e3 for name, us in times.items()},
        "ours_over_copy": range_of(ratios(times["copy"], times["ours"])),
        "ours_over_numpy": range_of(ratios(times["numpy"], times["ours"])),
    }


def snapshot_of(name: str) -> Snapshot:
    """Return the graph with float32 features, as a server holds it."""
    dataset = load_dataset(name)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((dataset.num_nodes, TABLE_4[name].num_features), dtype=np.float32)
    parts = GraphParts(dataset.num_nodes, dataset.edge_index, x, dataset.source)
    return held(name, parts, OpenOptions(), lambda *_: None).snapshot


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of sampling and of gathering."""
    sampling: list[dict[str, Any]] = []
    gathering: list[dict[str, Any]] = []
    snapshots = {name: snapshot_of(name) for name in options.graphs}
    for (name, snapshot), ids in product(snapshots.items(), options.ids):
        where = {"graph": name, "ids": ids}
        sampling += [where | row for row in sampling_rows(snapshot, ids, options.rounds)]
        gathering.append(where | gathering_row(snapshot, ids, options.rounds))
    return {
        "rounds": options.rounds,
        "fanouts": FANOUTS,
        "sampling": sampling,
        "gathering": gathering,
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
