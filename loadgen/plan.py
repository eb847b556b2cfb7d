"""Plan of a run, made before it starts: a trace and the bytes of each request."""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Protocol, TypeVar

import msgspec

from loadgen.file_requests import FileRequests
from loadgen.graph_files import FileGraphs, names_own_graphs, read_graphs
from loadgen.inputs import Shapes, makeable
from loadgen.options import LoadOptions, parse_shares
from loadgen.requests import (
    MixedRequests,
    PayloadRequests,
    RequestSource,
    ResidentRequests,
    SubgraphRequests,
)
from serve.errors import ConfigError
from serve.graphs.datasets import dataset_of, graph_name
from serve.graphs.pool import GraphPool
from serve.payloads import Payloads, beside
from serve.recording import read_trace, recorded_requests
from serve.workload import (
    MIX,
    PoolSpec,
    ResidentSpec,
    Trace,
    TraceHeader,
    WorkloadTask,
    build_trace,
    parse_weights,
    rate_for_rho,
    workload_tasks,
)

FoundT = TypeVar("FoundT")


class ServerUnderLoad(Protocol):
    """Facts about the server that a plan needs."""

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are ready."""
        ...

    def inputs(self, model: str) -> Shapes:
        """Return names and shapes of the inputs of `model`."""
        ...

    def slots(self) -> int:
        """Return how many requests execute at once."""
        ...

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        """Return the estimated solo time of a request, in seconds."""
        ...

    def graph(self, name: str, node_type: str) -> tuple[int, str]:
        """Return the number of nodes of a graph, of one type if it has several, and its origin."""
        ...

    def sample_solo_s(self, model: str, spec: ResidentSpec, num_ids: int) -> float:
        """Return the estimated solo time of a request by node ids, in seconds."""
        ...

    def lone_s(self, message: bytes) -> float:
        """Send one encoded request to an idle server; returns its latency in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of requests in flight, until a time or a number of requests is over."""

    in_flight: int
    duration_s: float | None
    requests: int | None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests and their send times."""

    trace: Trace
    #: Serialized requests, one per item of the trace; equal requests share one object. Empty where
    #: workers make them.
    messages: tuple[bytes, ...]
    #: None: each request is sent at its time. Else the trace only says what is sent, in turn.
    closed: ClosedLoop | None = None


def make_plan(options: LoadOptions, server: ServerUnderLoad, *, encoded: bool = True) -> LoadPlan:
    """Read or draw the trace of `options`, save it if wanted, and encode its requests.

    Without `encoded` the plan has no messages: `encode_trace` makes those of a part of the trace.
    Raises ConfigError for options, traces or graphs that do not fit together.
    """
    options.check()
    if options.trace is None:
        models = _models(options, server)
        resident = _resident(options, server)
        source = _source(models, resident, options.graphs, options, server)
        trace = _draw(options, models, resident, source, server)
    else:
        trace = _shortened(read_trace(options.trace), options)
        source = _source_of(trace, options, server)
    if not trace.items:
        raise ConfigError("no request falls into this run: make it longer or the rate higher")
    if options.save_trace is not None:
        trace.save(options.save_trace)
    closed = None
    if options.in_flight is not None:
        closed = ClosedLoop(options.in_flight, options.duration_s, options.requests)
    return LoadPlan(trace, _encode(trace, source) if encoded else (), closed)


def encode_trace(
    trace: Trace, options: LoadOptions, server: ServerUnderLoad, between: Callable[[], None]
) -> tuple[bytes, ...]:
    """Encode the requests of a trace; calls `between` after each, as this may take long.

    Raises ConfigError for a trace that does not fit the server.
    """
    return _encode(trace, _source_of(trace, options, server), between)


def _resident(options: LoadOptions, server: ServerUnderLoad) -> ResidentSpec | None:
    """Return what requests by node ids ask about; None to send subgraphs."""
    if not options.graph:
        return None
    num_nodes, _ = server.graph(options.graph, options.node_type)
    if num_nodes < 1:
        raise ConfigError(f"graph '{options.graph}': it has no node of that type")
    fewest, most = options.id_range
    return ResidentSpec(
        graph=options.graph,
        node_type=options.node_type,
        fanouts=options.fanouts,
        num_nodes=num_nodes,
        min_ids=fewest,
        max_ids=most,
    )


