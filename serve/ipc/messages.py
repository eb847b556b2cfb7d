"""The messages between main process and lanes: one msgspec struct per packet.

The transport is a SEQPACKET socket pair, so a message arrives whole or not at all. Tensors lie in
the shared pool; messages carry their offsets.
"""

import math
from typing import Annotated, Any

import msgspec

from serve.inputs import DTYPE_BYTES
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec

#: Largest packet of either side; the calibration of a deep model is the longest.
MAX_PACKET_BYTES = 1 << 17


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of every packet."""


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the shared pool, row-major, 64-byte aligned."""

    name: str
    #: dtype name in numpy and torch.
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class LoadModel(Message, frozen=True, tag=True, array_like=True):
    """Load the model under `key`, to be run by `executor`, and warm it up."""

    key: str
    spec: ModelSpec
    signature: Signature
    executor: str = "eager"
    #: Folder compiled for the model, for executors that need one; and the bytes lanes map of it.
    package: str = ""
    package_bytes: int = 0
    #: The key without the executor; models with equal content share their weights.
    content: str = ""
    #: See ``Calibration.replay_most`` and ``Calibration.replay_any_size``.
    replay_most: int = 0
    replay_any_size: bool = False
    #: See ``Calibration.gather_threads``.
    gather_threads: int = 0


class UnloadModel(Message, frozen=True, tag=True, array_like=True):
    """Unload the model; none of its tasks runs or will be launched."""

    key: str


class ProbeModel(Message, frozen=True, tag=True, array_like=True):
    """Load the model, find its signature and calibrate it; for the calibrating process only."""

    spec: ModelSpec
    budget_s: float
    #: Upper bound of memory for a probe graph.
    max_bytes: int
    #: An executor's name, or `auto`.
    executor: str = "auto"
    #: Folder to compile into; when empty, `auto` compiles nothing.
    package: str = ""
    compile_timeout_s: float = 150.0
    #: Find the signature only.
    tries_only: bool = False


class TableRef(msgspec.Struct, frozen=True, array_like=True):
    """The features of a resident graph [rows, columns], row-major, in a file that lanes map."""

    graph: str
    #: Unique among the memory files of the server.
    number: int
    path: str
    #: dtype name: `float32`, `float16` or `uint8`.
    dtype: str
    shape: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[1] * DTYPE_BYTES[self.dtype]


