"""`gnnserve graph partition`: what machines that share out a graph would fetch."""

import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from serve.errors import ConfigError
from serve.graphs.load import OpenOptions, open_graph
from serve.graphs.partition import (
    Fetches,
    Parts,
    cut_share,
    fetches,
    held_edges,
    hottest,
    imbalance,
    partition,
)
from serve.graphs.resident import ResidentGraph
from serve.progress import Progress
from serve.terminal import Console
from serve.units import format_bytes

#: Ids of requests, and how many of each are sampled.
_IDS, _REQUESTS = (1, 64), 300
_FEATURE_BYTES = 4


class FetchRow(msgspec.Struct, frozen=True):
    """Requests of one size."""

    ids: int
    nodes: float
    remote_share: float
    cold_remote_share: float
    remote_bytes: float
    asked: float
    rounds: float


class GraphPartition(msgspec.Struct, frozen=True):
    """A graph that was shared out."""

    parts: int
    method: str
    num_nodes: int
    num_edges: int
    cut_share: float
    imbalance: float
    hot_share: float
    #: In-edges that the server of the most would hold where they are shared out.
    most_edges: int
    requests: list[FetchRow]


def partition_graph(
    file: Path,
    parts: int,
    method: str,
    fanouts: str,
    hot: float,
    out: Path | None,
    progress: Progress,
) -> GraphPartition:
    """Partition the graph in `file`, and sample requests of it; raises ConfigError.

    With `out` writes the part of each node there.
    """
    hops = _hops(fanouts)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out {out}: a file in a folder that is there is wanted")
    with tempfile.TemporaryDirectory(prefix="gnnserve-partition-") as folder:
        # Features are not looked at; those of an archive would be written to a file first.
        above = None if file.suffix == ".npz" else 0
        options = OpenOptions(cache=Path(folder), map_above_bytes=above)
        graph = open_graph(file.stem, file, options, progress)
        if not isinstance(graph, ResidentGraph):
            raise ConfigError(f"{file}: a graph of several types cannot be partitioned yet")
        snapshot = graph.snapshot
        progress("partitioning", 0.3)
        found = partition(snapshot, parts, method)
        if out is not None:
            _save(found, out)
        marked = hottest(snapshot, hot)
        row_bytes = _FEATURE_BYTES * snapshot.num_features
        rng = np.random.default_rng(0)
        rows = []
        for number, ids in enumerate(_IDS):
            progress(f"sampling requests for {ids} ids", 0.6 + 0.2 * number)
            asked = [rng.integers(0, snapshot.num_nodes, ids) for _ in range(_REQUESTS)]
            rows.append(_row(ids, fetches(snapshot, found, marked, asked, hops), row_bytes))
        return GraphPartition(
            parts, method, snapshot.num_nodes, snapshot.num_edges, cut_share(snapshot, found),
            imbalance(found, parts), hot, int(held_edges(snapshot, found, marked).max()), rows,
        )  # fmt: skip


def _save(parts: Parts, out: Path) -> None:
    """Have the parts in the file `out`, wholly or not at all; raises ConfigError."""
    draft = out.with_name(f".{out.name}.part")
    try:
        try:
            with draft.open("wb") as target:
                np.save(target, parts)
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from error


def print_partition(found: GraphPartition, as_json: bool) -> None:
    """Print it as JSON, or as a sentence and a table."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    console = Console()
    console.print(
        f"{found.num_nodes:,} nodes and {found.num_edges:,} edges in {found.parts} parts "
        f"({found.method}): {found.cut_share:.1%} of the edges are between parts; the largest part "
        f"has {found.imbalance:.2f} times the mean. Where edges are shared out too, a server holds "
        f"up to {found.most_edges:,} of them.",
        soft_wrap=True,
    )
    table = Table()
    headings = ("ids", "nodes", "elsewhere", "with hot nodes everywhere", "bytes", "machines asked",
                "waits, edges shared out")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in found.requests:
        table.add_row(
            str(row.ids), f"{row.nodes:,.0f}", f"{row.remote_share:.0%}",
            f"{row.cold_remote_share:.0%}", format_bytes(row.remote_bytes), f"{row.asked:.1f}",
            f"{row.rounds:.1f}",
        )  # fmt: skip
    console.print(table)


def _row(ids: int, found: Fetches, row_bytes: int) -> FetchRow:
    remote_bytes = found.nodes * found.remote_share * row_bytes
    return FetchRow(
        ids, found.nodes, found.remote_share, found.cold_remote_share, remote_bytes, found.asked,
        found.rounds,
    )  # fmt: skip


def _hops(text: str) -> list[int]:
    """Return the fan-outs in `10,5` or `all`, by hop."""
    try:
        hops = [-1 if word.strip() == "all" else int(word) for word in text.split(",")]
    except ValueError:
        hops = [0]
    if any(hop == 0 or not -1 <= hop < 2**31 for hop in hops):
        raise ConfigError(f"--fanouts '{text}': numbers of neighbours by hop, such as 10,5; or all")
    return hops
