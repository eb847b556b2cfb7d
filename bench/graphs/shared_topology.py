"""Count how often requests wait for other servers when a graph's edges are shared out.

    python -m bench.graphs.shared_topology [--data FOLDER] [--quick]

Counts, not times: nothing is sent. A real graph is partitioned by METIS. Requests for one node, and
for 64 at random, are sampled as servers that share out edges sample them, with fan-outs 10, 10 and
10, 10, 5. Each is at the server whose part has most of its ids. A round is a hop that reaches nodes
which that server does not hold. With push-down, which is not built, who draws for a node would go
on through the nodes that it holds, and a round be a hop with nodes for which nobody has drawn then.
`memory` is that of the server that takes most, with 128 features of float32, as a share of what the
whole graph takes.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.graphs.hot_rows import opened
from bench.kit.script import Script, Table
from serve.graphs.csr import Ids, Rows
from serve.graphs.partition import Parts, hottest, partition
from serve.graphs.shared_sampling import drawn, joined_sample, seed_of_hop
from serve.graphs.snapshot import Snapshot

FANOUTS = ((10, 10), (10, 10, 5))
#: Bytes of a row of 128 features of float32; of an in-edge; and of each node of the graph on a
#: server that has all of it, and on one that has a part.
ROW_BYTES, EDGE_BYTES, WHOLE_BYTES, PART_BYTES = 512, 4, 8, 14
HOT_SHARES = (0.0, 0.05)
SCRIPT = Script(
    "shared_topology",
    full={"data": None, "graph": "facebook_news", "ids": (1, 64), "requests": 300,
          "parts": (2, 4, 5, 8), "method": "metis"},
    quick={"graph": "pubmed", "requests": 10, "parts": (2,), "method": "random"},
    tables=[
        Table("Rounds of a request", "rows", {
            "parts": "{parts}", "hot": "{hot:.0%}", "memory": "{memory:.0%}", "ids": "{ids}",
            "fan-outs": "{fanouts}", "median": "{median:.0f}", "mean": "{mean:.2f}",
            "with push-down": "{pushed:.2f}", "features too": "{with_features:.2f}",
        })
    ],
)  # fmt: skip
Marks = NDArray[np.bool_]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of parts, share of hot nodes, and kind of requests."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    with tempfile.TemporaryDirectory() as folder:
        graph = opened(options.graph, Path(data) if data else None, Path(folder))
    snapshot = graph.snapshot
    rows = []
    for count in options.parts:
        parts = partition(snapshot, count, options.method)
        for hot in HOT_SHARES:
            marked = hottest(snapshot, hot)
            held = [(parts == part) | marked for part in range(count)]
            made = {"parts": count, "hot": hot, "memory": round(_memory(snapshot, held), 4)}
            for ids in options.ids:
                for fanouts in FANOUTS:
                    counted = _requests(snapshot, parts, held, ids, fanouts, options.requests)
                    rows.append({**made, "ids": ids, "fanouts": ", ".join(map(str, fanouts)),
                                 **counted})  # fmt: skip
    facts = {"graph": options.graph, "source": graph.source, "nodes": snapshot.num_nodes,
             "edges": snapshot.num_edges}  # fmt: skip
    return {**facts, "requests": options.requests, "rows": rows}


def _memory(snapshot: Snapshot, held: list[Marks]) -> float:
    degrees = snapshot.in_edges.degrees(np.arange(snapshot.num_nodes))
    each = [
        PART_BYTES * mine.size + EDGE_BYTES * int(degrees[mine].sum()) + ROW_BYTES * int(mine.sum())
        for mine in held
    ]
    per_node = WHOLE_BYTES + ROW_BYTES
    return max(each) / (per_node * snapshot.num_nodes + EDGE_BYTES * snapshot.num_edges)


def _requests(
    snapshot: Snapshot, parts: Parts, held: list[Marks], ids: int, fanouts: tuple[int, ...],
    count: int,
) -> dict[str, float]:  # fmt: skip
    rng = np.random.default_rng(0)
    found = []
    for seed in range(count):
        asked = rng.integers(0, snapshot.num_nodes, ids)
        home = held[int(np.bincount(parts[asked]).argmax())]
        found.append(_rounds(snapshot, parts, held, home, asked, fanouts, seed))
    rounds, pushed, features = np.array(found).T
    return {
        "median": float(np.median(rounds)), "mean": round(float(rounds.mean()), 3),
        "pushed": round(float(pushed.mean()), 3),
        "with_features": round(float((rounds + features).mean()), 3),
    }  # fmt: skip


def _rounds(
    snapshot: Snapshot, parts: Parts, held: list[Marks], home: Marks, ids: Ids,
    fanouts: tuple[int, ...], seed: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Return the rounds of a request, those with push-down, and whether it needs features."""
    rounds = pushed = 0
    #: By hop, the nodes for which somebody drew without having been asked.
    ahead: list[set[int]] = [set() for _ in fanouts]

    def rows_of(nodes: Ids, hop: int) -> Rows:
        return drawn(snapshot.in_edges, nodes, fanouts[hop], seed_of_hop(seed, hop))

    def draw(nodes: Ids, hop: int) -> Rows:
        nonlocal rounds, pushed
        away = nodes[~home[nodes]]
        rounds += bool(away.size)
        new = away[~np.isin(away, list(ahead[hop]))]
        pushed += bool(new.size)
        for part in np.unique(parts[new]).tolist():
            reached = new[parts[new] == part]
            for later in range(hop + 1, len(fanouts)):
                met = np.unique(rows_of(reached, later - 1).values)
                reached = met[held[part][met]]
                ahead[later].update(reached.tolist())
        return rows_of(nodes, hop)

    sample = joined_sample(ids, fanouts, snapshot.num_nodes, seed, draw)
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    return rounds, pushed, int(not home[nodes].all())


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