def _source_of(trace: Trace, options: LoadOptions, server: ServerUnderLoad) -> RequestSource:
    """Return what makes the requests of a trace; those of a recording have their payloads."""
    if options.trace is None or not options.payloads or not beside(options.trace).exists():
        return _made_of(trace, options, server)
    payloads, recorded = Payloads.open(beside(options.trace)), recorded_requests(options.trace)
    source = PayloadRequests(payloads, recorded, None)
    rest = tuple(item for item in trace.items if source.payload(item) is None)
    if not rest:
        return source
    return replace(source, made=_made_of(Trace(trace.header, rest), options, server))


def _made_of(trace: Trace, options: LoadOptions, server: ServerUnderLoad) -> RequestSource:
    """Return what makes the requests of a trace, which may be of several graphs of the server."""
    header = trace.header
    if not header.residents:
        asked = {item.model for item in trace.items}
        return _source(asked, header.resident, header.pool, options, server)
    models: dict[str, set[str]] = {}
    for item in trace.items:
        models.setdefault(item.dataset, set()).add(item.model)
    residents = {
        spec.key: _source(models[spec.key], spec, header.pool, options, server)
        for spec in header.residents
        if spec.key in models
    }
    brought = set().union(*(names for key, names in models.items() if key not in residents))
    return MixedRequests(residents, _source(brought, None, header.pool, options, server))


def _source(
    models: Iterable[str],
    resident: ResidentSpec | None,
    pool: PoolSpec,
    options: LoadOptions,
    server: ServerUnderLoad,
) -> RequestSource:
    """Return what makes the requests; raises ConfigError that names all models it cannot ask."""
    if resident is None:
        inputs = _each(models, lambda model: makeable(model, server.inputs(model)))
        data = options.data
        if data is not None and names_own_graphs(data) and pool.datasets == (graph_name(data),):
            return _of_files(read_graphs(data), inputs, pool, server)
        return SubgraphRequests(GraphPool(pool, data), inputs, server.solo_s)
    num_nodes, origin = server.graph(resident.graph, resident.node_type)
    spec = resident
    if spec.num_nodes is None:
        spec = msgspec.structs.replace(spec, num_nodes=num_nodes)
    if num_nodes < (spec.num_nodes or 1):
        raise ConfigError(
            f"graph '{spec.graph}': the trace asks for nodes below {spec.num_nodes}, the server has"
            f" {num_nodes}"
        )

    def estimate_s(model: str, num_ids: int) -> float:
        return server.sample_solo_s(model, spec, num_ids)

    _each(models, lambda model: estimate_s(model, spec.min_ids))
    return ResidentRequests(spec, origin, estimate_s)


def _of_files(
    files: FileGraphs, inputs: Mapping[str, Shapes], pool: PoolSpec, server: ServerUnderLoad
) -> RequestSource:
    """Return what sends the graphs of files: whole, or parts of the only one if it is too large."""
    graph, *others = files.graphs
    too_large = graph.num_nodes > pool.max_nodes or graph.num_edges > pool.max_edges
    if too_large and not others and not graph.is_typed:
        dataset = dataset_of(files.name, graph.num_nodes, graph.edges, files.source)
        return SubgraphRequests(GraphPool(pool, given=dataset), inputs, server.solo_s)
    found = FileRequests(files, inputs, server.solo_s)
    found.check(pool)
    return found


def _models(options: LoadOptions, server: ServerUnderLoad) -> tuple[str, ...]:
    """Return the models that the workload asks; raises ConfigError when there are none."""
    if weights := parse_weights(options.workload):
        return tuple(weights)
    if options.workload != MIX:
        return (options.workload,)
    ready = server.models()
    if not ready:
        raise ConfigError("the server has no model that is ready")
    for name in options.without:
        if name not in ready:
            raise ConfigError(f"without {name}: it is not one of {', '.join(ready)}")
    if not (models := tuple(name for name in ready if name not in options.without)):
        raise ConfigError(f"without {', '.join(options.without)}: no model is left")
    return models


