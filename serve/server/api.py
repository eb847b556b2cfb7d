"""The server as its transports see it; ``engine.Engine`` implements `Inference`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from serve.core.types import Task
from serve.errors import InvariantViolation, ServeError
from serve.estimate.sampling import ExpectedSample
from serve.graphs.typed_updates import TypedChange
from serve.graphs.updates import Change
from serve.interface import Interface
from serve.obs.record import RequestRecord
from serve.server.load_turns import LoadCancellation
from serve.server.regions import RegionPart
from serve.server.split import IdHomes, Split
from serve.server.training.job_facts import JobCall, JobStatus, TrainingEstimate
from serve.server.version_facts import VersionChange, VersionFacts
from serve.typed_names import name_parts, typed_name
from serve.wire.messages import WireOutput, WireRequest, WireTensor

#: In-neighbours sampled at each hop, -1 for all of them; by type of edges, where `*` stands for
#: those not named; or all within the model's reach.
Fanouts = tuple[int, ...] | Mapping[str, tuple[int, ...]] | Literal["all"]


def fanouts_text(fanouts: Fanouts) -> str:
    """Return fan-outs as the request parameter writes them."""
    if isinstance(fanouts, str):
        return fanouts
    if isinstance(fanouts, Mapping):
        return ";".join(f"{name}={_commas(numbers)}" for name, numbers in fanouts.items())
    return _commas(fanouts)


def _commas(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


class Tensor(msgspec.Struct, frozen=True):
    """One input tensor as it came off the wire; `data` is row-major, little-endian."""

    #: Open Inference Protocol name: FP32, INT64, INT32, …
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | RegionPart

    def pieces(self) -> Iterable[bytes | memoryview]:
        """Return `data` in order, in pieces of whole elements; see ``RegionPart.pieces``."""
        return self.data.pieces() if isinstance(self.data, RegionPart) else (self.data,)


class InferCall(msgspec.Struct, frozen=True):
    """A decoded, structurally valid request; its content is checked when prepared."""

    model: str
    #: Version of the model; empty for the one that the model's rules say.
    version: str
    tensors: dict[str, Tensor]
    #: `time.monotonic_ns()` when the transport got the request.
    arrived_ns: int
    client_id: str = ""
    #: Replaces the target derived from the estimate.
    qos_target_ns: int | None = None
    #: The smaller of the gRPC deadline and the `timeout` parameter, from arrival.
    timeout_ns: int | None = None
    priority: int = 0
    tenant: str = ""
    seed: int | None = None
    #: Resident graph asked for, with `node_ids` among the tensors.
    graph: str | None = None
    #: Place for the output; None to have it in the answer.
    output_place: RegionPart | None = None
    #: Outputs that the client asked for; empty for all.
    wanted: tuple[str, ...] = ()
    #: None for the model's own.
    fanouts: Fanouts | None = None
    #: Of a request that names no version: the one that was chosen, whose inputs it was checked by.
    chosen: str = ""
    #: The client's span, see ``trace_ids``; empty for none.
    trace_parent: str = ""
    #: Servers that have passed it on to this one.
    hops: int = 0
    #: Time from its arrival at a front until its arrival here; 0 where none tells it.
    front_ns: int = 0
    #: It may be passed on to another server, so ``BetterElsewhere`` may be raised.
    movable: bool = False
    #: Nodes that live on other servers may be answered there, and the request be split for it.
    by_home: bool = False
    #: How it was split; None for one that runs as a whole.
    split: Split | None = None
    #: It is a part of a request of another server, which keeps the record of the whole.
    is_part: bool = False

    def payload(self) -> WireRequest:
        """Return model, tensors and wanted outputs as a message has them, without parameters."""
        return WireRequest(
            model=self.model,
            version="",
            request_id="",
            parameters={},
            inputs=[
                WireTensor(name, one.datatype, one.shape, {}) for name, one in self.tensors.items()
            ],
            outputs=[WireOutput(name, {}) for name in self.wanted],
            # A piece of shared memory is overwritten by the next one.
            raws=[memoryview(b"".join(map(bytes, one.pieces()))) for one in self.tensors.values()],
        )

    @property
    def asked(self) -> tuple[str, Tensor]:
        """The node ids of a resident graph, and their type; empty in a graph with one."""
        for name, tensor in self.tensors.items():
            base, of = name_parts(name)
            if base == NODE_IDS.name:
                return of, tensor
        raise InvariantViolation(f"a request for graph '{self.graph}' has no node ids")


class BetterElsewhere(Exception):
    """A movable request was not taken in: this server cannot hold it, or would answer late."""

    def __init__(self, task: Task | None = None) -> None:
        """`task` is what it would have been; None for one whose model or graph is not here."""
        super().__init__(task)
        self.task = task


class Room(NamedTuple):
    """What a server has for requests, and how many it has."""

    #: Accepted requests without an answer.
    unanswered: int
    #: Requests that execute at once.
    slots: int
    #: Memory for the tasks of its largest device.
    budget_bytes: int
    #: Part that it holds of graphs that are shared out; None for none.
    part: int | None = None


class Moving(Protocol):
    """Whether requests had better be on another server, as a front decides by what is here."""

    #: Says which movable tasks had better be there; None: there is no other. It is called under the
    #: driver's lock.
    moves: Callable[[Task, Room], bool] | None

    @property
    def room(self) -> Room:
        """What the server has for requests now. Any thread."""
        ...

    def homes(self, call: InferCall) -> IdHomes | None:
        """Return where the nodes of a call live; None where it cannot be split by that.

        Any thread. Raises UnknownName, NotReady, Mismatch or InvalidInput.
        """
        ...


#: Name of the output of a model that does not declare its outputs: FP32 [rows, columns].
OUTPUT = "output"


class InferResult(msgspec.Struct, frozen=True):
    """The answer: outputs by name, and the record of the request."""

    outputs: dict[str, np.ndarray[Any, np.dtype[Any]]]
    record: RequestRecord
    #: Version of the graph that was sampled where it is shared out, see ``graph_state``; else "".
    graph_state: str = ""

    @property
    def output(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The first output, of most models the only one."""
        return next(iter(self.outputs.values()))


