"""The device that the lanes of one process share: its memory, its queues and its models."""

import ctypes
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from serve.ipc.messages import LoadModel
from serve.ipc.setup import DevicePlace, LaneSetup
from serve.lane.cuda.arena import DeviceArena, LaneMemory
from serve.lane.cuda.cuda_queue import Copies, CudaQueue, Pinned
from serve.lane.cuda.graph_kernels import use_graph_kernels
from serve.lane.cuda.hot_rows import HotKeeper
from serve.lane.cuda.partition import Partition
from serve.lane.cuda.placed_model import load_on
from serve.lane.cuda.queues import HostQueue, Queue
from serve.lane.cuda.tables import Tables
from serve.lane.executors import kernels
from serve.lane.models.loader import LoadedModel
from serve.native_cuda import CudaError, CudaLibrary

_log = logging.getLogger(__name__)

#: Hardware queues of a device, the most that CUDA has; its own choice is 8. Each lane has two or
#: three streams. Streams that share a queue wait for each other, the urgent ones too.
_CONNECTIONS = "32"
#: A task is urgent when another one takes at least this many times as long.
_SHORT_FACTOR = 2
#: The most lanes of a device.
_MOST_LANES = 64


@dataclass(frozen=True)
class CudaDevice:
    """A device, or the processor in its stead, as the lanes of one process share it."""

    torch_device: torch.device
    #: Places memory; None where torch does that by itself.
    arena: DeviceArena | None
    #: Makes the calling thread one that uses the device, and opens its queue.
    open_queue: Callable[[], Queue]
    #: Features of resident graphs that lanes gather from.
    tables: Tables
    #: Hot sets of these tables, copied to the device.
    hot: HotKeeper
    place: DevicePlace
    #: Held while a run is captured, and by code that waits for the whole device: CUDA refuses such
    #: a wait while any stream captures.
    capturing: threading.Lock = field(default_factory=threading.Lock)
    #: Held while a model is warmed up, in memory that all lanes share.
    warming: threading.Lock = field(default_factory=threading.Lock)
    models: "SharedModels" = field(default_factory=lambda: SharedModels())
    urgency: "Urgency" = field(default_factory=lambda: Urgency())
    #: Host memory that the device reads; None where the processor stands in for it.
    pinned: Pinned | None = None

    @classmethod
    def open(cls, setup: LaneSetup, pool: mmap.mmap) -> "CudaDevice":
        """Take the slab of memory and make torch allocate from it.

        Raises CudaError with CUDA's reason when that fails.
        """
        place = setup.place
        assert place is not None
        device = torch.device(place.name)
        if device.type == "cpu":
            tables = Tables(None)
            hot = HotKeeper(tables, HostQueue)
            simulated = partial(HostQueue, bounded=bool(place.reserved_sms))
            return cls(device, None, simulated, tables, hot, place)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
        library = CudaLibrary(kernels=place.has_kernels)
        index = device.index or 0
        pinned = Pinned(library, index)
        arena = DeviceArena.open(library.slab(index, place.slab_bytes), place.slab_bytes)
        arena.install()
        torch.cuda.set_device(device)
        if place.has_kernels and not kernels.UNAVAILABLE:
            use_graph_kernels()
        if place.stages:
            pin(pool, pinned, setup.name)
        _log.info(
            "%s: %d MiB of %s",
            setup.name,
            place.slab_bytes >> 20,
            torch.cuda.get_device_name(device),
        )
        copies, tables = Copies(device), Tables(pinned)
        partition = Partition.open(library, index, place.reserved_sms)

        def open_queue() -> Queue:
            # A thread uses the first GPU until it selects another. Any CUDA call on the wrong GPU,
            # such as pinning memory, would create a context there.
            torch.cuda.set_device(device)
            return CudaQueue(device, copies, pinned, partition)

        hot = HotKeeper(tables, open_queue)
        return cls(device, arena, open_queue, tables, hot, place, pinned=pinned)

    def memory_of_captures(self) -> LaneMemory | None:
        """Return a permanent buffer for a lane's captured runs; None where torch places memory."""
        if self.arena is None:
            return None
        held = self.arena.add_lane()
        held.hold(self.place.replay_bytes)
        return held

    def unplanned_bytes(self) -> int:
        """Return the memory held for good beyond what was planned, weights and hot sets.

        It comes from larger workspaces, static memory rounded up or freed, and blocks that outlived
        their task. No task can use it.
        """
        if self.arena is None:
            return 0
        with self.models.settled() as weights_bytes:
            # Read before the known part: a hot set that is being allocated now counts nowhere.
            held_bytes = self.arena.static_bytes + self.arena.outlived_bytes
            known_bytes = self.place.static_bytes + weights_bytes + self.hot.held_bytes
            return max(0, held_bytes - known_bytes)


