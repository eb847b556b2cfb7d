"""What the server tells: answers with their QoS facts, models, estimates, itself."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import ParameterValue, Response


@dataclass(frozen=True, slots=True)
class QosFacts:
    """What happened to one request; fields another server does not send keep their defaults."""

    request_uid: str = ""
    #: Accepted until launched, less preparing that nothing else hid.
    queue_us: int = 0
    prepare_us: int = 0
    run_us: int = 0
    group_id: int = -1
    #: Requests planned together with this one, itself included.
    group_size: int = 0
    #: Requests of one model that ran as one with this one, itself included.
    merged: int = 0
    policy: str = ""
    discipline: str = ""
    lane: int = -1
    executor: str = ""
    #: What the server expected the request to take when alone.
    solo_estimate_us: int = 0
    #: The promise: answered within this after arrival.
    qos_target_us: int = 0
    qos_violated: bool = False
    pmc_estimate_bytes: int = 0
    #: None where the lane could not measure it.
    pmc_measured_bytes: int | None = None
    #: For requests by node id: the graph's version that was seen, the seed that was sampled with
    #: (send it again for the same sample), and the sample's size.
    graph: str = ""
    graph_version: int = 0
    seed: int | None = None
    sampled_nodes: int = 0
    sampled_edges: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, ParameterValue]) -> "QosFacts":
        """From the parameters of a response; unknown ones are left out."""
        known: Any = {name: parameters[name] for name in _QOS_FACTS if name in parameters}
        return cls(**known)


#: `fields` takes longer than all the rest of reading an answer's facts.
_QOS_FACTS = tuple(f.name for f in fields(QosFacts))


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request."""

    #: FP32 [N, C]: one row per node, per asked node id, or per graph of a batch.
    output: np.ndarray[Any, np.dtype[np.float32]]
    qos: QosFacts
    model: str
    version: str
    #: As sent, or made by the server.
    request_id: str

    @classmethod
    def of(cls, response: Response) -> "Answer":
        """From the decoded message; the output is copied out of it and may be written to."""
        output = response.outputs["output"].astype(np.float32)
        qos = QosFacts.of(response.parameters)
        return cls(output, qos, response.model, response.version, response.request_id)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One version of one model of the repository."""

    name: str
    version: str
    #: READY, LOADING, UNLOADING or UNAVAILABLE.
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request of a given size would need; times in ns, sizes in bytes."""

    model: str
    version: str
    executor: str
    weights_bytes: int
    input_bytes: int
    #: Peak memory of one forward pass, and what is reserved for it.
    peak_bytes: int
    reserve_bytes: int
    run_ns: int
    #: When alone in the server: median, and an upper quantile.
    solo_ns: int
    solo_high_ns: int
    qos_target_ns: int
    #: Memory for requests, and how many such requests it holds at once.
    budget_bytes: int
    fit_count: int
    #: Empty, or why the estimate is an upper bound only.
    warning: str
    #: Of the graph it is for; of a sample the usual size.
    num_nodes: int
    num_edges: int

    @classmethod
    def of(cls, message: gnnserve_pb2.EstimateResponse) -> "Estimate":
        """Field by field; both have the same names."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A graph that the server holds, in its newest version."""

    name: str
    #: 1 when the server starts, one more with every change.
    version: int
    num_nodes: int
    num_edges: int
    num_features: int
    #: As the server keeps features; they are sent as float32.
    feature_dtype: str
    #: Memory it takes there, features mapped from a file not counted.
    held_bytes: int
    memory_mapped: bool
    #: Where it came from.
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
    """The rows of a repository index."""
    return tuple(ModelFacts(m.name, m.version, m.state, m.reason) for m in message.models)


def report_of(message: gnnserve_pb2.ReportResponse) -> dict[str, Any]:
    """The QoS report in the shape of `gnnserve report --json`."""
    report: dict[str, Any] = _plain(message)
    return report


def _plain(value: Any) -> Any:
    """Messages, maps and lists as dicts and lists, with every field, set or not."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "DESCRIPTOR"):
        return {f.name: _plain(getattr(value, f.name)) for f in value.DESCRIPTOR.fields}
    if isinstance(value, str | int | float):
        return value
    return [_plain(item) for item in value]
