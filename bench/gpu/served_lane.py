"""A lane of a GPU in this process, served by packets as the server sends them."""

import mmap
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from bench.gpu.kit import MODELS, Rig
from serve.graphs.features import memory_file
from serve.ipc import messages
from serve.ipc.messages import (
    LoadModel,
    MapTable,
    ModelLoaded,
    RunTask,
    Stop,
    TableMapped,
    TableRef,
    TaskDone,
    TensorRef,
)
from serve.ipc.setup import DevicePlace
from serve.ipc.shared_pool import LANE_WORDS_BYTES
from serve.ipc.stop_word import StopWord
from serve.lane.channel import LaneChannel
from serve.lane.cuda.cuda_queue import Pinned
from serve.lane.cuda.device import CudaDevice, pin
from serve.lane.cuda.hot_rows import HotKeeper
from serve.lane.cuda.place import CudaPlace
from serve.lane.cuda.tables import Tables
from serve.lane.loop import Lane
from serve.lane.place import HeldModel
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec, find
from serve.models.writer import write_model

_POOL_BYTES = 8 << 20
_WARM_UP_BYTES, _REPLAY_BYTES = 64 << 20, 128 << 20
#: Limit of a task: less than the part of the slab that a replayed run would give back.
LIMIT_BYTES = 64 << 20
#: For one answer; the first one captures.
_PATIENCE_S = 300.0


class ServedLane:
    """A lane in a thread of its own, with models on `csr`."""

    def __init__(
        self,
        rig: Rig,
        models: Mapping[str, tuple[ModelSpec, Signature]],
        *,
        pool_bytes: int = _POOL_BYTES,
        replay_bytes: int = _REPLAY_BYTES,
        replay_most: int = 1 << 20,
        by_python: bool = False,
    ) -> None:
        """Load the models by key; with `by_python`, captured runs are Python's as others are.

        Runs are captured up to a sum of nodes and edges of `replay_most`.
        """
        self._pool = mmap.mmap(-1, pool_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        ours.settimeout(_PATIENCE_S)
        self._shared = _device(rig, self._pool, replay_bytes)
        self._other = self._shared.urgency.add_lane()
        #: Tasks asked for, those that Python had, and those of them that it replayed.
        self._asked = self._pythons = self._replayed = 0

        def serve() -> None:
            channel = LaneChannel(theirs)
            word = StopWord(self._pool, pool_bytes - LANE_WORDS_BYTES)
            self._place = CudaPlace(channel, self._pool, self._shared, word)
            self._count(self._place)
            if by_python and self._place._recurring is not None:
                self._place._recurring._loop = None
            Lane(channel, self._place).serve()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        self.hear()
        for key, (spec, signature) in models.items():
            self.say(
                LoadModel(
                    key, spec, signature, "csr", replay_most=replay_most, replay_any_size=True
                )
            )
            found = self.hear()
            while not isinstance(found, ModelLoaded):  # before it, taken memory is told
                if isinstance(found, messages.ModelFailed):
                    raise RuntimeError(found.message)
                found = self.hear()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def _count(self, place: CudaPlace) -> None:
        run, recurring = place.run, place._recurring

        def counted(task: RunTask, model: HeldModel) -> Any:
            self._pythons += 1
            return run(task, model)

        place.run = counted  # type: ignore[method-assign]
        if recurring is None:
            return
        replay = recurring.replay

        def replayed(*arguments: Any) -> TaskDone | None:
            done = replay(*arguments)
            self._replayed += done is not None
            return done

        recurring.replay = replayed  # type: ignore[assignment,method-assign]

    def counts(self) -> dict[str, int]:
        """Return the number of tasks so far by how they were answered."""
        return {
            "without_python": self._asked - self._pythons,
            "by_python": self._replayed,
            "launched": self._pythons - self._replayed,
        }

    def captures(self) -> int:
        """Return the number of captured runs."""
        recurring = self._place._recurring
        return 0 if recurring is None else len(recurring.replays)

    def occupy_another(self, run_ns: int) -> None:
        """Have another lane's run take that long; runs of half of that are urgent."""
        self._shared.urgency.begin(self._other, run_ns)

    def put(self, name: str, value: "np.ndarray[Any, Any]", offset_bytes: int) -> TensorRef:
        """Put a tensor there in the pool."""
        end = offset_bytes + value.nbytes
        self._pool[offset_bytes:end] = value.tobytes()
        return TensorRef(name, value.dtype.name, value.shape, offset_bytes)

    def map(self, table: TableRef) -> None:
        """Have the lane map a resident graph's features, and wait until it reads them in place."""
        self.say(MapTable(table))
        found = self.hear()
        if not isinstance(found, TableMapped) or found.failure:
            raise RuntimeError(f"the lane answers {found}")
        with self._shared.tables.using(table) as mapped:
            mapped.read_in_place()

    def say(self, message: messages.ToLane) -> None:
        """Send a message to the lane."""
        self._channel.send(messages.encode(message))

    def hear(self) -> messages.FromLane:
        """Wait for what the lane says next."""
        return messages.decode_from_lane(self._channel.recv(messages.MAX_PACKET_BYTES))

    def ask(self, task: RunTask) -> None:
        """Have the lane run the task; raises RuntimeError when it answers anything else."""
        self._asked += 1
        self.say(task)
        found = self.hear()
        if not isinstance(found, TaskDone):
            raise RuntimeError(f"the lane answers {found}")

    def cpu_ns(self) -> int:
        """Return the processor time of the lane's thread so far."""
        return time.clock_gettime_ns(self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.say(Stop())
        self._thread.join(60)
        self._channel.close()


def _device(rig: Rig, pool: mmap.mmap, replay_bytes: int) -> CudaDevice:
    """Return the rig's device as lanes share it."""
    place = DevicePlace(
        str(rig.device), rig.slab_bytes, warm_up_bytes=_WARM_UP_BYTES, replay_bytes=replay_bytes
    )
    pinned = None if rig.library is None else Pinned(rig.library)
    if pinned is not None:
        pin(pool, pinned, "bench")
    tables = Tables(pinned)
    keeper = HotKeeper(tables, rig.queue)
    return CudaDevice(rig.device, rig.arena, rig.queue, tables, keeper, place, pinned=pinned)


def table_of(features: "np.ndarray[Any, Any]") -> TableRef:
    """Return the reference to features that a ``FeatureKeeper`` keeps in a file."""
    file = memory_file(features)
    assert file is not None
    return TableRef("g", file.number, file.path, features.dtype.name, features.shape)


def written(
    folder: Path, name: str, features: int, classes: int, width: int, layers: int
) -> tuple[ModelSpec, Signature]:
    """Write a model of the zoo, and say what it is."""
    args: dict[str, Any] = {
        "in_channels": features, "out_channels": classes, "hidden_channels": width,
        "num_layers": layers,
    }  # fmt: skip
    torch.manual_seed(0)
    factory = f"serve.models.zoo:{name}"
    write_model(folder, name, MODELS[name](**args), factory=factory, args=args)
    signature = Signature(
        num_features=features, edge_dim=None, num_outputs=classes, rows="node", accepts_empty=True,
        accepts_edgeless=True, deterministic=True,
    )  # fmt: skip
    return find(folder, name), signature