class Ticket(Protocol):
    """A request on its way, accepted or refused."""

    def result(self) -> InferResult:
        """Prepare when told to, wait for the answer and return it, or raise a ServeError.

        Call it exactly once, from the thread that serves the request.
        """
        ...

    def cancel(self) -> None:
        """Cancel the request: its client went away. Any thread, any time, any number of times."""
        ...


class JointTicket(Protocol):
    """A joint request on its way: one task for each of its models."""

    @property
    def joint_uid(self) -> str:
        """Id of the request, common to the records of all its tasks."""
        ...

    def results(self) -> "list[InferResult | Exception]":
        """Prepare when told to, and return what each model's ticket would return or raise.

        In the order of the calls. Call it exactly once, from the thread that serves the request.
        """
        ...

    def cancel(self) -> None:
        """Cancel all its tasks; see ``Ticket``."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, Open Inference Protocol datatype and shape, -1 for a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


#: Input of models that fit a resident graph: with the parameter `graph` it replaces all others.
NODE_IDS = TensorSpec("node_ids", "INT64", (-1,), optional=True)


def node_ids_of(node_type: str) -> TensorSpec:
    """Return the input for ids of a node type; empty in a graph with one."""
    return replace(NODE_IDS, name=typed_name(NODE_IDS.name, node_type))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One version of one model in the repository."""

    name: str
    version: str
    #: READY, LOADING, UNLOADING or UNAVAILABLE.
    state: str
    #: Why it is not READY, or a note on it (a fallback of the executor).
    reason: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    #: What the model declares; None for the short form of inputs.
    interface: Interface | None = None
    #: What a row of the output belongs to; None when that is unknown or declared.
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
    #: Dtype that features are stored in: float32, float16 or uint8.
    feature_dtype: str
    #: Memory of the device's budget that it takes; less than its size where features are mapped.
    held_bytes: int
    memory_mapped: bool
    #: File or dataset it was read from.
    source: str
    #: Nodes and edges by type, of a graph with several types; features of all types are then 0.
    node_types: Mapping[str, int] = field(default_factory=dict)
    edge_types: Mapping[str, int] = field(default_factory=dict)
    #: Dtype and shape of each feature by its name, such as `x.author`.
    features: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleEstimate:
    """The expected size of the sample for a request by node id."""

    graph: str
    num_ids: int
    #: In-neighbours sampled at each hop, -1 for all; of several types of edges, for each.
    fanouts: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    size: ExpectedSample


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """The memory and time of one request, as `gnnserve estimate` and the estimate RPC show them."""

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
    #: Memory for tasks on all devices, and the number of such requests that fit at once.
    budget_bytes: int
    fit_count: int
    #: Parts of the reservation: place of the output, and memory of kernels beside tensors.
    output_bytes: int = 0
    workspace_bytes: int = 0
    #: Layer and operation at the peak; empty when unknown.
    peak_where: str = ""
    #: Why the estimate is only an upper bound; empty when it is more than that.
    warning: str = ""
    #: Size of the sample for a request by node id; nodes and edges are then those of a usual one.
    sample: SampleEstimate | None = None


