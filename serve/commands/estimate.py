"""`gnnserve estimate`: what one request would need, computed without a server."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
from rich.table import Table

from serve.commands.configured import calibration_cache, device_of
from serve.config import Config
from serve.errors import ConfigError
from serve.estimate.estimator import ModelEstimator
from serve.progress import Progress
from serve.rpc.parameters import parse_fanouts
from serve.server.api import ModelEstimate
from serve.server.device import Device
from serve.server.engine import Engine


def estimate_offline(
    config: Config, model: str, num_nodes: int, num_edges: int, progress: Progress
) -> ModelEstimate:
    """Return the estimate that a server of this configuration would make for a graph.

    Calibrates the model first if the cache does not hold it. Raises NotFound for an unknown model.
    """
    with _offline_engine(config, device_of(config)) as engine:
        engine.load_offline(model, progress)
        return engine.estimate(model, "", num_nodes, num_edges)


def estimate_sample_offline(
    config: Config, model: str, graph: str, num_ids: int, fanouts: str | None, progress: Progress
) -> ModelEstimate:
    """Return the estimate for a request by `num_ids` node ids of the resident graph `graph`.

    `fanouts` are written as in such a request; None for the model's own. Raises ConfigError for a
    graph that the configuration does not have.
    """
    resident = tuple(entry for entry in config.graph if entry.name == graph)
    if not resident:
        names = ", ".join(entry.name for entry in config.graph) or "none"
        raise ConfigError(f"--graph: '{graph}' is not in the configuration, which has: {names}")
    # Only this graph is loaded.
    reduced = msgspec.structs.replace(config, graph=resident)
    with _offline_engine(reduced, device_of(config)) as engine:
        engine.load_offline(model, progress, with_graphs=True)
        return engine.estimate_sample(model, "", graph, num_ids, parse_fanouts(fanouts))


def offline_estimators(
    config: Config, device: Device, names: Iterable[str], progress: Progress
) -> dict[str, ModelEstimator]:
    """Return the estimator of each named model, calibrated if the cache does not hold it."""
    with _offline_engine(config, device) as engine:
        found = {}
        for name in names:
            engine.load_offline(name, progress)
            found[name] = engine.estimator(name)
        return found


@contextmanager
def _offline_engine(config: Config, device: Device) -> Iterator[Engine]:
    """An engine without lanes: it estimates and calibrates, and cannot run requests."""
    engine = Engine(config, device, lambda _: None, calibration_cache(config, device))
    try:
        yield engine
    finally:
        engine.stop()


# -- as a table -----------------------------------------------------------------------------------


def estimate_table(found: ModelEstimate) -> Table:
    """Return the estimate as a table of two columns; lines that say nothing are left out."""
    size = f"{found.num_nodes:,} nodes, {found.num_edges:,} edges"
    asked, sampled, drawn, scope = size, "", "", "inputs included"
    if (sample := found.sample) is not None:
        asked = f"{sample.num_ids:,} nodes of graph {sample.graph}"
        hops = ", ".join("all" if fanout == -1 else str(fanout) for fanout in sample.fanouts)
        high = sample.size
        sampled = f"{size}; 95 % within {high.num_nodes_high:,} and {high.num_edges_high:,}"
        drawn = f"in {_milliseconds(high.prepare_ns)}, {hops} neighbours a hop"
        scope += ", of the larger"
    margin_bytes = found.reserve_bytes - found.peak_bytes - found.workspace_bytes
    margin_bytes -= found.output_bytes
    table = Table(
        title=f"{found.model} version {found.version}: {asked}",
        show_header=False,
        title_justify="left",
    )
    rows = (
        ("executor", found.executor),
        ("expected sample", sampled),
        ("sampled", drawn),
        ("weights, held once", _size(found.weights_bytes)),
        ("inputs", _size(found.input_bytes)),
        ("peak memory (PMC)", f"{_size(found.peak_bytes)}, {scope}"),
        ("held at the peak by", found.peak_where),
        ("kernel workspace", _size(found.workspace_bytes) if found.workspace_bytes else ""),
        ("margin, answer", f"{_size(margin_bytes)}, {_size(found.output_bytes)}"),
        ("reserved", _size(found.reserve_bytes)),
        ("fit at once", f"{found.fit_count:,} in {_size(found.budget_bytes)}"),
        ("run time", _milliseconds(found.run_ns)),
        ("solo time", f"{_milliseconds(found.solo_ns)}, 95 % within "
                      f"{_milliseconds(found.solo_high_ns)}"),
        ("QoS target", _milliseconds(found.qos_target_ns)),
        ("warning", found.warning),
    )  # fmt: skip
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.2f} {unit}"
    return f"{size_bytes} B"


def _milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.2f} ms"
