"""What the main process and a lane say to each other: one msgspec struct a packet.

The transport is a SEQPACKET socket pair, so a message arrives whole or not at all. Tensors
never travel here: they lie in the shared pool and messages name their place.
"""

import math
from typing import Annotated, Any

import msgspec

from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec

#: Largest packet either side sends; a calibration of a deep model is the longest.
MAX_PACKET_BYTES = 1 << 17


_ITEM_BYTES = {"float32": 4, "float16": 2, "uint8": 1, "int32": 4, "int64": 8}


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of every packet."""


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the shared pool, row-major, 64-byte aligned."""

    name: str
    #: numpy dtype name: `float32`, `int64`, or `int32` for edges.
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class LoadModel(Message, frozen=True, tag=True, array_like=True):
    """Load the model under `key`, to be run by `executor`, and warm it up."""

    key: str
    spec: ModelSpec
    signature: Signature
    executor: str = "eager"
    #: Folder of what was compiled for it, for executors that need it, and what lanes map of it.
    package: str = ""
    package_bytes: int = 0
    #: The key without the executor: what has the same shares its weights.
    content: str = ""
    #: See ``Calibration.replay_most``.
    replay_most: int = 0


class UnloadModel(Message, frozen=True, tag=True, array_like=True):
    """Forget the model; nothing of it is running or will be launched."""

    key: str


class ProbeModel(Message, frozen=True, tag=True, array_like=True):
    """Load, find the signature and calibrate; for the process that calibrates only."""

    spec: ModelSpec
    budget_s: float
    #: No probe graph may need more than this.
    max_bytes: int
    #: The executor wanted, or `auto`.
    executor: str = "auto"
    #: Folder to compile into; empty: `auto` compiles nothing.
    package: str = ""
    compile_timeout_s: float = 150.0
    #: Find the signature and leave it at that.
    tries_only: bool = False


class TableRef(msgspec.Struct, frozen=True, array_like=True):
    """A resident graph's features [rows, columns], row-major, in a file that lanes map."""

    graph: str
    #: No other table has it.
    number: int
    path: str
    #: numpy dtype name: `float32`, `float16` or `uint8`.
    dtype: str
    shape: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """What each of its rows takes."""
        return self.shape[1] * _ITEM_BYTES[self.dtype]


class HotSetRef(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a table that a device is to keep a copy of, in a file: int64 [count], ascending."""

    #: No other choice of rows has it.
    number: int
    path: str
    count: int
    #: Memory for the graph's hot set on each device, constant while the server runs.
    memory_bytes: int


class GatherRef(msgspec.Struct, frozen=True, array_like=True):
    """Features that the lane gathers from a table itself; the model gets them as `x`."""

    table: TableRef
    #: Rows of the table, int64 [N].
    ids: TensorRef
    #: Positions of nodes with other features than the table's, int64 [P], and these [P, F].
    at: TensorRef
    new: TensorRef

    @property
    def rows(self) -> int:
        """Of `x`."""
        return self.ids.shape[0]


class MapTable(Message, frozen=True, tag=True, array_like=True):
    """Map the table before the first run that needs it; for processes whose lanes are threads."""

    table: TableRef
    #: None: no rows are copied.
    hot: HotSetRef | None = None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One request's share of a run: its graph, and the place for FP32 [rows, columns]."""

    inputs: tuple[TensorRef, ...]
    output_offset_bytes: int
    output_capacity_bytes: int
    #: None: `x` is among the inputs.
    gather: GatherRef | None = None


class RunTask(Message, frozen=True, tag=True, array_like=True):
    """Run one forward pass over the disjoint union of the parts, and write each one's output."""

    task_id: int
    key: str
    parts: tuple[Part, ...]
    #: What the run may take besides inputs and the outputs' places.
    limit_bytes: int
    #: Estimated; lanes that share a device let the short go first. 0: unknown.
    run_ns: int = 0


class Stop(Message, frozen=True, tag=True, array_like=True):
    """End the process."""


class LaneStarted(Message, frozen=True, tag=True, array_like=True):
    """The process runs, is pinned and has torch imported."""

    pid: int
    #: False: measured peaks are not available, with the reason in the log.
    measures_memory: bool


class ModelLoaded(Message, frozen=True, tag=True, array_like=True):
    """The model answers on this lane."""

    key: str


class ModelFailed(Message, frozen=True, tag=True, array_like=True):
    """The model could not be loaded, probed or calibrated."""

    key: str
    message: str


class ModelProbed(Message, frozen=True, tag=True, array_like=True):
    """What calibration found; `calibration` is `serve.estimate`'s struct as msgpack."""

    signature: Signature
    calibration: bytes


class Progress(Message, frozen=True, tag=True, array_like=True):
    """Calibration is this far: `fraction` of 1."""

    step: str
    fraction: float


class TableMapped(Message, frozen=True, tag=True, array_like=True):
    """The process can gather from a table where it lies, or why it cannot."""

    number: int
    failure: str = ""


class HotSetHeld(Message, frozen=True, tag=True, array_like=True):
    """The device has the rows, or why it cannot have them."""

    graph: str
    #: Of the ``HotSetRef``.
    number: int
    failure: str = ""


#: What is counted in a run, in numbers that the report's database takes.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class MemoryTaken(Message, frozen=True, tag=True, array_like=True):
    """What of the lane's device is held for good beside what was planned; for GPUs.

    Said when it has changed, before the answer to what changed it.
    """

    unplanned_bytes: int


class TaskDone(Message, frozen=True, tag=True, array_like=True):
    """The outputs are in their places."""

    task_id: int
    #: Of each part.
    rows: tuple[Count, ...]
    columns: Count
    run_ns: Count
    #: Peak of tensor memory during the run, inputs not included; None: not measured.
    peak_bytes: Count | None
    #: The same with what kernels took besides.
    held_bytes: Count | None


class TaskError(Message, frozen=True, tag=True, array_like=True):
    """The run ended without an output; the lane is fine. Out of memory: it may be run again."""

    task_id: int
    #: A FailReason value.
    reason: str
    message: str


class LaneHolds(Message, frozen=True, tag=True, array_like=True):
    """Clearly more than before is held between runs, beyond what the process needs to serve."""

    held_bytes: int


ToLane = LoadModel | UnloadModel | ProbeModel | MapTable | RunTask | Stop
FromLane = (
    LaneStarted
    | ModelLoaded
    | ModelFailed
    | ModelProbed
    | Progress
    | TableMapped
    | HotSetHeld
    | MemoryTaken
    | TaskDone
    | TaskError
    | LaneHolds
)

_encoder = msgspec.msgpack.Encoder()
_to_lane: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToLane)
_from_lane: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromLane)


def encode(message: Message) -> bytes:
    """One packet."""
    return _encoder.encode(message)


def decode_to_lane(packet: bytes) -> ToLane:
    """A packet the main process sent."""
    message: ToLane = _to_lane.decode(packet)
    return message


def decode_from_lane(packet: bytes) -> FromLane:
    """A packet a lane sent."""
    message: FromLane = _from_lane.decode(packet)
    return message
