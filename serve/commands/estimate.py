"""`gnnserve estimate`: what one request would need, computed without a server."""

from collections.abc import Iterable, Iterator, Mapping
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
from serve.server.training.job_facts import TrainingEstimate
from serve.units import format_bytes, format_ms


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
    config: Config,
    model: str,
    graph: str,
    num_ids: int,
    fanouts: str | None,
    progress: Progress,
    node_type: str | None = None,
) -> ModelEstimate:
    """Return the estimate for a request by `num_ids` node ids of the resident graph `graph`.

    `fanouts` are written as in such a request; None for the model's own. `node_type` is the type of
    the ids, None for the only one possible. Raises ConfigError for a graph that the configuration
    does not have.
    """
    resident = tuple(entry for entry in config.graph if entry.name == graph)
    if not resident:
        names = ", ".join(entry.name for entry in config.graph) or "none"
        raise ConfigError(f"--graph: '{graph}' is not in the configuration, which has: {names}")
    # Only this graph is loaded.
    reduced = msgspec.structs.replace(config, graph=resident)
    with _offline_engine(reduced, device_of(config)) as engine:
        engine.load_offline(model, progress, with_graphs=True)
        return engine.estimate_sample(model, "", graph, num_ids, parse_fanouts(fanouts), node_type)


def estimate_training_offline(
    config: Config, model: str, num_nodes: int, num_edges: int, progress: Progress
) -> TrainingEstimate:
    """Return the estimate of a training step of the model on a graph of that size."""
    device = device_of(config)
    if device.places:
        raise ConfigError("--train: jobs train on processors only, the configuration has a GPU")
    with _offline_engine(config, device) as engine:
        engine.load_offline(model, progress)
        progress("tracing training steps", 1.0)
        return engine.training.estimate(model, num_nodes, num_edges)


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


def _hops_text(fanouts: tuple[int, ...] | Mapping[str, tuple[int, ...]]) -> str:
    """Return the fan-outs for people: of several types of edges, one after the other if unequal."""
    if isinstance(fanouts, Mapping):
        if len(set(fanouts.values())) > 1:
            return "; ".join(f"{name} {_hops_text(each)}" for name, each in fanouts.items())
        fanouts = next(iter(fanouts.values()), ())
    return ", ".join("all" if fanout == -1 else str(fanout) for fanout in fanouts)


def estimate_table(found: ModelEstimate) -> Table:
    """Return the estimate as a table of two columns; lines that say nothing are left out."""
    size = f"{found.num_nodes:,} nodes, {found.num_edges:,} edges"
    asked, sampled, drawn, scope = size, "", "", "inputs included"
    if (sample := found.sample) is not None:
        asked = f"{sample.num_ids:,} nodes of graph {sample.graph}"
        hops = _hops_text(sample.fanouts)
        high = sample.size
        sampled = f"{size}; 95 % within {high.num_nodes_high:,} and {high.num_edges_high:,}"
        drawn = f"in {format_ms(high.prepare_ns / 1e6)}, {hops} neighbours a hop"
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
        ("weights, held once", format_bytes(found.weights_bytes)),
        ("inputs", format_bytes(found.input_bytes)),
        ("peak memory (PMC)", f"{format_bytes(found.peak_bytes)}, {scope}"),
        ("held at the peak by", found.peak_where),
        ("kernel workspace", format_bytes(found.workspace_bytes) if found.workspace_bytes else ""),
        ("margin, answer", f"{format_bytes(margin_bytes)}, {format_bytes(found.output_bytes)}"),
        ("reserved", format_bytes(found.reserve_bytes)),
        ("fit at once", f"{found.fit_count:,} in {format_bytes(found.budget_bytes)}"),
        ("run time", format_ms(found.run_ns / 1e6)),
        ("solo time", f"{format_ms(found.solo_ns / 1e6)}, 95 % within "
                      f"{format_ms(found.solo_high_ns / 1e6)}"),
        ("QoS target", format_ms(found.qos_target_ns / 1e6)),
        ("warning", found.warning),
    )  # fmt: skip
    return _filled(table, rows)


def table_of(found: ModelEstimate | TrainingEstimate) -> Table:
    """Return either estimate as a table of two columns."""
    return training_table(found) if isinstance(found, TrainingEstimate) else estimate_table(found)


def training_table(found: TrainingEstimate) -> Table:
    """Return the estimate of a training step as a table of two columns."""
    size = f"{found.num_nodes:,} nodes, {found.num_edges:,} edges, {found.num_features:,} features"
    table = Table(
        title=f"{found.model} version {found.version}, a training step: {size}",
        show_header=False,
        title_justify="left",
    )
    closed_bytes = found.closed_form_bytes
    rows = (
        ("executor", found.executor),
        ("graph and labels", format_bytes(found.graph_bytes)),
        ("weights, optimiser's state", format_bytes(found.persistent_bytes)),
        ("peak memory (PMC)", f"{format_bytes(found.peak_bytes)}, both included"),
        ("reserved by a job", format_bytes(found.reserve_bytes)),
        ("CoGNN's closed form", "" if closed_bytes is None else
                                f"{format_bytes(closed_bytes)}, without weights"),
        ("warning", found.warning),
    )  # fmt: skip
    return _filled(table, rows)


def _filled(table: Table, rows: Iterable[tuple[str, str]]) -> Table:
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table
