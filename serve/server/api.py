"""What the runtime offers to the transports above it; ``engine.Engine`` implements it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from serve.errors import ServeError
from serve.estimate.sampling import ExpectedSample
from serve.graphs.updates import Change
from serve.obs.record import RequestRecord
from serve.server.regions import RegionPart


class Tensor(msgspec.Struct, frozen=True):
    """One input tensor as it came off the wire; `data` is row-major, little-endian."""

    #: Open Inference Protocol name: FP32, INT64, INT32, …
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | RegionPart

    def pieces(self) -> Iterable[bytes | memoryview]:
        """`data` in order, in pieces of whole elements; see ``RegionPart.pieces``."""
        return self.data.pieces() if isinstance(self.data, RegionPart) else (self.data,)


class InferCall(msgspec.Struct, frozen=True):
    """A decoded, structurally valid request; its content is checked when prepared."""

    model: str
    #: Empty: the newest.
    version: str
    tensors: dict[str, Tensor]
    #: `time.monotonic_ns()` when the transport got the request.
    arrived_ns: int
    client_id: str = ""
    #: Overrides the target derived from the estimate.
    qos_target_ns: int | None = None
    #: The smaller of the gRPC deadline and the `timeout` parameter, from arrival.
    timeout_ns: int | None = None
    priority: int = 0
    tenant: str = ""
    seed: int | None = None
    #: Resident graph asked for, with `node_ids` among the tensors.
    graph: str | None = None
    #: Where the client wants its output; None: in the answer.
    output_place: RegionPart | None = None
    #: In-neighbours drawn at each hop; `all`: as if the whole graph were there. None: the model's.
    fanouts: tuple[int, ...] | Literal["all"] | None = None


class InferResult(msgspec.Struct, frozen=True):
    """The answer: FP32 [rows, classes] and what happened on the way."""

    output: np.ndarray[Any, np.dtype[np.float32]]
    record: RequestRecord


class Ticket(Protocol):
    """An accepted or refused request on its way."""

    def result(self) -> InferResult:
        """Prepare when told to, wait for the answer and return it, or raise a ServeError.

        Must be called exactly once, by the thread that serves the request.
        """
        ...

    def cancel(self) -> None:
        """The client went away. Any thread, any time, any number of times."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, Open Inference Protocol datatype and shape, -1 for a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


#: Taken by models that fit a resident graph, with the parameter `graph`, instead of all others.
NODE_IDS = TensorSpec("node_ids", "INT64", (-1,), optional=True)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One version of one model in the repository."""

    name: str
    version: str
    #: READY, LOADING, UNLOADING or UNAVAILABLE.
    state: str
    #: Why it is not READY, or what is worth knowing of it (executor fallback).
    reason: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    #: What the output has a row for; None: unknown.
    rows: Literal["node", "graph"] | None = None
    executor: str = ""
    weights_bytes: int = 0
    qos_factor: float = 2.0
    #: Other facts for ModelMetadata.properties and ModelConfig.parameters.
    properties: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """One resident graph in its newest version."""

    name: str
    version: int
    num_nodes: int
    num_edges: int
    num_features: int
    #: As features are kept: float32, float16 or uint8.
    feature_dtype: str
    #: Memory it takes of the device's budget; less than its size where features are mapped.
    held_bytes: int
    memory_mapped: bool
    #: Where it came from.
    source: str


@dataclass(frozen=True, slots=True)
class SampleEstimate:
    """How large the sample for a request by node id is expected to be."""

    graph: str
    num_ids: int
    #: Per hop; -1 for all in-neighbours.
    fanouts: tuple[int, ...]
    size: ExpectedSample


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """What `gnnserve estimate` and the estimate RPC show."""

    model: str
    version: str
    executor: str
    num_nodes: int
    num_edges: int
    weights_bytes: int
    input_bytes: int
    peak_bytes: int
    reserve_bytes: int
    run_ns: int
    solo_ns: int
    #: Upper quantile of the solo time.
    solo_high_ns: int
    qos_target_ns: int
    #: Device memory for tasks, and how many such requests fit at once.
    budget_bytes: int
    fit_count: int
    #: Held with the reservation: the answer's place, and what kernels take beside tensors.
    output_bytes: int = 0
    workspace_bytes: int = 0
    #: Layer and operation running at the peak; empty when unknown.
    peak_where: str = ""
    #: Empty, or why the estimate is an upper bound only.
    warning: str = ""
    #: For a request by node id, whose nodes and edges are those of a usual sample.
    sample: SampleEstimate | None = None


class Inference(Protocol):
    """The engine as transports see it. Every method may be called from any thread."""

    @property
    def ready(self) -> bool:
        """Warmed up, not draining, at least one lane alive."""
        ...

    @property
    def live(self) -> bool:
        """The process works at all."""
        ...

    def submit(self, call: InferCall) -> Ticket:
        """Estimate and admit; raises UnknownName, NotReady or InvalidInput.

        Every other end of the request comes from ``Ticket.result()``.
        """
        ...

    def refused(
        self, model: str, version: str, client_id: str, arrived_ns: int, error: ServeError
    ) -> None:
        """Keep a record of a request that ended in `error` before or in ``submit``."""
        ...

    def models(self) -> tuple[ModelInfo, ...]:
        """Every model and version of the repository, which is read for it, loaded or not."""
        ...

    def served(self) -> tuple[ModelInfo, ...]:
        """Every version that is loaded."""
        ...

    def model(self, name: str, version: str = "") -> ModelInfo:
        """One loaded model, newest version unless given. Raises UnknownName or NotReady."""
        ...

    def load(self, name: str) -> None:
        """Load or reload from the repository; returns when READY. Idempotent."""
        ...

    def unload(self, name: str) -> None:
        """Stop serving the model once its accepted requests are answered. Idempotent."""
        ...

    def estimate(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        """What one request of that size would need."""
        ...

    def estimate_sample(
        self,
        name: str,
        version: str,
        graph: str,
        num_ids: int,
        fanouts: tuple[int, ...] | Literal["all"] | None = None,
    ) -> ModelEstimate:
        """What one request by so many ids of a resident graph would need; raises ServeErrors.

        Time is for a usual sample, memory for a large one.
        """
        ...

    def graphs(self, name: str = "") -> tuple[GraphInfo, ...]:
        """The resident graphs, or the one of that name. Raises UnknownName."""
        ...

    def update_graph(self, name: str, change: Change, if_version: int | None) -> GraphInfo:
        """Change a resident graph, as a whole or not at all; what it is then.

        Raises UnknownName, InvalidInput, Mismatch when `if_version` is not the newest, and TooBig
        when it would take more than the device has.
        """
        ...
