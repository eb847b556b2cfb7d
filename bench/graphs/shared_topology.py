"""Count how often requests wait for other servers when a graph's edges are shared out.

    python -m bench.graphs.shared_topology [--data FOLDER] [--quick]

Counts, not times: nothing is sent. A real graph is partitioned by METIS. Requests for one node, and
for 64 at random, are sampled as servers that share out edges sample them, with fan-outs 10, 10 and
10, 10, 5. Each is at the server whose part has most of its ids. A round is a hop that reaches nodes
which that server does not hold. With push-down, which is not built, who draws for a node would go
on through the nodes that it holds, and a round be a hop with nodes for which nobody has drawn then.
`memory` is that of the server that takes most, with 128 features of float32, as a share of what the
whole graph takes.

With `split = home`, the ids of a request are split by part, each part is at a server that holds it,
and passing it on is a round. Bytes are those of features and draws that servers send each other,
also as a multiple of the features alone that are sent where all servers have all edges and nothing
is split. `run` is the edges of the largest part's sample, by which the slowest run takes its time,
and `work` the nodes of all parts' samples, both as shares of the whole sample's.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
    full={"data": None, "graph": "facebook_news", "ids": (1, 64), "split_ids": (8, 64),
          "requests": 300, "parts": (2, 4, 5, 8), "method": "metis"},
    quick={"graph": "pubmed", "requests": 10, "parts": (2,), "method": "random"},
    tables=[
        Table("Rounds of a request", "rows", {
            "parts": "{parts}", "hot": "{hot:.0%}", "memory": "{memory:.0%}", "ids": "{ids}",
            "fan-outs": "{fanouts}", "median": "{median:.0f}", "mean": "{mean:.2f}",
            "with push-down": "{pushed:.2f}", "features too": "{with_features:.2f}",
        }),
        Table("Split by home", "splits", {
            "parts": "{parts}", "hot": "{hot:.0%}", "ids": "{ids}", "fan-outs": "{fanouts}",
            "rounds, off": "{off_rounds:.2f}", "rounds, home": "{home_rounds:.2f}",
            "KiB, off": "{off_kib:,.0f}", "KiB, home": "{home_kib:,.0f}",
            "÷ features only": "{of_features_only:.2f}", "run": "{run_share:.0%}",
            "work": "{work_share:.0%}",
        }),
    ],
)  # fmt: skip
Marks = NDArray[np.bool_]
#: Bytes of a node that another server is asked about; of a number of neighbours, and of each.
_ID_BYTES, _DRAWN_BYTES = 8, 4


class Sent(NamedTuple):
    """What servers send each other for a sample."""

    #: Hops that wait for draws, and one more for features.
    rounds: int
    feature_bytes: int
    draw_bytes: int
    nodes: int
    edges: int


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of parts, share of hot nodes, and kind of requests."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    with tempfile.TemporaryDirectory() as folder:
        graph = opened(options.graph, Path(data) if data else None, Path(folder))
    snapshot = graph.snapshot
    rows, splits = [], []
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
            for ids, hops in product(options.split_ids, FANOUTS):
                split = _splits(snapshot, parts, held, ids, hops, options.requests)
                splits.append({"parts": count, "hot": hot, "ids": ids,
                               "fanouts": ", ".join(map(str, hops)), **split})  # fmt: skip
    facts = {"graph": options.graph, "source": graph.source, "nodes": snapshot.num_nodes,
             "edges": snapshot.num_edges}  # fmt: skip
    return {**facts, "requests": options.requests, "rows": rows, "splits": splits}


def _memory(snapshot: Snapshot, held: list[Marks]) -> float:
    degrees = snapshot.in_edges.degrees(np.arange(snapshot.num_nodes))
    each = [
        PART_BYTES * mine.size + EDGE_BYTES * int(degrees[mine].sum()) + ROW_BYTES * int(mine.sum())
        for mine in held
    ]
    per_node = WHOLE_BYTES + ROW_BYTES
    return max(each) / (per_node * snapshot.num_nodes + EDGE_BYTES * snapshot.num_edges)


def _asked(parts: Parts, ids: int, count: int) -> Iterator[tuple[Ids, int]]:
    """Yield the ids of each of `count` requests, and the part that has most of them."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        asked = rng.integers(0, parts.size, ids)
        yield asked, int(np.bincount(parts[asked]).argmax())


def _requests(
    snapshot: Snapshot, parts: Parts, held: list[Marks], ids: int, fanouts: tuple[int, ...],
    count: int,
) -> dict[str, float]:  # fmt: skip
    found = [
        _rounds(snapshot, parts, held, held[here], asked, fanouts, seed)
        for seed, (asked, here) in enumerate(_asked(parts, ids, count))
    ]
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


def _splits(
    snapshot: Snapshot, parts: Parts, held: list[Marks], ids: int, fanouts: tuple[int, ...],
    count: int,
) -> dict[str, float]:  # fmt: skip
    """Return means over requests, each at the server whose part has most of its ids."""
    found = []
    for seed, (asked, here) in enumerate(_asked(parts, ids, count)):
        off = _sent(snapshot, held[here], asked, fanouts, seed)
        # Hot nodes are everywhere: their ids stay.
        homes = np.where(held[here][asked], here, parts[asked])
        home = [
            _sent(snapshot, held[part], asked[homes == part], fanouts, seed)
            for part in np.unique(homes).tolist()
        ]
        home_bytes = sum(one.feature_bytes + one.draw_bytes for one in home)
        found.append((
            off.rounds, max(one.rounds for one in home) + (len(home) > 1),
            off.feature_bytes + off.draw_bytes, home_bytes, off.feature_bytes,
            max(one.edges for one in home) / max(1, off.edges),
            sum(one.nodes for one in home) / off.nodes,
        ))  # fmt: skip
    off_rounds, home_rounds, off_bytes, home_bytes, feature_bytes, run, work = np.mean(found, 0)
    return {
        "off_rounds": round(off_rounds, 3), "home_rounds": round(home_rounds, 3),
        "off_kib": round(off_bytes / 1024, 1), "home_kib": round(home_bytes / 1024, 1),
        "of_features_only": round(home_bytes / max(1, feature_bytes), 3),
        "run_share": round(run, 3), "work_share": round(work, 3),
    }  # fmt: skip


def _sent(snapshot: Snapshot, here: Marks, ids: Ids, fanouts: tuple[int, ...], seed: int) -> Sent:
    """Sample `ids` at the server that holds the nodes which `here` marks."""
    rounds = draw_bytes = 0

    def draw(nodes: Ids, hop: int) -> Rows:
        nonlocal rounds, draw_bytes
        found = drawn(snapshot.in_edges, nodes, fanouts[hop], seed_of_hop(seed, hop))
        away = ~here[nodes]
        if away.any():
            rounds += 1
            draw_bytes += (_ID_BYTES + _DRAWN_BYTES) * int(away.sum())
            draw_bytes += _DRAWN_BYTES * int(np.diff(found.starts)[away].sum())
        return found

    sample = joined_sample(ids, fanouts, snapshot.num_nodes, seed, draw)
    nodes = np.empty(sample.num_nodes, np.int64)
    sample.write_nodes(nodes)
    missing = int(np.count_nonzero(~here[nodes]))
    feature_bytes = (ROW_BYTES + _ID_BYTES) * missing
    return Sent(rounds + bool(missing), feature_bytes, draw_bytes, sample.num_nodes,
                sample.num_edges)  # fmt: skip


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