def _each(models: Iterable[str], ask: Callable[[str], FoundT]) -> dict[str, FoundT]:
    """Return what `ask` finds for each model; raises ConfigError that names all it fails for."""
    found: dict[str, FoundT] = {}
    faults: dict[str, str] = {}
    for model in models:
        try:
            found[model] = ask(model)
        except ConfigError as error:
            faults[model] = str(error)
    if faults:
        advice = " ".join(f"--without {model}" for model in faults)
        hint = f"\nto ask the others alone: {advice}" if found else ""
        raise ConfigError("\n".join(faults.values()) + hint)
    return found


def _draw(
    options: LoadOptions,
    models: tuple[str, ...],
    resident: ResidentSpec | None,
    source: RequestSource,
    server: ServerUnderLoad,
) -> Trace:
    tasks = workload_tasks(options.workload, source.refs, options.seed, models)
    header = TraceHeader(
        workload=options.workload,
        seed=options.seed,
        arrivals=options.arrivals,
        profile=options.profile,
        rate_hz=options.rate_hz or 1.0,
        in_flight=options.in_flight,
        pool=options.graphs,
        resident=resident,
        sources=source.sources,
    )
    if options.rho is not None:
        slots = server.slots()
        mean_s = _mean_solo_s(tasks, header, options, source, server)
        header = msgspec.structs.replace(
            header,
            rate_hz=rate_for_rho(options.rho, mean_s, slots),
            rho=options.rho,
            mean_solo_s=mean_s,
            lanes=slots,
        )
    if options.in_flight is not None:
        # What is sent in turn; how often follows from the server.
        trace = build_trace(header, tasks, count=min(len(tasks), options.requests or len(tasks)))
    else:
        trace = build_trace(header, tasks, duration_s=options.duration_s, count=options.requests)
    return _with_askers(trace, options)


def _with_askers(trace: Trace, options: LoadOptions) -> Trace:
    """Return the trace with tenants, priority and target of the options."""
    tenants = parse_shares("tenant", options.tenant)
    if not (tenants or options.priority or options.target_ms is not None):
        return trace
    rng = random.Random(f"tenants {options.seed}")
    names = (
        rng.choices(list(tenants), list(tenants.values()), k=len(trace.items)) if tenants else ()
    )
    target_us = None if options.target_ms is None else max(1, round(options.target_ms * 1000))
    items = (
        msgspec.structs.replace(
            item, tenant=name, priority=options.priority, qos_target_us=target_us
        )
        for item, name in zip(trace.items, names or repeat(""), strict=False)
    )
    return Trace(trace.header, tuple(items))


def _mean_solo_s(
    tasks: tuple[WorkloadTask, ...],
    header: TraceHeader,
    options: LoadOptions,
    source: RequestSource,
    server: ServerUnderLoad,
) -> float:
    """Return the mean solo time: estimated by the server, or measured by sending each task once."""
    if options.end_to_end:
        trace = build_trace(header, tasks, count=len(tasks))
        return statistics.fmean(map(server.lone_s, _encode(trace, source)))
    return statistics.fmean(map(source.solo_s, tasks))


def _shortened(trace: Trace, options: LoadOptions) -> Trace:
    """Return the trace at the speed of `options`, cut to their duration and number of requests.

    The duration counts at the trace's own speed.
    """
    items = trace.items[: options.requests]
    if options.duration_s is not None:
        items = tuple(item for item in items if item.offset_ns < options.duration_s * 1e9)
    found = Trace(trace.header, items)
    return found if options.speed == 1 else found.at_speed(options.speed)


def _encode(
    trace: Trace, source: RequestSource, between: Callable[[], None] = lambda: None
) -> tuple[bytes, ...]:
    """Encode each distinct request once."""
    made: dict[tuple[object, ...], bytes] = {}
    messages = []
    for item in trace.items:
        payload = source.payload(item) if isinstance(source, PayloadRequests) else None
        what = (item.graph, None) if payload is None else (item.index, payload)
        key = (item.model, what, item.qos_target_us, item.tenant, item.priority)
        if key not in made:
            made[key] = source.message(item)
            between()
        messages.append(made[key])
    return tuple(messages)
