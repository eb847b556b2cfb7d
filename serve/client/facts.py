"""What the server tells of itself: models, graphs, estimates, device and report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from serve.inputs import INPUTS
from serve.pb import gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One version of a model in the repository."""

    name: str
    version: str
    #: READY, LOADING, UNLOADING or UNAVAILABLE.
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A training job as it stands."""

    job_id: int
    model: str
    graph: str
    epochs: int
    epochs_done: int
    #: `queued`, `preparing`, `ready`, `running`, `paused`; `done`, `cancelled` or `failed`.
    state: str
    #: Of the last epoch that was told.
    loss: float
    #: Mean time of an epoch lately, standing still not counted.
    epoch_ns: int
    #: Share of held-out nodes that are classified right, after the last epoch.
    accuracy: float
    #: Version of the model that it was published as; 0 before.
    version: int
    #: Why it failed.
    message: str
    #: Memory that it takes while it trains; 0 before that is known.
    reserve_bytes: int

    @classmethod
    def of(cls, message: gnnserve_pb2.JobFacts) -> "JobFacts":
        """Read the message; both use the same names."""
        return cls(**{each.name: getattr(message, each.name) for each in fields(cls)})

    @property
    def ended(self) -> bool:
        """True when nothing follows."""
        return self.state in ("done", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """Which versions of a model answer the requests that name none."""

    #: Percent of the requests by version; empty for the newest version that loads.
    split: dict[str, float] = field(default_factory=dict)
    #: Version of the split that loses its share when it does worse than the others; empty: none.
    canary: str = ""
    #: Version that runs the same requests once more, for nobody; and of how many, in percent.
    shadow: str = ""
    shadow_percent: float = 0.0

    @classmethod
    def of(cls, message: gnnserve_pb2.VersionRules) -> "SplitFacts":
        """Read the message."""
        split = {str(version): message.split[version] for version in sorted(message.split)}
        return cls(
            split, str(message.canary or ""), str(message.shadow or ""), message.shadow_percent
        )


@dataclass(frozen=True, slots=True)
class ShadowFacts:
    """How the runs of a shadow compared with the answers that clients got."""

    compared: int = 0
    #: Of these: off by more than a thousandth of the answer's greatest element.
    different: int = 0
    #: Runs that ended in an error; and requests that were not run again, for want of a pause.
    failed: int = 0
    skipped: int = 0
    #: Largest difference of an element seen, and its share of the answer's greatest element.
    most_absolute: float = 0.0
    most_relative: float = 0.0

    @classmethod
    def of(cls, message: gnnserve_pb2.ShadowCounts) -> "ShadowFacts":
        """Read the message."""
        return cls(**{each.name: getattr(message, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class VersionsFacts:
    """The rules for the versions of one model, and what came of them."""

    model: str
    rules: SplitFacts
    #: The rules before the last change; None when there are none to go back to.
    previous: SplitFacts | None
    #: Version that answers most requests which name none; empty when none can.
    main: str
    #: Versions that are loaded, oldest first.
    served: tuple[str, ...]
    #: Why the last canary was taken back; empty when it was not.
    taken_back: str = ""
    #: Why the rules are not on disk, so that they end with the server; empty when they are.
    not_kept: str = ""
    #: None without a shadow.
    shadow: ShadowFacts | None = None

    @classmethod
    def of(cls, message: gnnserve_pb2.ModelVersions) -> "VersionsFacts":
        """Read the message."""
        return cls(
            message.model,
            SplitFacts.of(message.rules),
            SplitFacts.of(message.previous) if message.HasField("previous") else None,
            str(message.main or ""),
            tuple(map(str, message.served)),
            message.taken_back,
            message.not_kept,
            ShadowFacts.of(message.shadow) if message.HasField("shadow") else None,
        )


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """An input or output of a model."""

    name: str
    #: The protocol's name of its dtype: FP32, INT64, …
    datatype: str
    #: -1 for a size that requests determine.
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelInterface:
    """Inputs and outputs of a model."""

    name: str
    #: Versions that can be asked, oldest first.
    versions: tuple[str, ...]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    #: Further facts as text, such as the executor and the bytes of its weights.
    properties: dict[str, str] = field(default_factory=dict)

    @cached_property
    def optional(self) -> frozenset[str]:
        """Names of the inputs that a request may leave out, as far as the server tells."""
        declared = self.declared_inputs
        if not declared:
            return frozenset(name for name, each in INPUTS.items() if each.optional)
        return frozenset(each["name"] for each in declared if each.get("optional"))

    @cached_property
    def narrowed(self) -> frozenset[str]:
        """Names of the inputs that a request may send as INT32 instead of INT64."""
        declared = self.declared_inputs
        if not declared:
            return frozenset(name for name, each in INPUTS.items() if each.also == "INT32")
        wide = {each.name for each in self.inputs if each.datatype == "INT64"}
        return frozenset(each["name"] for each in declared if each.get("index")) & wide

    @property
    def declared_inputs(self) -> list[dict[str, Any]]:
        """What the model's author declared of each input; empty for a short form."""
        return self._declared("inputs")

    @property
    def declared_outputs(self) -> list[dict[str, Any]]:
        """What the model's author declared of each output; empty for a short form."""
        return self._declared("outputs")

    def _declared(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.properties.get("interface") or "{}").get(
            kind, []
        )
        return found

    @classmethod
    def of(cls, message: pb.ModelMetadataResponse) -> "ModelInterface":
        """Convert the message of ModelMetadata."""
        inputs, outputs = (
            tuple(TensorFacts(each.name, each.datatype, tuple(each.shape)) for each in tensors)
            for tensors in (message.inputs, message.outputs)
        )
        return cls(message.name, tuple(message.versions), inputs, outputs, dict(message.properties))


