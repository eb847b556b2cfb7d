"""Which machines have the memory for a server, known before one is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve.cluster.seating import edge_share_held, share_held
from serve.config import Config
from serve.errors import ConfigError
from serve.graphs.datasets import TABLE_4
from serve.models.repository import BrokenModel, scan
from serve.units import format_bytes

#: Memory of a server's processes before they hold a model.
HOST_BYTES = 1 << 30
_FEATURE_BYTES, _EDGE_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class ServerNeed:
    """Memory that one server of a pool takes, bytes."""

    #: Of all models it loads.
    weights_bytes: int
    #: Topology and features of the graphs it holds.
    graphs_bytes: int
    #: `device.memory_budget`: on processors of the machine's memory, and graphs count against it.
    budget_bytes: int
    on_gpus: bool = False

    @property
    def held_bytes(self) -> int:
        """What the budget has to hold for as long as the server runs."""
        return self.weights_bytes + (0 if self.on_gpus else self.graphs_bytes)

    @property
    def total_bytes(self) -> int:
        """What the machine's own memory must have."""
        return HOST_BYTES + (self.graphs_bytes if self.on_gpus else self.budget_bytes)


def server_need(config: Config, *, on_gpus: bool) -> ServerNeed:
    """Return what a server of this configuration takes; raises ConfigError.

    Graphs of files count as much as their files; those that are shared out without what other
    servers hold of features and edges, where these are in files of their own.
    """
    budget_bytes = config.device.memory_budget_bytes
    if budget_bytes is None:
        raise ConfigError(
            "device.memory_budget: servers are placed by the memory that they take; set it"
        )
    wanted = config.models.load
    weights_bytes = sum(
        found.weights_bytes
        for found in scan(config.path(config.models.repository))
        if not isinstance(found, BrokenModel) and (not wanted or found.name in wanted)
    )
    graphs_bytes = 0
    for graph in config.graph:
        share, edge_share = share_held(config, graph), edge_share_held(config, graph)
        if graph.file is not None:
            held = {"x.npy": share, "edge_index.npy": edge_share}
            graphs_bytes += _file_bytes(config.path(graph.file), held)
        elif (size := TABLE_4.get(graph.dataset or "")) is not None:
            features_bytes = size.num_nodes * _FEATURE_BYTES * size.num_features * share
            edges_bytes = size.num_edges * _EDGE_BYTES * edge_share
            graphs_bytes += int((edges_bytes + features_bytes) * graph.scale)
    return ServerNeed(weights_bytes, graphs_bytes, budget_bytes, on_gpus)


def _file_bytes(path: Path, held: Mapping[str, float]) -> int:
    """Return the size of a file, or of all files in a folder, with a share of those in `held`.

    Raises ConfigError.
    """
    try:
        if path.is_dir():
            files = [one for one in path.iterdir() if one.is_file()]
            sizes = {one.name: one.stat().st_size for one in files}
            elsewhere = (int((1 - held.get(name, 1.0)) * size) for name, size in sizes.items())
            return sum(sizes.values()) - sum(elsewhere)
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"graph.file: {path}: {error.strerror}") from error


def unplaceable(need: ServerNeed, replicas: int, machines: Mapping[str, int]) -> str | None:
    """Return why `replicas` servers, one on each machine, cannot be placed; None when they can.

    `machines` has the memory of each, bytes.
    """
    if need.held_bytes > need.budget_bytes:
        graphs = "" if need.on_gpus else f" and its graphs {format_bytes(need.graphs_bytes)}"
        return (
            f"the weights of a server take {format_bytes(need.weights_bytes)}{graphs}, more than "
            f"the {format_bytes(need.budget_bytes)} of device.memory_budget"
        )
    able = [name for name, has in machines.items() if has >= need.total_bytes]
    if len(able) >= replicas:
        return None
    part = "graphs" if need.on_gpus else "device.memory_budget"
    needs = (
        f"a server needs {format_bytes(need.total_bytes)} of memory: "
        f"{format_bytes(need.total_bytes - HOST_BYTES)} for {part} and "
        f"{format_bytes(HOST_BYTES)} for its processes"
    )
    if not able:
        most = max(machines.values(), default=0)
        return f"{needs}; the largest of {len(machines)} machines has {format_bytes(most)}"
    return f"{needs}; {len(able)} of {len(machines)} machines have that, {replicas} are asked for"
