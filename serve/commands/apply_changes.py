"""`gnnserve graph apply`: files of a shared graph that have the changes of the log."""

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve.cluster.change_log import ChangeLog
from serve.cluster.change_wire import ChangeRecord
from serve.config import Config
from serve.errors import ConfigError
from serve.graphs.change_bytes import decode_change
from serve.graphs.edge_parts import read_edges
from serve.graphs.load import OpenOptions, open_graph, read_edges_of
from serve.graphs.resident import ResidentGraph
from serve.graphs.shared_column import added_parts
from serve.graphs.sharing import files_digest, read_parts
from serve.graphs.snapshot import Snapshot
from serve.progress import Progress
from serve.undecodable import UNDECODABLE

#: Bytes of the log that are read at once, and rows of features that are written at once.
_LOG_BYTES, _ROWS = 1 << 20, 1 << 16


class WrittenGraph(msgspec.Struct, frozen=True):
    """What was written."""

    changes: int
    num_nodes: int
    num_edges: int


def apply_changes(config: Config, name: str, out: Path, progress: Progress) -> WrittenGraph:
    """Write the graph `name` with all changes of the log to the folder `out`, parts included.

    Raises ConfigError for a graph that is not shared out, a log of other files, and a folder that
    is there.
    """
    graph_config = next((one for one in config.graph if one.name == name), None)
    if graph_config is None or graph_config.parts is None or graph_config.file is None:
        raise ConfigError(f"graph '{name}': the configuration has no file and parts of it")
    log_file = config.path(config.cluster.rows.log)
    if not log_file.exists():
        raise ConfigError(f"cluster.rows.log: {log_file}: no such file; the sequencer has it")
    parts = read_parts(config.path(graph_config.parts))
    if out.exists():
        raise ConfigError(f"--out {out}: {os.strerror(errno.EEXIST)}")
    with tempfile.TemporaryDirectory(prefix="gnnserve-apply-") as folder:
        options = OpenOptions(
            undirected=graph_config.undirected,
            feature_dtype=graph_config.feature_dtype,
            map_above_bytes=0,
            cache=Path(folder),
        )
        graph = open_graph(name, config.path(graph_config.file), options, progress)
        if not isinstance(graph, ResidentGraph):
            raise ConfigError(f"graph '{name}': one of several types is not shared out")
        first = graph.snapshot
        if graph_config.share == "all":
            edges = read_edges_of(config.path(graph_config.file))
            files, _ = read_edges(edges, parts, first.num_features)
        else:
            files = files_digest(first.base, parts, first.num_features)
        changes = _make(graph, log_file, files, progress)
        found = graph.snapshot
        progress("writing", 0.9)
        count = int(parts.max()) + 1
        added = added_parts(first.num_nodes, found.num_nodes, count).astype(parts.dtype)
        arrays = {"parts": np.concatenate([parts, added])}
        if graph.labels is not None:
            # Nodes that came later have none.
            none = np.full(found.num_nodes - first.num_nodes, -1)
            arrays["y"] = np.concatenate([graph.labels, none])
        try:
            _write(found, arrays, out)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}") from error
        return WrittenGraph(changes, found.num_nodes, found.num_edges)


def _make(graph: ResidentGraph, log_file: Path, files: bytes, progress: Progress) -> int:
    """Make the changes of the graph that the log has; return their number."""
    log = ChangeLog(log_file, 0)
    try:
        number = made = 0
        while number < log.count:
            progress(f"making changes, {number:,} of {log.count:,}", number / log.count)
            for data in log.records(number, _LOG_BYTES):
                number += 1
                try:
                    record = msgspec.msgpack.decode(data, type=ChangeRecord)
                except UNDECODABLE as error:
                    raise ConfigError(f"{log_file}: change {number}: {error}") from error
                if record.graph != graph.name:
                    continue
                if record.files != files:
                    raise ConfigError(
                        f"graph '{graph.name}': change {number} of {log_file} is of other files"
                    )
                change, edges = decode_change(record.change), graph.snapshot.in_edges
                num_nodes = edges.num_nodes + (0 if change.add_x is None else len(change.add_x))
                # Where edges are shared out, one may have been removed by two changes at once.
                there = edges.those_there(change.remove_edges, num_nodes)
                graph.update(replace(change, remove_edges=there))
                made += 1
        return made
    finally:
        log.close()


def _write(snapshot: Snapshot, arrays: Mapping[str, NDArray[Any]], out: Path) -> None:
    """Make the folder `out` of edges, features and `arrays`, wholly or not at all; raises OSError.

    Of the features no more than some rows are in memory.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / out.name
        made.mkdir()
        for name, array in (("edge_index", snapshot.edges()), *arrays.items()):
            np.save(made / f"{name}.npy", array)
        shape = snapshot.num_nodes, snapshot.num_features
        with (made / "x.npy").open("wb") as target:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(target, header)
            for begin in range(0, snapshot.num_nodes, _ROWS):
                nodes = np.arange(begin, min(begin + _ROWS, snapshot.num_nodes))
                target.write(snapshot.features(nodes).astype("<f4", copy=False).data)
        made.rename(out)
