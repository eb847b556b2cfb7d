"""`gnnserve graph import`: bring a graph that PyG saved into a file that servers read."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from serve.commands.torch_reader import read_apart
from serve.errors import ConfigError
from serve.graphs.import_messages import GraphOrder, GraphRead
from serve.graphs.load import OpenOptions, open_graph
from serve.progress import Progress

_READER = "serve.lane.graph_importing"
SUFFIXES = (".safetensors", ".npz")


class ImportedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that was imported, and that a server can open."""

    path: Path
    num_nodes: int
    num_edges: int
    #: What was changed or left out, in sentences.
    notes: tuple[str, ...]


def read_graph_apart(order: GraphOrder) -> GraphRead:
    """Have a process with torch convert the graph; raises ModelError when it does not end."""
    return read_apart(_READER, order, order.source, GraphRead)


def import_graph(
    source: Path,
    target: Path,
    progress: Progress,
    *,
    read: Callable[[GraphOrder], GraphRead] = read_graph_apart,
) -> ImportedGraph:
    """Write the graph in `source` to `target`, once it has been opened as a server does.

    Raises ConfigError for what cannot be imported, and leaves no file then.
    """
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--out: {target}: a file that ends in {' or '.join(SUFFIXES)} is wanted")
    if target.exists():
        raise ConfigError(f"--out: {target} exists; remove it, or choose another name")
    if not target.parent.is_dir():
        raise ConfigError(f"--out: {target.parent}: no such folder")
    try:
        folder = tempfile.TemporaryDirectory(prefix=".import-", dir=target.parent)
    except OSError as error:
        raise ConfigError(f"--out: {target.parent}: {error.strerror}") from error
    with folder:
        made = Path(folder.name) / target.name
        progress("reading the graph", 0.1)
        found = read(GraphOrder(source=str(source), target=str(made)))
        if found.error:
            raise ConfigError(found.error)
        progress("opening it as a server does", 0.6)
        try:
            opened = open_graph(target.stem, made, OpenOptions(), lambda *_: None)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(made), str(source))) from error
        os.replace(made, target)
    held = opened.snapshot
    return ImportedGraph(
        path=target, num_nodes=held.num_nodes, num_edges=held.num_edges, notes=found.notes
    )


def graph_section(found: ImportedGraph) -> str:
    """Return what a server's configuration says to hold the graph."""
    name, file = (json.dumps(text) for text in (found.path.stem, str(found.path)))
    return f"[[graph]]\nname = {name}\nfile = {file}\n"