class HotSetRef(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a table for a device to keep a copy of: a file of int64 [count], ascending."""

    #: Unique among the memory files of the server.
    number: int
    path: str
    count: int
    #: Memory for the graph's hot set on each device, constant while the server runs.
    memory_bytes: int


class GatherRef(msgspec.Struct, frozen=True, array_like=True):
    """Features for the lane to gather from a table, as the model's `x`."""

    table: TableRef
    #: Rows of the table, int64 [N].
    ids: TensorRef
    #: Positions of nodes whose features are newer than the table, int64 [P], and these [P, F].
    at: TensorRef
    new: TensorRef

    @property
    def rows(self) -> int:
        """Rows of `x`, N."""
        return self.ids.shape[0]


class MapTable(Message, frozen=True, tag=True, array_like=True):
    """Map the table before a run needs it; for processes whose lanes are threads."""

    table: TableRef
    #: None when the device is to keep no hot set.
    hot: HotSetRef | None = None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a run: its graph, and the place of its output, FP32 [rows, columns]."""

    inputs: tuple[TensorRef, ...]
    output_offset_bytes: int
    output_capacity_bytes: int
    #: None when `x` is among the inputs.
    gather: GatherRef | None = None
    #: Places of the outputs that the model declares, which then hold all of the output.
    outputs: tuple[TensorRef, ...] = ()
    #: Other runs read the same inputs, so that the model must not change them for others.
    shares_inputs: bool = False


class RunTask(Message, frozen=True, tag=True, array_like=True):
    """Run one forward pass over the disjoint union of the parts, and write the output of each."""

    task_id: int
    key: str
    parts: tuple[Part, ...]
    #: Upper bound of memory, apart from inputs and outputs.
    limit_bytes: int
    #: Estimate, 0 when unknown; of lanes that share a device, the shorter run goes first.
    run_ns: int = 0
    #: Of lanes that share a device: stay off the part of it that is reserved for short runs.
    bounded: bool = False


class Stop(Message, frozen=True, tag=True, array_like=True):
    """End the process."""


class LaneStarted(Message, frozen=True, tag=True, array_like=True):
    """The process is up: pinned, with torch imported."""

    pid: int
    #: False when peak memory cannot be measured; the log has the reason.
    measures_memory: bool
    #: Why its models may do what they should not, see ``Confinement``; empty when they may not.
    unconfined: str = ""


class ModelLoaded(Message, frozen=True, tag=True, array_like=True):
    """The model is loaded on this lane."""

    key: str


class ModelFailed(Message, frozen=True, tag=True, array_like=True):
    """The model could not be loaded, probed or calibrated."""

    key: str
    message: str


class ModelProbed(Message, frozen=True, tag=True, array_like=True):
    """The result of a calibration; `calibration` is a ``Calibration`` as msgpack."""

    signature: Signature
    calibration: bytes


class Progress(Message, frozen=True, tag=True, array_like=True):
    """Progress of a calibration, `fraction` from 0 to 1."""

    step: str
    fraction: float


class TableMapped(Message, frozen=True, tag=True, array_like=True):
    """The process has mapped a table, or says why it cannot."""

    number: int
    failure: str = ""


class HotSetHeld(Message, frozen=True, tag=True, array_like=True):
    """The device holds the rows of the hot set, or the process says why it cannot."""

    graph: str
    #: ``HotSetRef.number``.
    number: int
    failure: str = ""


#: A count that fits an integer of the report's database.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class MemoryTaken(Message, frozen=True, tag=True, array_like=True):
    """Memory of the lane's device that is held permanently and was not planned for; for GPUs.

    Sent when it has changed, before the answer to the message that changed it.
    """

    unplanned_bytes: Count


class TakesLess(Message, frozen=True, tag=True, array_like=True):
    """The run that has begun takes no more memory of the device than this; see ``RunTakesLess``."""

    task_id: int
    memory_bytes: Count


class TaskDone(Message, frozen=True, tag=True, array_like=True):
    """The run has ended, and its outputs are in the pool."""

    task_id: int
    #: Output rows of each part; 0 rows and columns where outputs have places of their own.
    rows: tuple[Count, ...]
    columns: Count
    run_ns: Count
    #: Peak of tensor memory during the run, without inputs; None when it was not measured.
    peak_bytes: Count | None
    #: The same, with memory that kernels took for themselves.
    held_bytes: Count | None
    #: Monotonic time at which the run began, from which `run_ns` counts; 0 when that is not known.
    began_ns: Count = 0
    #: Values of each part's outputs that are no finite numbers; empty when all are finite.
    nonfinite: tuple[Count, ...] = ()


class TaskError(Message, frozen=True, tag=True, array_like=True):
    """The run ended without an output; the lane is sound. After out of memory it may run again."""

    task_id: int
    #: A FailReason value.
    reason: str
    message: str


class LaneHolds(Message, frozen=True, tag=True, array_like=True):
    """The memory held between runs, beyond what serving needs, has clearly grown."""

    held_bytes: Count


class SettingsRestored(Message, frozen=True, tag=True, array_like=True):
    """A run or a load changed settings that all models share; they are as before again."""

    key: str
    #: Names of the settings.
    changed: str


class MeasureStep(Message, frozen=True, tag=True, array_like=True):
    """Find what a training step on the graph in the folder needs; for training processes only."""

    spec: ModelSpec
    folder: str
    #: As in the configuration's `training.executor`.
    executor: str = "csr"


class StepMeasured(Message, frozen=True, tag=True, array_like=True):
    """Needs of a training step; see ``serve.core.jobs.types.JobNeeds``."""

    held_bytes: Count
    step_bytes: Count
    step_ns: Count


class EstimateStep(Message, frozen=True, tag=True, array_like=True):
    """Estimate what a training step needs on a graph of a size; for training processes only."""

    spec: ModelSpec
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    #: As in the configuration's `training.executor`.
    executor: str = "csr"


class StepEstimated(Message, frozen=True, tag=True, array_like=True):
    """Needs of a training step, none of which has run on such a graph."""

    #: The graph with its labels; weights, buffers and the optimiser's state.
    graph_bytes: Count
    persistent_bytes: Count
    #: Peak of a step's tensors beyond that, and what a step may take with kernels' own memory.
    peak_bytes: Count
    step_bytes: Count
    #: Kind and widths of the layers; see ``serve.lane.training.stack``.
    kind: str
    widths: tuple[int, ...]
    #: Why it is no exact estimate; empty when it is.
    problem: str


class TrainJob(Message, frozen=True, tag=True, array_like=True):
    """Train the model on the graph in the folder, from the checkpoint there on."""

    spec: ModelSpec
    folder: str
    steps: int
    learning_rate: float
    seed: int
    #: From new weights, not from the model's.
    fresh: bool
    #: What a step may take.
    step_bytes: int
    checkpoint_s: float
    executor: str = "csr"


class JobSteps(Message, frozen=True, tag=True, array_like=True):
    """So many steps are done, with the loss of the last and the mean time since the last word."""

    steps: Count
    loss: float
    step_ns: Count
    #: Steps that the checkpoint holds.
    kept_steps: Count
    #: Processor time of the process.
    cpu_ns: Count


class JobTrained(Message, frozen=True, tag=True, array_like=True):
    """All steps are done, and the weights are in the folder."""

    #: Share of held-out nodes that are classified right.
    accuracy: float


class JobStopped(Message, frozen=True, tag=True, array_like=True):
    """It could not be measured or trained further: `out_of_memory` or `error`, and why."""

    reason: str
    message: str


ToLane = (
    LoadModel
    | UnloadModel
    | ProbeModel
    | MapTable
    | RunTask
    | MeasureStep
    | EstimateStep
    | TrainJob
    | Stop
)
FromLane = (
    LaneStarted
    | ModelLoaded
    | ModelFailed
    | ModelProbed
    | Progress
    | TableMapped
    | HotSetHeld
    | MemoryTaken
    | TakesLess
    | TaskDone
    | TaskError
    | LaneHolds
    | SettingsRestored
    | StepMeasured
    | StepEstimated
    | JobSteps
    | JobTrained
    | JobStopped
)

_encoder = msgspec.msgpack.Encoder()
_to_lane: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToLane)
_from_lane: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromLane)


def encode(message: Message) -> bytes:
    """Encode a message as one packet."""
    return _encoder.encode(message)


def decode_to_lane(packet: bytes) -> ToLane:
    """Decode a packet from the main process; raises msgspec.DecodeError."""
    message: ToLane = _to_lane.decode(packet)
    return message


def decode_from_lane(packet: bytes) -> FromLane:
    """Decode a packet from a lane; raises msgspec.DecodeError."""
    message: FromLane = _from_lane.decode(packet)
    return message
