"""Plan of a run, made before it starts: a trace and the bytes of each request."""

import statistics
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from loadgen.inputs import Shapes, make_tensors, makeable, takes_edges
from loadgen.options import LoadOptions
from serve.errors import ConfigError
from serve.graphs.pool import GraphPool
from serve.wire.messages import ParameterValue, encode_request
from serve.workload import (
    MIX,
    Trace,
    TraceHeader,
    TraceItem,
    WorkloadTask,
    build_trace,
    rate_for_rho,
    workload_tasks,
)

_Inputs = Mapping[str, Shapes]


class ServerUnderLoad(Protocol):
    """Facts about the server that a plan needs."""

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are ready."""
        ...

    def inputs(self, model: str) -> Shapes:
        """Return names and shapes of the inputs of `model`."""
        ...

    def lanes(self) -> int:
        """Return the number of lanes."""
        ...

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        """Return the estimated solo time of a request, in seconds."""
        ...

    def lone_s(self, message: bytes) -> float:
        """Send one encoded request to an idle server; returns its latency in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests and their send times."""

    trace: Trace
    #: Serialized requests, one per item of the trace; equal requests share one object.
    messages: tuple[bytes, ...]


def make_plan(options: LoadOptions, server: ServerUnderLoad) -> LoadPlan:
    """Read or draw the trace of `options`, save it if wanted, and encode its requests.

    Raises ConfigError for options, traces or graphs that do not fit together.
    """
    options.check()
    if options.trace is None:
        inputs = _inputs(_models(options, server), server)
        pool = GraphPool(options.pool, options.data)
        trace = _draw(options, inputs, pool, server)
    else:
        trace = _shortened(Trace.load(options.trace), options)
        inputs = _inputs({item.model for item in trace.items}, server)
        pool = GraphPool(trace.header.pool, options.data)
    if not trace.items:
        raise ConfigError("no request falls into this run: make it longer or the rate higher")
    if options.save_trace is not None:
        trace.save(options.save_trace)
    return LoadPlan(trace, _encode(trace, inputs, pool))


def _models(options: LoadOptions, server: ServerUnderLoad) -> tuple[str, ...]:
    """Return the models that the workload asks; raises ConfigError when there are none."""
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


def _inputs(models: Iterable[str], server: ServerUnderLoad) -> _Inputs:
    """Return the inputs to send to each model; raises ConfigError that names all it cannot make."""
    found: dict[str, Shapes] = {}
    faults: dict[str, str] = {}
    for model in models:
        try:
            found[model] = makeable(model, server.inputs(model))
        except ConfigError as error:
            faults[model] = str(error)
    if faults:
        advice = " ".join(f"--without {model}" for model in faults)
        hint = f"\nto ask the others alone: {advice}" if found else ""
        raise ConfigError("\n".join(faults.values()) + hint)
    return found


def _draw(options: LoadOptions, inputs: _Inputs, pool: GraphPool, server: ServerUnderLoad) -> Trace:
    tasks = workload_tasks(options.workload, pool.refs, options.seed, tuple(inputs))
    header = TraceHeader(
        workload=options.workload,
        seed=options.seed,
        arrivals=options.arrivals,
        rate_hz=options.rate_hz or 1.0,
        pool=options.pool,
        sources=pool.sources,
    )
    if options.rho is not None:
        lanes = server.lanes()
        mean_s = _mean_solo_s(tasks, header, options, inputs, pool, server)
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
    inputs: _Inputs,
    pool: GraphPool,
    server: ServerUnderLoad,
) -> float:
    """Return the mean solo time: estimated by the server, or measured by sending each task once."""
    if options.end_to_end:
        trace = build_trace(header, tasks, count=len(tasks))
        return statistics.fmean(map(server.lone_s, _encode(trace, inputs, pool)))
    return statistics.fmean(
        server.solo_s(
            task.model,
            task.graph.num_nodes,
            task.graph.num_edges if takes_edges(inputs[task.model]) else 0,
        )
        for task in tasks
    )


def _shortened(trace: Trace, options: LoadOptions) -> Trace:
    """Return the trace cut to the duration and number of requests of `options`."""
    items = trace.items[: options.requests]
    if options.duration_s is not None:
        items = tuple(item for item in items if item.offset_ns < options.duration_s * 1e9)
    return Trace(trace.header, items)


def _encode(trace: Trace, inputs: _Inputs, pool: GraphPool) -> tuple[bytes, ...]:
    """Encode each distinct request once."""
    made: dict[tuple[object, ...], bytes] = {}
    messages = []
    for item in trace.items:
        key = (item.model, item.graph, item.qos_target_us)
        if key not in made:
            made[key] = _message(item, pool, inputs[item.model])
        messages.append(made[key])
    return tuple(messages)


def _message(item: TraceItem, pool: GraphPool, shapes: Shapes) -> bytes:
    """Encode one request: its graph, random features seeded by the graph, and its target if set."""
    rng = np.random.default_rng([pool.spec.seed, zlib.crc32(item.dataset.encode()), item.index])
    tensors = make_tensors(shapes, item.num_nodes, pool.edges(item.graph), rng)
    parameters: dict[str, ParameterValue] = {}
    if item.qos_target_us is not None:
        parameters["qos_target_us"] = item.qos_target_us
    return encode_request(item.model, tensors, parameters=parameters)