class Urgency:
    """Expected run times on the device now, to decide which tasks are urgent.

    A target is a multiple of a task's own time. A short task has the least time to wait; a long one
    loses the least by letting it go first. Lanes' loops without Python do the same
    (csrc/cuda/lane_loop.cpp): each writes its own number only, and reads the others' as they are.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        #: Expected time of each lane's task, 0 for none.
        self.run_times = (ctypes.c_int64 * _MOST_LANES)()

    def add_lane(self) -> int:
        """Return the number of another lane; raises ValueError when there are too many."""
        number = next(self._numbers)
        if number >= _MOST_LANES:
            raise ValueError(f"{number + 1} lanes share a device; there can be {_MOST_LANES}")
        return number

    def begin(self, lane: int, run_ns: int) -> bool:
        """Note that the lane starts a task; returns True when it is urgent."""
        times = self.run_times[:]
        times[lane] = 0
        self.run_times[lane] = run_ns
        return 0 < run_ns * _SHORT_FACTOR <= max(times)

    def end(self, lane: int) -> None:
        """Note that the lane's task ended, if it had one."""
        self.run_times[lane] = 0


@dataclass
class _Weights:
    """A model's weights on the device."""

    size_bytes: int
    #: By name in the model's state.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    users: int = 0


class SharedModels:
    """Models on the device: each lane has a module of its own, and all share the weights.

    A forward pass may keep what it likes on its module, as PyG's ``TransformerConv`` does with its
    attention. In a module that lanes shared, it could read what another lane's run put there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: dict[str, _Weights] = {}

    def take(self, message: LoadModel, device: torch.device) -> LoadedModel:
        """Return a model of the caller's own over the shared weights.

        Raises what ``load_on`` raises.
        """
        spec = message.spec
        with self._lock:
            weights = self._weights.get(message.key) or _Weights(spec.weights_bytes)
            model = load_on(spec, device, message.executor, weights.tensors)
            weights.users += 1
            self._weights[message.key] = weights
            return model

    @contextmanager
    def settled(self) -> Iterator[int]:
        """Yield the bytes of all weights; meanwhile none are loaded or freed."""
        with self._lock:
            yield sum(weights.size_bytes for weights in self._weights.values())

    def give_back(self, key: str, model: LoadedModel) -> None:
        """End the use of a model; the last use frees the weights' memory on the device."""
        # Reference cycles may keep the module alive, but not its weights.
        model.module.to_empty(device="meta")
        with self._lock:
            weights = self._weights[key]
            weights.users -= 1
            if not weights.users:
                del self._weights[key]


def pin(pool: mmap.mmap, pinned: Pinned, name: str) -> None:
    """Pin the shared pool, the source of every copy of a request to the device."""
    try:
        pinned.register(ctypes.addressof(ctypes.c_char.from_buffer(pool)), len(pool))
    except CudaError as error:
        _log.warning("%s: copies go through pageable memory, several times slower: %s", name, error)
