"""Count what requests fetch from other machines when a graph's features are shared out.

    python -m bench.graphs.partitions [--data FOLDER] [--quick]

Counts, not times: nothing is sent. A real graph is partitioned by METIS, and at random for
comparison. Requests for one node, and for 64 at random, are sampled as the server samples them,
with fan-outs 10, 10. Each is at the machine whose part has most of its ids.
"""

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.graphs.hot_rows import opened
from bench.kit.script import Script, Table
from serve.graphs.partition import cut_share, fetches, hottest, imbalance, partition

FANOUTS = (10, 10)
#: Bytes of a row of 128 features of float32.
ROW_BYTES = 512
HOT_SHARE = 0.05
#: Parts, and how they were made.
WAYS = ((2, "metis"), (4, "metis"), (8, "metis"), (16, "metis"), (8, "random"))
SCRIPT = Script(
    "partitions",
    full={"data": None, "graph": "facebook_news", "ids": (1, 64), "requests": 1000},
    quick={"graph": "pubmed", "requests": 20},
    tables=[
        Table("What a request fetches", "rows", {
            "parts": "{parts} {method}", "cut": "{cut_share:.0%}",
            "largest ÷ mean": "{imbalance:.2f}", "ids": "{ids}", "nodes": "{nodes:,.0f}",
            "remote": "{remote_share:.0%}", "5 % everywhere": "{cold_remote_share:.0%}",
            "KiB": "{remote_kib:,.1f}", "asked": "{asked:.1f}", "made in, s": "{made_s:.2f}",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way to partition the graph and size of requests."""
    data = options.data or os.environ.get("GNNSERVE_DATA")
    with tempfile.TemporaryDirectory() as folder:
        graph = opened(options.graph, Path(data) if data else None, Path(folder))
    snapshot = graph.snapshot
    hot = hottest(snapshot, HOT_SHARE)
    rng = np.random.default_rng(0)
    streams = {
        ids: [rng.integers(0, snapshot.num_nodes, ids) for _ in range(options.requests)]
        for ids in options.ids
    }
    rows = []
    for count, method in WAYS:
        began_s = time.perf_counter()
        parts = partition(snapshot, count, method)
        made = {
            "parts": count, "method": method, "made_s": round(time.perf_counter() - began_s, 3),
            "cut_share": round(cut_share(snapshot, parts), 4),
            "imbalance": round(imbalance(parts, count), 3),
        }  # fmt: skip
        for ids, requests in streams.items():
            found = fetches(snapshot, parts, hot, requests, FANOUTS)
            kib = found.nodes * found.remote_share * ROW_BYTES / 1024
            counted = {name: round(value, 4) for name, value in asdict(found).items()}
            rows.append({**made, "ids": ids, **counted, "remote_kib": round(kib, 2)})
    facts = {"graph": options.graph, "source": graph.source, "nodes": snapshot.num_nodes,
             "edges": snapshot.num_edges}  # fmt: skip
    return {**facts, "requests": options.requests, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