class JointInterface(ModelInterface):
    """Inputs and outputs of several models together, for one request to all of them."""

    def __init__(self, models: Sequence[ModelInterface]) -> None:
        """Join them; raises ValueError when two take an input as different datatypes."""
        inputs: dict[str, TensorFacts] = {}
        for model in models:
            for each in model.inputs:
                first = inputs.setdefault(each.name, each)
                if first.datatype != each.datatype:
                    raise ValueError(
                        f"input '{each.name}': {first.datatype} and, for model '{model.name}', "
                        f"{each.datatype}; ask these models one by one"
                    )
        outputs = tuple(each for model in models for each in model.outputs)
        names = ", ".join(model.name for model in models)
        super().__init__(names, (), tuple(inputs.values()), outputs)
        self._models = tuple(models)

    @cached_property
    def optional(self) -> frozenset[str]:
        """Names of the inputs that no model requires."""
        return frozenset(name for name in self._names if self._all(name, "optional"))

    @cached_property
    def narrowed(self) -> frozenset[str]:
        """Names of the inputs that every model that has them takes as INT32 too."""
        return frozenset(name for name in self._names if self._all(name, "narrowed"))

    @property
    def _names(self) -> list[str]:
        return [each.name for each in self.inputs]

    def _all(self, name: str, kind: str) -> bool:
        having = [m for m in self._models if any(each.name == name for each in m.inputs)]
        return all(name in getattr(model, kind) for model in having)


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
    #: Of a graph with several types: nodes and edges of each, and dtype and shape of each feature,
    #: whose names are such as `x.author`. The numbers above are then of all types.
    node_types: dict[str, int] = field(default_factory=dict)
    edge_types: dict[str, int] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: gnnserve_pb2.GraphFacts) -> "GraphFacts":
        """Field by field; both have the same names."""
        found: dict[str, Any] = {f.name: getattr(message, f.name) for f in fields(cls)}
        for name in ("node_types", "edge_types", "features"):
            found[name] = dict(sorted(found[name].items()))
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Device and scheduling of the server."""

    version: str
    device: str
    #: Requests that execute at once; the server may have more lanes.
    slots: int
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
