"""Count what requests fetch where servers keep copies by degree, and where they would by use.

    python -m bench.graphs.shared_hot_rows [--data FOLDER] [--quick]

Counts, not times: nothing is sent. A real graph is in four parts. Each server keeps copies of some
features of other parts: of the 5 % of nodes with most out-edges (`hot_share`), or of as many nodes
as its own requests have asked for most, which is not built. Requests with fan-outs 10, 10 go to any
server. Nodes asked for are any, or by a popularity unrelated to degree (Zipf, exponent 1). Servers
count over the first requests; further ones are compared. `best` are the copies that these ask for
most. Each seed has its own requests; least and most over seeds are in brackets.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.graphs.hot_rows import drawing, opened
from bench.kit.script import Script, Table
from serve.graphs.partition import Parts, hottest, partition
from serve.graphs.snapshot import Snapshot

FANOUTS, PARTS, HOT_SHARE = (10, 10), 4, 0.05
COLUMNS = {
    "asked for": "{asked_for}", "ids": "{ids}", "nodes": "{nodes:,.0f}",
    "elsewhere": "{elsewhere[0]:.1%}", "by degree": "{by_degree[0]:.1%}",
    "by use": "{by_use[0]:.1%} ({by_use[1]:.1%} to {by_use[2]:.1%})", "best": "{best[0]:.1%}",
    "asked, by degree": "{asked_by_degree[0]:.2f}", "asked, by use": "{asked_by_use[0]:.2f}",
}  # fmt: skip
SCRIPT = Script(
    "shared_hot_rows",
    full={"data": None, "graph": "facebook_news", "ids": (1, 16, 64), "method": "metis",
          "nodes_learned": 96_000, "most_learned": 6000, "asked": 600, "seeds": 3},
    quick={"graph": "pubmed", "ids": (1,), "method": "random", "most_learned": 30, "asked": 10,
           "seeds": 1},
    tables=[Table("Share of a request's rows that it fetches", "rows", COLUMNS)],
)  # fmt: skip
Marks = NDArray[np.bool_]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way to ask."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    with tempfile.TemporaryDirectory() as folder:
        graph = opened(options.graph, Path(data) if data else None, Path(folder))
    snapshot = graph.snapshot
    parts = partition(snapshot, PARTS, options.method)
    rows = []
    for asked_for in ("any", "popular"):
        for ids in options.ids:
            learned = min(options.most_learned, options.nodes_learned // ids)
            counted = [
                counts_of(snapshot, parts, asked_for, ids, learned, options.asked, seed)
                for seed in range(options.seeds)
            ]
            nodes = float(np.mean([one.pop("nodes") for one in counted]))
            spread = {name: _spread([one[name] for one in counted]) for name in counted[0]}
            rows.append({"asked_for": asked_for, "ids": ids, "learned": learned,
                         "nodes": round(nodes, 1), **spread})  # fmt: skip
    facts = {"graph": options.graph, "source": graph.source, "nodes": snapshot.num_nodes,
             "edges": snapshot.num_edges}  # fmt: skip
    return {**facts, "requests": options.asked, "seeds": options.seeds, "rows": rows}


def counts_of(
    snapshot: Snapshot, parts: Parts, asked_for: str, ids: int, learned: int, asked: int, seed: int
) -> dict[str, float]:
    """Return nodes of a request, the shares of them fetched, and servers asked, by copies kept."""
    rng = np.random.default_rng(seed)
    draw = drawing(snapshot, asked_for, ids, FANOUTS, rng)
    uses = np.zeros((PARTS, snapshot.num_nodes), np.int64)
    for number in range(learned):
        uses[rng.integers(PARTS), draw(number)] += 1
    further = [(int(rng.integers(PARTS)), draw(learned + number)) for number in range(asked)]
    future = np.zeros_like(uses)
    for server, nodes in further:
        future[server, nodes] += 1
    hot = hottest(snapshot, HOT_SHARE)
    degrees = np.bincount(snapshot.edges()[0], minlength=snapshot.num_nodes)
    own = [parts == part for part in range(PARTS)]
    room = [int(np.count_nonzero(hot & ~mine)) for mine in own]
    # Where little was asked yet, degree decides.
    prior = degrees / max(1.0, float(degrees.mean()))
    kept = {
        "elsewhere": own,
        "by_degree": [mine | hot for mine in own],
        "by_use": [_with(own[n], uses[n] + prior, room[n]) for n in range(PARTS)],
        "best": [_with(own[n], future[n], room[n]) for n in range(PARTS)],
    }
    gathered = sum(nodes.size for _, nodes in further)
    found = {"nodes": gathered / asked}
    for name, held in kept.items():
        away = [nodes[~held[server][nodes]] for server, nodes in further]
        found[name] = sum(nodes.size for nodes in away) / gathered
        found[f"asked_{name}"] = sum(np.unique(parts[nodes]).size for nodes in away) / asked
    return found


def _with(own: Marks, score: NDArray[Any], count: int) -> Marks:
    """Mark, with the nodes of one's own part, as many others with the highest scores."""
    kept = own.copy()
    kept[np.argsort(np.where(own, 1.0, -score), kind="stable")[:count]] = True
    return kept


def _spread(values: list[float]) -> list[float]:
    """Return mean, least and most."""
    return [round(float(value), 4) for value in (np.mean(values), min(values), max(values))]


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
