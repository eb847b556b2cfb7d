"""A lane of a GPU in this process, served by packets as the server sends them."""

import mmap
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from bench.gpu.kit import Rig
from serve.ipc import messages
from serve.ipc.messages import LoadModel, ModelLoaded, Part, RunTask, Stop, TaskDone, TensorRef
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
from serve.models import zoo
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec, find
from serve.models.writer import write_model

_POOL_BYTES = 8 << 20
#: The limit is less than the part of the slab that a replayed run would give back.
_LIMIT_BYTES, _WARM_UP_BYTES, _REPLAY_BYTES = 64 << 20, 64 << 20, 128 << 20
_KEY = "m"
#: For one answer; the first one captures.
_PATIENCE_S = 300.0


class ServedLane:
    """A lane in a thread of its own, with one model and one request in its pool."""

    def __init__(
        self,
        rig: Rig,
        spec: ModelSpec,
        signature: Signature,
        inputs: Mapping[str, torch.Tensor],
        *,
        replays: bool,
        by_python: bool,
    ) -> None:
        """Load the model on `csr`; with `by_python`, captured runs are Python's as others are."""
        self._pool = mmap.mmap(-1, _POOL_BYTES)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        ours.settimeout(_PATIENCE_S)
        device = _device(rig, self._pool)
        num_outputs, num_nodes = signature.num_outputs, inputs["x"].shape[0]
        self._packet = messages.encode(self._put(inputs, 4 * num_nodes * num_outputs))
        loading = LoadModel(
            _KEY, spec, signature, "csr", replay_most=1 << 20 if replays else 0,
            replay_any_size=True,
        )  # fmt: skip

        def serve() -> None:
            channel = LaneChannel(theirs)
            word = StopWord(self._pool, _POOL_BYTES - LANE_WORDS_BYTES)
            place = CudaPlace(channel, self._pool, device, word)
            if by_python and place._recurring is not None:
                place._recurring._loop = None
            Lane(channel, place).serve()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        self._receive()
        ours.send(messages.encode(loading))
        found = self._receive()
        while not isinstance(found, ModelLoaded):  # before it, the memory that was taken is told
            if isinstance(found, messages.ModelFailed):
                raise RuntimeError(found.message)
            found = self._receive()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def _put(self, inputs: Mapping[str, torch.Tensor], output_bytes: int) -> RunTask:
        refs, start = [], 0
        for name, tensor in inputs.items():
            content = tensor.numpy().tobytes()
            self._pool[start : start + len(content)] = content
            dtype = str(tensor.dtype).removeprefix("torch.")
            refs.append(TensorRef(name, dtype, tuple(tensor.shape), start))
            start += -(-len(content) // 64) * 64
        return RunTask(1, _KEY, (Part(tuple(refs), start, output_bytes),), _LIMIT_BYTES)

    def _receive(self) -> messages.FromLane:
        return messages.decode_from_lane(self._channel.recv(messages.MAX_PACKET_BYTES))

    def ask(self) -> None:
        """Have the lane run the request; raises RuntimeError when it answers anything else."""
        self._channel.send(self._packet)
        found = self._receive()
        if not isinstance(found, TaskDone):
            raise RuntimeError(f"the lane answers {found}")

    def cpu_ns(self) -> int:
        """Return the processor time of the lane's thread so far."""
        return time.clock_gettime_ns(self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.send(messages.encode(Stop()))
        self._thread.join(60)
        self._channel.close()


def _device(rig: Rig, pool: mmap.mmap) -> CudaDevice:
    """Return the rig's device as lanes share it."""
    place = DevicePlace(
        str(rig.device), rig.slab_bytes, warm_up_bytes=_WARM_UP_BYTES, replay_bytes=_REPLAY_BYTES
    )
    pinned = None if rig.library is None else Pinned(rig.library)
    if pinned is not None:
        pin(pool, pinned, "bench")
    tables = Tables(pinned)
    keeper = HotKeeper(tables, rig.queue)
    return CudaDevice(rig.device, rig.arena, rig.queue, tables, keeper, place, pinned=pinned)


def written_gcn(folder: Path, width: int, layers: int) -> tuple[ModelSpec, Signature]:
    """Write a GCN of as many features and outputs as it is wide, and say what it is."""
    args: dict[str, Any] = {
        "in_channels": width, "out_channels": width, "hidden_channels": width,
        "num_layers": layers,
    }  # fmt: skip
    torch.manual_seed(0)
    write_model(folder, "gcn", zoo.gcn(**args), factory="serve.models.zoo:gcn", args=args)
    signature = Signature(
        num_features=width, edge_dim=None, num_outputs=width, rows="node", accepts_empty=True,
        accepts_edgeless=True, deterministic=True,
    )  # fmt: skip
    return find(folder, "gcn"), signature
