"""How many of the gathered features hot rows serve: the server's choice on a stream of requests.

    python -m bench.graphs.hot_rows [--data FOLDER] [--quick] [--out FILE]

Counts, not times: no GPU is needed. Requests for 16 nodes with fan-outs 10, 10, 5 are sampled as
the server samples them, from real graphs where a file is at hand. Nodes asked for are any, or by a
popularity that has nothing to do with degree (Zipf, exponent 1). After so many requests as the
server learns from, the share of the rows of further ones that was hot, where so many per cent
of all rows can be, for

- random: any rows;
- degree: what the server starts with;
- counted: what it has come to (`serve.graphs.hot_set.HotSet`, after counting and choosing again);
- hindsight: the rows that those further requests ask for most, which nobody can know.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kit.result import RESULTS, write_result
from serve.graphs.datasets import load_dataset
from serve.graphs.hot_set import HotSet, slots_bytes
from serve.graphs.load import OpenOptions, Parts, held
from serve.graphs.resident import ResidentGraph
from serve.graphs.snapshot import Snapshot

RESULT = RESULTS / "hot_rows.json"
GRAPHS = ("cora", "pubmed", "artist", "amazon")
SHARES = (0.01, 0.05, 0.1, 0.25)
IDS, FANOUTS = 16, (10, 10, 5)
LEARNED, ASKED = 6_000, 600
#: Of features the rows matter here, not what is in them.
FEATURES = 1
Nodes = NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("GNNSERVE_DATA"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rows = []
    for name in GRAPHS[:1] if arguments.quick else GRAPHS:
        with tempfile.TemporaryDirectory() as folder:
            graph = opened(name, arguments.data, Path(folder))
        snapshot = graph.snapshot
        for stream in ("any", "popular"):
            learned, asked = requests(snapshot, stream, arguments.quick)
            for share in SHARES:
                row = {
                    "graph": name, "source": graph.source, "nodes": snapshot.num_nodes,
                    "edges": snapshot.num_edges, "asked_for": stream, "hot_share": share,
                } | served(snapshot, share, learned, asked)  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
    if not arguments.quick:
        found = {"learned": LEARNED, "asked": ASKED, "rows": rows}
        write_result(arguments.out, found)


def opened(name: str, data: Path | None, folder: Path) -> ResidentGraph:
    """The graph as the server holds it, with features of one column."""
    found = load_dataset(name, folder=data)
    x = np.random.default_rng(0).random((found.num_nodes, FEATURES), dtype=np.float32)
    parts = Parts(found.num_nodes, found.edge_index, x, found.source)
    options = OpenOptions(cache=folder, shared=True)
    return held(name, parts, options, lambda step, fraction: None)


def requests(snapshot: Snapshot, stream: str, quick: bool) -> tuple[list[Nodes], list[Nodes]]:
    """Rows gathered by requests to learn from, and by those after them."""
    rng = np.random.default_rng(1)
    popularity = 1 / np.arange(1, snapshot.num_nodes + 1)
    order = rng.permutation(snapshot.num_nodes)

    def draw(number: int) -> Nodes:
        if stream == "any":
            ids = rng.integers(0, snapshot.num_nodes, IDS)
        else:
            ids = order[rng.choice(snapshot.num_nodes, IDS, p=weights)]
        sample = snapshot.sample(ids, FANOUTS, number)
        nodes = np.empty(sample.num_nodes, np.int64)
        sample.write_nodes(nodes)
        return nodes

    weights = popularity / popularity.sum()
    counts = (200, 50) if quick else (LEARNED, ASKED)
    drawn = [draw(number) for number in range(sum(counts))]
    return drawn[: counts[0]], drawn[counts[0] :]


def served(
    snapshot: Snapshot, share: float, learned: list[Nodes], asked: list[Nodes]
) -> dict[str, Any]:
    """Share of the rows of `asked` that each choice serves."""
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
    main()
