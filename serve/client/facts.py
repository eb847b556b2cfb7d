"""Answers of the server: results with their QoS facts, models, graphs, estimates, the server."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import ParameterValue, Response


@dataclass(frozen=True, slots=True)
class QosFacts:
    """Facts about one request; fields that another server does not send keep their defaults."""

    request_uid: str = ""
    #: Time from acceptance to launch, without the preparation that no other work hid.
    queue_us: int = 0
    prepare_us: int = 0
    run_us: int = 0
    group_id: int = -1
    #: Number of requests planned together, this one included.
    group_size: int = 0
    #: Number of requests of one model that ran as one, this one included.
    merged: int = 0
    policy: str = ""
    discipline: str = ""
    lane: int = -1
    executor: str = ""
    #: Estimated time of the request alone in the server.
    solo_estimate_us: int = 0
    #: The promise: time from arrival to the answer.
    qos_target_us: int = 0
    qos_violated: bool = False
    pmc_estimate_bytes: int = 0
    #: None when the lane could not measure it.
    pmc_measured_bytes: int | None = None
    #: For requests by node id: the version of the graph, the seed of the sample (send it again for
    #: the same sample), and the size of the sample.
    graph: str = ""
    graph_version: int = 0
    seed: int | None = None
    sampled_nodes: int = 0
    sampled_edges: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, ParameterValue]) -> "QosFacts":
        """Return the facts among the parameters of a response."""
        known: Any = {name: parameters[name] for name in _QOS_FACTS if name in parameters}
        return cls(**known)


#: Computed once, as `fields` takes longer than reading an answer's facts.
_QOS_FACTS = tuple(f.name for f in fields(QosFacts))


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request."""

    #: FP32 [N, C]: one row per node, per requested node id, or per graph of a batch.
    output: np.ndarray[Any, np.dtype[np.float32]]
    qos: QosFacts
    model: str
    version: str
    #: As sent, or made by the server.
    request_id: str

    @classmethod
    def of(cls, response: Response) -> "Answer":
        """Convert a decoded message; the output is a writable copy."""
        output = response.outputs["output"].astype(np.float32)
        qos = QosFacts.of(response.parameters)
        return cls(output, qos, response.model, response.version, response.request_id)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One version of a model in the repository."""

    name: str
    version: str
    #: READY, LOADING, UNLOADING or UNAVAILABLE.
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of what a request of a given size needs; times in ns, sizes in bytes."""

    model: str
    version: str
    executor: str
    weights_bytes: int
    input_bytes: int
    #: Peak memory of one forward pass, and what is reserved for it.
    peak_bytes: int
    reserve_bytes: int
    run_ns: int
    #: Time alone in the server: median, and 95th percentile.
    solo_ns: int
    solo_high_ns: int
    qos_target_ns: int
    #: Memory for requests, and the number of such requests that fit in it at once.
    budget_bytes: int
    fit_count: int
    #: Reason why the estimate is only an upper bound; empty when it is not.
    warning: str
    #: Size of the graph; for a sample the typical size.
    num_nodes: int
    num_edges: int

    @classmethod
    def of(cls, message: gnnserve_pb2.EstimateResponse) -> "Estimate":
        """Field by field; both have the same names."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Newest version of a graph that the server holds."""

    name: str
    #: 1 when the server starts; every change adds one.
    version: int
    num_nodes: int
    num_edges: int
    num_features: int
    #: Dtype in which the server stores features; they are sent as float32.
    feature_dtype: str
    #: Memory that it takes in the server, without features mapped from a file.
    held_bytes: int
    memory_mapped: bool
    #: Origin of the graph: a file, a data set or a generator.
    source: str

    @classmethod
    def of(cls, message: gnnserve_pb2.GraphFacts) -> "GraphFacts":
        """Field by field; both have the same names."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Device and scheduling of the server."""

    version: str
    device: str
    lanes: int
    budget_bytes: int
    policy: str
    discipline: str
    window: str
    qos_factor: float
    max_message_bytes: int

    @classmethod
    def of(cls, message: gnnserve_pb2.DescribeResponse) -> "ServerFacts":
        """Field by field; both have the same names."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


def models_of(message: pb.RepositoryIndexResponse) -> tuple[ModelFacts, ...]:
    """Return the rows of a repository index."""
    return tuple(ModelFacts(m.name, m.version, m.state, m.reason) for m in message.models)


def report_of(message: gnnserve_pb2.ReportResponse) -> dict[str, Any]:
    """Return the QoS report in the shape of `gnnserve report --json`."""
    report: dict[str, Any] = _plain(message)
    return report


def _plain(value: Any) -> Any:
    """Convert messages, maps and lists to dicts and lists, with unset fields too."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "DESCRIPTOR"):
        return {f.name: _plain(getattr(value, f.name)) for f in value.DESCRIPTOR.fields}
    if isinstance(value, str | int | float):
        return value
    return [_plain(item) for item in value]