class Training(Protocol):
    """Training beside requests, as transports see it. Any thread."""

    def submit(self, call: JobCall) -> JobStatus:
        """Have a model trained, and return the job.

        Raises UnknownName, NotReady, InvalidInput, Mismatch for a server, model or graph that
        cannot train, and QueueFull.
        """
        ...

    def estimate(self, model: str, num_nodes: int, num_edges: int) -> TrainingEstimate:
        """Estimate a training step of the model on a graph of that size.

        Raises UnknownName, NotReady, Mismatch and ModelError.
        """
        ...

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return all jobs, oldest first, those that ended lately among them."""
        ...

    def watch(self, job_id: int, seen: JobStatus | None = None) -> JobStatus:
        """Return the job once its epochs or state are not those seen, or after a few seconds.

        Raises UnknownName.
        """
        ...

    def cancel(self, job_id: int) -> JobStatus:
        """End a job, unless it has ended or its version is there, and return it.

        A job with a version then goes on to be served; of one that is cancelled nothing is
        published. Raises UnknownName, and NotReady while that is not known.
        """
        ...


class Inference(Protocol):
    """The engine as transports see it. Every method may be called from any thread."""

    training: Training
    moving: Moving

    @property
    def serving(self) -> bool:
        """True while it serves, does not drain and has a lane that can take a task."""
        ...

    @property
    def ready(self) -> bool:
        """True while it is `serving` and has the models that ``server.ready_when`` asks for."""
        ...

    @property
    def live(self) -> bool:
        """True while the process works at all."""
        ...

    def submit(self, call: InferCall) -> Ticket:
        """Estimate and admit a request; raises UnknownName, NotReady or InvalidInput.

        A movable one may raise BetterElsewhere. Every other end of the request comes from
        ``Ticket.result()``.
        """
        ...

    def answered(self, call: InferCall, result: InferResult) -> None:
        """Note that the call was answered; its model's shadow may run it again. Never waits."""
        ...

    def submit_jointly(self, calls: Sequence[InferCall]) -> JointTicket:
        """Estimate and admit calls for several models, all or none; see ``submit``.

        Their tensors of one name hold the same bytes, which are staged once where models take them
        alike. A refusal by the scheduler, which every task then ends in, names the model.
        """
        ...

    def refused(
        self,
        model: str,
        version: str,
        client_id: str,
        arrived_ns: int,
        error: ServeError,
        trace_parent: str = "",
    ) -> None:
        """Keep a record of a request that ended in `error` before or in ``submit``."""
        ...

    def models(self) -> tuple[ModelInfo, ...]:
        """Read the repository, and return every model and version in it, loaded or not."""
        ...

    def served(self) -> tuple[ModelInfo, ...]:
        """Return every version that is loaded."""
        ...

    def model(self, name: str, version: str = "", request_id: str | None = None) -> ModelInfo:
        """Return a loaded version of a model; raises UnknownName, NotReady.

        Without a version that is the one for a request of that id; empty for one without an id,
        None for the version that answers most requests.
        """
        ...

    def versions(self, name: str = "") -> tuple[VersionFacts, ...]:
        """Return the rules for versions of one model, or of all that are loaded.

        Raises UnknownName.
        """
        ...

    def change_versions(self, name: str, change: VersionChange) -> VersionFacts:
        """Change which versions of a model answer requests that name none; return the new rules.

        Raises UnknownName, NotReady for a version that is not loaded, InvalidInput, Mismatch.
        """
        ...

    def load(self, name: str, cancellation: LoadCancellation | None = None) -> None:
        """Load or reload a model from the repository; returns when it is READY. Idempotent.

        Raises RequestCancelled when it was cancelled before a version of it serves.
        """
        ...

    def unload(self, name: str, cancellation: LoadCancellation | None = None) -> None:
        """Stop serving the model once its accepted requests are answered. Idempotent.

        Raises RequestCancelled when it was cancelled before its turn.
        """
        ...

    def estimate(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        """Return the memory and time of one request of that size; raises a ServeError."""
        ...

    def estimate_sample(
        self,
        name: str,
        version: str,
        graph: str,
        num_ids: int,
        fanouts: Fanouts | None = None,
        node_type: str | None = None,
    ) -> ModelEstimate:
        """Return the memory and time of one request by `num_ids` node ids of a resident graph.

        `node_type` is the type of the ids, None for the only one that the model can be asked about.
        The time is that of a usual sample, the memory that of a large one. Raises a ServeError.
        """
        ...

    def graphs(self, name: str = "") -> tuple[GraphInfo, ...]:
        """Return all resident graphs, or the one called `name`; raises UnknownName."""
        ...

    def update_graph(
        self, name: str, change: Change | TypedChange, if_version: int | None
    ) -> GraphInfo:
        """Change a resident graph as a whole or not at all, and return it as it is then.

        Raises UnknownName, InvalidInput, Mismatch when `if_version` is not the newest version, and
        TooBig when the graph would take more memory than the device has.
        """
        ...
