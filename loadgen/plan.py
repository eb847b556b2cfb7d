"""Everything a run sends, made before it starts: a trace and each request's bytes."""

import statistics
import zlib
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from loadgen.options import LoadOptions
from serve.errors import ConfigError
from serve.graphs.pool import GraphPool
from serve.wire import ParameterValue, encode_request
from serve.workload import (
    Trace,
    TraceHeader,
    TraceItem,
    WorkloadTask,
    build_trace,
    rate_for_rho,
    workload_tasks,
)


class Server(Protocol):
    """What a plan asks of the server."""

    def lanes(self) -> int:
        """Execution slots."""
        ...

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        """Estimated time of one request when alone, in seconds."""
        ...

    def lone_s(self, message: bytes) -> float:
        """Time of one encoded request sent by itself, as seen from here, in seconds."""
        ...

    def num_features(self, model: str) -> int:
        """F, the features per node that `model` takes."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send and when."""

    trace: Trace
    #: Serialized requests, one per item; equal requests share one object.
    messages: tuple[bytes, ...]


def make_plan(options: LoadOptions, server: Server) -> Plan:
    """Read or draw the trace of `options`, save it if asked to, and encode its requests.

    Raises ConfigError for options, traces or graphs that do not fit together.
    """
    options.check()
    if options.trace is None:
        pool = GraphPool(options.pool, options.data)
        trace = _draw(options, pool, server)
    else:
        trace = _shortened(Trace.load(options.trace), options)
        pool = GraphPool(trace.header.pool, options.data)
    if not trace.items:
        raise ConfigError("no request falls into this run: make it longer or the rate higher")
    if options.save_trace is not None:
        trace.save(options.save_trace)
    return Plan(trace, _encode(trace, pool, server))


def _draw(options: LoadOptions, pool: GraphPool, server: Server) -> Trace:
    tasks = workload_tasks(options.workload, pool.refs, options.seed)
    header = TraceHeader(
        workload=options.workload,
        seed=options.seed,
        arrivals=options.arrivals,
        rate_hz=options.rate_hz or 1.0,
        pool=options.pool,
        sources=pool.sources,
    )
    if options.rho is not None:
        lanes, mean_s = server.lanes(), _mean_solo_s(tasks, header, options, pool, server)
        header = msgspec.structs.replace(
            header,
            rate_hz=rate_for_rho(options.rho, mean_s, lanes),
            rho=options.rho,
            mean_solo_s=mean_s,
            lanes=lanes,
        )
    return build_trace(header, tasks, duration_s=options.duration_s, count=options.requests)


def _mean_solo_s(
    tasks: tuple[WorkloadTask, ...],
    header: TraceHeader,
    options: LoadOptions,
    pool: GraphPool,
    server: Server,
) -> float:
    """By the server's estimates, or measured: each task is sent once, by itself."""
    if options.end_to_end:
        trace = build_trace(header, tasks, count=len(tasks))
        return statistics.fmean(map(server.lone_s, _encode(trace, pool, server)))
    return statistics.fmean(
        server.solo_s(task.model, task.graph.num_nodes, task.graph.num_edges) for task in tasks
    )


def _shortened(trace: Trace, options: LoadOptions) -> Trace:
    """The trace up to the given duration and number of requests."""
    items = trace.items[: options.requests]
    if options.duration_s is not None:
        items = tuple(item for item in items if item.offset_ns < options.duration_s * 1e9)
    return Trace(trace.header, items)


def _encode(trace: Trace, pool: GraphPool, server: Server) -> tuple[bytes, ...]:
    """Encode each distinct request once."""
    features = {model: server.num_features(model) for model in {i.model for i in trace.items}}
    made: dict[tuple[object, ...], bytes] = {}
    messages = []
    for item in trace.items:
        key = (item.model, item.graph, item.qos_target_us)
        if key not in made:
            made[key] = _message(item, pool, features[item.model])
        messages.append(made[key])
    return tuple(messages)


def _message(item: TraceItem, pool: GraphPool, num_features: int) -> bytes:
    """One request: the graph, random features that belong to it, and its target if it has one."""
    edges = pool.edges(item.graph)
    rng = np.random.default_rng([pool.spec.seed, zlib.crc32(item.dataset.encode()), item.index])
    x = rng.standard_normal((item.num_nodes, num_features), dtype=np.float32)
    parameters: dict[str, ParameterValue] = {}
    if item.qos_target_us is not None:
        parameters["qos_target_us"] = item.qos_target_us
    return encode_request(item.model, {"x": x, "edge_index": edges}, parameters=parameters)
