"""Count the share of gathered features that the hot set serves, on a stream of requests.

    python -m bench.graphs.hot_rows [--data FOLDER] [--quick]

Counts, not times: no GPU is needed. Requests for 16 nodes with fan-outs 10, 10, 5 are sampled as
the server samples them, from real graphs where a file is at hand. Nodes asked for are any, or by a
popularity unrelated to degree (Zipf, exponent 1). After the requests that the server learns from,
the hit rate on further ones is counted for a hot set of a share of all rows, chosen

- at random;
- by degree, as the server starts;
- as the server has learned (`serve.graphs.hot_set.HotSet`);
- in hindsight: the rows that the further requests ask for most.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kit.script import Script, Table
from serve.graphs.datasets import load_dataset
from serve.graphs.hot_set import HotSet, slots_bytes
from serve.graphs.load import GraphParts, OpenOptions, held
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot

IDS, FANOUTS = 16, (10, 10, 5)
#: Which rows are asked for matters here, not what is in them.
FEATURES = 1
CHOICES = ("random", "degree", "counted", "hindsight")
SCRIPT = Script(
    "hot_rows",
    full={
        "data": None, "graphs": ("cora", "pubmed", "artist", "amazon"),
        "shares": (0.01, 0.05, 0.1, 0.25), "learned": 6_000, "asked": 600,
    },
    quick={"graphs": ("pubmed",), "shares": (0.1,), "learned": 200, "asked": 50},
    tables=[
        Table("Hit rate", "rows", {
            "graph": "{graph}", "asked for": "{asked_for}", "hot": "{hot_share:.0%}",
            **{choice: f"{{{choice}:.0%}}" for choice in CHOICES},
        })
    ],
)  # fmt: skip
Nodes = NDArray[np.int64]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each graph, stream and size of the hot set."""
    rows = []
    data = options.data or os.environ.get("GNNSERVE_DATA")
    for name in options.graphs:
        with tempfile.TemporaryDirectory() as folder:
            graph = opened(name, Path(data) if data else None, Path(folder))
        snapshot = graph.snapshot
        facts = {
            "graph": name, "source": graph.source, "nodes": snapshot.num_nodes,
            "edges": snapshot.num_edges,
        }  # fmt: skip
        for stream, share in product(("any", "popular"), options.shares):
            learned, asked = requests(snapshot, stream, options.learned, options.asked)
            found = served(snapshot, share, learned, asked)
            rows.append({**facts, "asked_for": stream, "hot_share": share, **found})
    return {"learned": options.learned, "asked": options.asked, "rows": rows}


def opened(name: str, data: Path | None, folder: Path) -> ResidentGraph:
    """Return the graph as the server holds it, with features of one column."""
    found = load_dataset(name, folder=data)
    x = np.random.default_rng(0).random((found.num_nodes, FEATURES), dtype=np.float32)
    parts = GraphParts(found.num_nodes, found.edge_index, x, found.source)
    options = OpenOptions(cache=folder, shared=True)
    return held(name, parts, options, lambda step, fraction: None)


def drawing(
    snapshot: Snapshot, stream: str, ids: int, fanouts: Sequence[int], rng: np.random.Generator
) -> Callable[[int], Nodes]:
    """Return what draws the nodes of a request by its number, for `any` ids or by Zipf's law."""
    popularity = 1 / np.arange(1, snapshot.num_nodes + 1)
    order = rng.permutation(snapshot.num_nodes)
    weights = popularity / popularity.sum()

    def draw(number: int) -> Nodes:
        if stream == "any":
            chosen = rng.integers(0, snapshot.num_nodes, ids)
        else:
            chosen = order[rng.choice(snapshot.num_nodes, ids, p=weights)]
        sample = snapshot.sample(chosen, fanouts, number)
        nodes = np.empty(sample.num_nodes, np.int64)
        sample.write_nodes(nodes)
        return nodes

    return draw


def requests(
    snapshot: Snapshot, stream: str, learned: int, asked: int
) -> tuple[list[Nodes], list[Nodes]]:
    """Return the rows gathered by requests to learn from, and by those after them."""
    draw = drawing(snapshot, stream, IDS, FANOUTS, np.random.default_rng(1))
    drawn = [draw(number) for number in range(learned + asked)]
    return drawn[:learned], drawn[learned:]


def served(
    snapshot: Snapshot, share: float, learned: list[Nodes], asked: list[Nodes]
) -> dict[str, Any]:
    """Return the share of the rows of `asked` that each choice serves."""
    rows = len(snapshot.x)
    count = int(share * rows)
    hot = HotSet(slots_bytes(rows) + count * snapshot.x.itemsize * FEATURES)
    first = hot.rows(snapshot)
    assert first is not None
    assert first.count == count
    changes = 0
    for nodes in learned:
        hot.count(first.table, nodes)
        changes += hot.reconsider(snapshot)
    last = hot.rows(snapshot)
    assert last is not None
    counts = np.zeros(rows, np.int64)
    for nodes in asked:
        counts[nodes] += 1
    every = np.random.default_rng(2).permutation(rows)[:count]
    best = np.sort(counts)[rows - count :].sum()
    total = int(counts.sum())
    found = {
        "random": counts[every].sum(), "degree": counts[first.inside].sum(),
        "counted": counts[last.inside].sum(), "hindsight": best,
    }  # fmt: skip
    return {"rows_a_request": round(total / len(asked)), "changes": changes} | {
        name: round(float(value) / total, 3) for name, value in found.items()
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
