"""Lanes as threads of one process, for a device they share: streams, memory and models.

A GPU runs the kernels of several streams at once but not those of several processes, and a
process of its own would cost each lane a context and a copy of the weights. To the pool these
are lanes like any other, each with its channel; only that all are lost together when the
process ends, and that none can be suspended. A fault of the device (an illegal access, a failed
assert) leaves nothing to go on with: the process ends and a new one is started.
"""

import ctypes
import faulthandler
import gc
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import torch

from serve.core.types import FailReason
from serve.ipc.messages import (
    GatherRef,
    LoadModel,
    MapTable,
    MemoryTaken,
    ModelFailed,
    ModelProbed,
    ProbeModel,
    RunTask,
    TableMapped,
    TaskDone,
    TaskError,
)
from serve.ipc.setup import DevicePlace, LaneSetup, PassedFile
from serve.ipc.shared_pool import LANE_WORDS_BYTES
from serve.ipc.stop_word import StopWord
from serve.lane.cuda.arena import ALIGNMENT_BYTES, DeviceArena
from serve.lane.cuda.capturing import Recorder, replay_most
from serve.lane.cuda.graph_kernels import GraphKernels
from serve.lane.cuda.hot_rows import HotKeeper
from serve.lane.cuda.placed_model import ArenaSite, PlacedModel, load_on
from serve.lane.cuda.queues import Copies, CudaQueue, HostQueue, Pinned, Queue
from serve.lane.cuda.replays import FixedRun, Replays, RunShape
from serve.lane.cuda.tables import Tables
from serve.lane.error_text import told
from serve.lane.executors import kernels
from serve.lane.loop import Lane, enter, leave, warm_up
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel, load_model
from serve.lane.models.union import run_union
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.native_cuda import CudaError, CudaLibrary

_log = logging.getLogger(__name__)

_EXIT_FAULT = 70
#: Hardware queues of a device, CUDA's most. Lanes have two streams each: those that share a queue
#: wait for each other, the urgent too. CUDA's own choice is 8.
_CONNECTIONS = "32"
#: Columns of the least product that libraries keep a workspace for.
_SQUARE = 32
#: A task goes first when another takes at least so many times as long.
_SHORT_FACTOR = 2


def main(setup: LaneSetup, channels: list[socket.socket], pool_file: PassedFile) -> None:
    """Entry point of the process."""
    pool = enter(setup, pool_file)
    # A driver that crashes says nothing of who called it.
    faulthandler.enable()
    try:
        device = Device.open(setup, pool)
        threads = [
            threading.Thread(
                target=_serve,
                args=(channel, pool, device, setup.words_offset_bytes + LANE_WORDS_BYTES * index),
                name=f"lane {index}",
                daemon=True,
            )
            for index, channel in enumerate(channels)
        ]
    except Exception:
        _log.exception("%s: the device cannot be used: %s", setup.name, setup.place)
        leave(_EXIT_FAULT)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave()


def _serve(channel: socket.socket, pool: mmap.mmap, device: "Device", word: int) -> None:
    try:
        ThreadLane(channel, pool, device, StopWord(pool, word)).serve()
    except BaseException:
        # A thread that ends by itself would leave its lane silent for ever.
        _log.exception("a lane's loop failed; its process ends")
        leave(_EXIT_FAULT)


@dataclass(frozen=True)
class Device:
    """What lanes of one process share."""

    torch_device: torch.device
    #: None: memory is not managed here.
    arena: DeviceArena | None
    #: Makes the thread that calls it one that uses the device, and its queue.
    open_queue: Callable[[], Queue]
    #: Features of resident graphs that lanes gather themselves.
    tables: Tables
    #: Of these, what the device has itself.
    hot: HotKeeper
    place: DevicePlace
    #: Held while a run is captured, one at a time, and by what waits for the whole device: that is
    #: refused while any stream captures.
    capturing: threading.Lock = field(default_factory=threading.Lock)
    #: Held while a model is warmed up, in memory that is there once for all lanes.
    warming: threading.Lock = field(default_factory=threading.Lock)
    shelf: "Shelf" = field(default_factory=lambda: Shelf())
    running: "Running" = field(default_factory=lambda: Running())

    @classmethod
    def open(cls, setup: LaneSetup, pool: mmap.mmap) -> "Device":
        """Take the slab and make torch use it; raises what CUDA says when that cannot be."""
        place = setup.place
        assert place is not None
        device = torch.device(place.name)
        if device.type == "cpu":
            tables = Tables(None)
            hot = HotKeeper(tables, HostQueue)
            return cls(device, None, HostQueue, tables, hot, place)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
        library = CudaLibrary()
        index = device.index or 0
        pinned = Pinned(library, index)
        arena = DeviceArena.open(library.slab(index, place.slab_bytes), place.slab_bytes)
        arena.install()
        torch.cuda.set_device(device)
        if not kernels.UNAVAILABLE:
            kernels.add_device(device.type, GraphKernels().implementations())
        if place.stages:
            _pin(pool, pinned, setup.name)
        _log.info(
            "%s: %d MiB of %s",
            setup.name,
            place.slab_bytes >> 20,
            torch.cuda.get_device_name(device),
        )
        copies, tables = Copies(device), Tables(pinned)

        def open_queue() -> Queue:
            # A thread uses the first GPU until it says otherwise, and what it asks of CUDA there,
            # pinning memory say, costs a context.
            torch.cuda.set_device(device)
            return CudaQueue(device, copies, pinned)

        hot = HotKeeper(tables, open_queue)
        return cls(device, arena, open_queue, tables, hot, place)

    def unplanned_bytes(self) -> int:
        """What is held for good beside what was planned, models and hot rows: not a task's.

        Larger workspaces, static memory rounded up or let go, blocks that outlived their task.
        """
        if self.arena is None:
            return 0
        with self.shelf.settled() as weights_bytes:
            # Before what is known: hot rows whose memory is taken just now are not counted at all.
            held_bytes = self.arena.static_bytes + self.arena.outlived_bytes
            known_bytes = self.place.static_bytes + weights_bytes + self.hot.held_bytes
            return max(0, held_bytes - known_bytes)


class Running:
    """What lanes of the device run now, to tell which of two should go first.

    A target is a multiple of a task's own time: what is short has the least to wait with, and
    what is long loses the least by letting it go first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_ns: dict[object, int] = {}

    def begin(self, lane: object, run_ns: int) -> bool:
        """The lane starts a task; True when it is short beside the longest that runs."""
        with self._lock:
            longest_ns = max(self._run_ns.values(), default=0)
            self._run_ns[lane] = run_ns
        return 0 < run_ns * _SHORT_FACTOR <= longest_ns

    def end(self, lane: object) -> None:
        """The lane's task ended, if it had one."""
        with self._lock:
            self._run_ns.pop(lane, None)


class Shelf:
    """Models on the device, each loaded by the first lane that needs it and shared by all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, tuple[LoadedModel, int]] = {}

    def take(self, message: LoadModel, device: torch.device) -> LoadedModel:
        """The model, one user more; raises what ``load_on`` raises."""
        key = message.key
        with self._lock:
            model, users = self._models.get(key, (None, 0))
            if model is None:
                model = load_on(message.spec, device, message.executor)
            self._models[key] = model, users + 1
            return model

    @contextmanager
    def settled(self) -> Iterator[int]:
        """Bytes of all weights; inside, none are loaded or let go."""
        with self._lock:
            yield sum(model.spec.weights_bytes for model, _ in self._models.values())

    def give_back(self, key: str) -> None:
        """One user less; after the last, its memory on the device is free."""
        with self._lock:
            model, users = self._models.pop(key)
            if users > 1:
                self._models[key] = model, users - 1
            else:
                # Cycles of objects may keep the module, but not its weights.
                model.module.to_empty(device="meta")


class ThreadLane(Lane):
    """A lane whose models run on a device, in memory inserted for each task."""

    def __init__(
        self, channel: socket.socket, pool: mmap.mmap, device: Device, stop_word: StopWord
    ) -> None:
        memory = None if device.arena is None else device.arena.add_lane()
        super().__init__(channel, pool, memory, 0, stop_word)
        self._memory = memory
        self._device = device
        self._queue = device.open_queue()
        self._recorder: Recorder | None = None
        self._replays: Replays | None = None
        #: See ``MemoryTaken``, as said last.
        self._unplanned_bytes: int | None = None if device.arena else 0
        #: Of each model, see ``Calibration.replay_most``.
        self._replay_most: dict[str, int] = {}
        self._warm_libraries()
        if device.place.replay_bytes:
            held = None if device.arena is None else device.arena.add_lane()
            if held is not None:
                held.hold(device.place.replay_bytes)
            self._recorder = Recorder(self._queue, held)
            self._replays = Replays(self._capture)

    def _run(self, task: RunTask) -> TaskDone | TaskError:
        started_ns = time.monotonic_ns()
        try:
            answer = self._attempt(task)
        finally:
            self._device.running.end(self)
        # The device has ended the run, and nothing of it is referenced any more but by cycles.
        if self._memory is not None and self._memory.clear():
            gc.collect()
            self._tell_memory(f"model {task.key}: after a run")
        if isinstance(answer, TaskDone):
            answer = msgspec.structs.replace(answer, run_ns=time.monotonic_ns() - started_ns)
        return answer

    def _tell_memory(self, when: str) -> None:
        """Have the server's books know how much tasks can no longer have."""
        unplanned_bytes = self._device.unplanned_bytes()
        if unplanned_bytes == self._unplanned_bytes:
            return
        if unplanned_bytes > (self._unplanned_bytes or 0):
            _log.warning(
                "%s, %d bytes of the device are held beside what was planned", when, unplanned_bytes
            )
        self._unplanned_bytes = unplanned_bytes
        self._send(MemoryTaken(unplanned_bytes))

    def _attempt(self, task: RunTask) -> TaskDone | TaskError:
        """The run, or how it failed; returns when the device has ended all of it."""
        with ExitStack() as until_end:
            return self._run_on_device(task, until_end)

    def _run_on_device(self, task: RunTask, until_end: ExitStack) -> TaskDone | TaskError:
        """The same; `until_end` keeps what the device may still read when the run failed."""
        memory = self._memory
        try:
            graphs = [{ref.name: self._tensor(ref) for ref in part.inputs} for part in task.parts]
            gathers = [part.gather for part in task.parts]
            staged = [tensor for graph in graphs for tensor in graph.values()]
            sizes = [tensor.nbytes for tensor in staged]
            sizes += [size for gather in gathers if gather for size in _gathered(gather)]
            if memory is not None:
                # Inputs lie on the device too, each in whole units of placement; and for a moment
                # gathered rows as the table has them, which are no larger than the model's.
                moment_bytes = max((_gathered(g)[0] for g in gathers if g), default=0)
                placed_bytes = sum(map(_aligned, [*sizes, moment_bytes]))
                memory.insert(task.limit_bytes + placed_bytes)
                memory.stop_when(self._stop_word.address, task.task_id)
            urgent = self._device.running.begin(self, task.run_ns)
            wanted = self._shapes_wanted(task, graphs)
            if (done := self._replayed(task, graphs, wanted, urgent=urgent)) is not None:
                return done
            with self._queue.running(urgent=urgent):
                # Of all parts, before anything is launched: copies that come later wait for that.
                placed = [
                    self._queue.upload(graph | self._to_gather(gather))
                    for graph, gather in zip(graphs, gathers, strict=True)
                ]
                for graph, gather in zip(placed, gathers, strict=True):
                    if gather is not None:
                        graph["x"] = self._gathered(gather, graph, until_end)
                rows_of = self._signatures[task.key].rows
                outputs = run_union(self._models[task.key], placed, rows_of)
                self._check_shapes(task, outputs, wanted)
                for output, part in zip(outputs, task.parts, strict=True):
                    self._store(output, part)
                if not any(output.numel() for output in outputs):
                    self._queue.finish()
        except BaseException as error:
            self._end_or_leave(task, error)
            return self._failed(task, error)
        peak = held = None
        if memory is not None:
            inputs_bytes = sum(sizes)
            peak, held = memory.peak_bytes() - inputs_bytes, memory.held_peak_bytes() - inputs_bytes
        rows = tuple(output.shape[0] for output in outputs)
        return TaskDone(task.task_id, rows, outputs[0].shape[1], 0, peak, held)

    def _replayed(
        self,
        task: RunTask,
        graphs: list[dict[str, torch.Tensor]],
        wanted: list[tuple[int, int]],
        *,
        urgent: bool,
    ) -> TaskDone | None:
        """The run as it was captured; None: it has to be launched."""
        shape = self._shape_of(task, urgent=urgent)
        run = None if self._replays is None or shape is None else self._replays.find(shape)
        if self._replays is None or shape is None or run is None:
            return None
        output = run.captured.output
        if tuple(output.shape) != wanted[0]:
            return None  # Its `batch` tells fewer graphs apart, or more.
        try:
            with self._queue.running(urgent=urgent):
                self._queue.fill(run.inputs, graphs[0])
                run.captured.launch()
                self._store(output, task.parts[0])
                if not output.numel():
                    self._queue.finish()
        except CudaError as error:
            self._end_or_leave(task, error)
            self._replays.give_up(shape, error)
            return None
        # What it took was set aside when it was captured; of the task's buffer it took nothing.
        return TaskDone(task.task_id, (output.shape[0],), output.shape[1], 0, None, None)

    def _shape_of(self, task: RunTask, *, urgent: bool) -> RunShape | None:
        """None where the run is not worth capturing, or never the same: a union, a sample."""
        part, most = task.parts[0], self._replay_most.get(task.key, 0)
        if not most or len(task.parts) > 1 or part.gather is not None:
            return None
        shapes = {ref.name: ref.shape for ref in part.inputs}
        if shapes["x"][0] + shapes.get("edge_index", (2, 0))[1] > most:
            return None
        return RunShape(
            task.key, tuple((ref.name, ref.dtype, ref.shape) for ref in part.inputs), urgent
        )

    def _capture(self, shape: RunShape) -> FixedRun:
        assert self._recorder is not None
        return self._recorder.capture(self._models[shape.key], shape.inputs, urgent=shape.urgent)

    def _to_gather(self, gather: GatherRef | None) -> dict[str, torch.Tensor]:
        """What gathering the part's features needs on the device, beside its other inputs."""
        if gather is None:
            return {}
        refs = {"ids": gather.ids, "at": gather.at, "new": gather.new}
        return {name: self._tensor(ref) for name, ref in refs.items()}

    def _gathered(
        self, gather: GatherRef, placed: dict[str, torch.Tensor], until_end: ExitStack
    ) -> torch.Tensor:
        """Features of the part's nodes; what they are made from stays until the run's end."""
        table = until_end.enter_context(self._device.tables.using(gather.table))
        hot = until_end.enter_context(self._device.hot.using(gather.table))
        ids = self._tensor(gather.ids)
        x = self._queue.gather(table.rows, ids, hot, placed=placed["ids"]).float()
        if placed["at"].numel():
            x.index_copy_(0, placed["at"], placed["new"])
        return x

    def _map_table(self, message: MapTable) -> TableMapped:
        table = message.table
        try:
            with self._device.tables.using(table):
                self._device.hot.offer(table, message.hot, self._send)
                return TableMapped(table.number)
        except OSError as error:
            return TableMapped(table.number, str(error))

    def _end_or_leave(self, task: RunTask, error: BaseException) -> None:
        """Wait for what a failed run has launched; a device that cannot even do that is lost."""
        try:
            self._queue.finish()
        except Exception as fault:
            _log.critical("model %s: the device cannot go on: %s", task.key, fault, exc_info=error)
            reason = FailReason.MODEL_ERROR.value
            self._send(TaskError(task.task_id, reason, f"the device failed: {told(error)}"))
            leave(_EXIT_FAULT)

    def _copy_out(self, output: torch.Tensor, place: torch.Tensor) -> None:
        self._queue.download(output, place)

    def _use_pages_for(self, need_bytes: int) -> None:
        """Nothing large is allocated in this process's own memory."""

    def _tidy(self, answer: TaskDone | TaskError) -> None:
        if isinstance(answer, TaskError):
            gc.collect()
        if self._replays is not None and self._device.capturing.acquire(blocking=False):
            try:
                self._replays.capture_due(idle=self._is_idle())
            finally:
                self._device.capturing.release()

    def _is_idle(self) -> bool:
        """No packet waits to be read."""
        try:
            self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False

    def _load_model(self, message: LoadModel) -> LoadedModel:
        if (held := self._models.get(message.key)) is not None:
            return held
        self._replay_most[message.key] = message.replay_most
        with self._device.capturing:
            model = self._device.shelf.take(message, self._device.torch_device)
        try:
            self._warm_up(model, message.signature)
        except BaseException:
            self._device.shelf.give_back(message.key)
            raise
        self._tell_memory(f"model {message.key}: loaded")
        return model

    def _warm_libraries(self) -> None:
        """Have libraries take the workspaces now that they keep, outside of any task.

        For each thread and stream one: of a product, and of one with a bias, whose library differs.
        """
        for urgent in (False, True):
            with torch.inference_mode(), self._queue.running(urgent=urgent):
                square = torch.ones(_SQUARE, _SQUARE, device=self._queue.device)
                torch.addmm(square[0], square, square.mm(square))
                self._queue.finish()

    def _warm_up(self, model: LoadedModel, signature: Signature) -> None:
        """Run small graphs on both streams, in a buffer as a task's.

        Outside of one, what they take in between would be kept from tasks for good.
        """
        memory = self._memory
        with self._device.warming:
            for urgent in (False, True):
                placed = PlacedModel.of(model, self._queue, urgent=urgent)
                if memory is None:
                    warm_up(placed, signature)
                    continue
                memory.insert(min(self._device.place.warm_up_bytes, memory.most_bytes()))
                try:
                    warm_up(placed, signature)
                except Exception as error:
                    if not memory.refused_bytes():
                        raise
                    _log.info("model %s: warmed up with less: %s", model.spec.key, error)
                finally:
                    gc.collect()
                    memory.clear()

    def _unload(self, key: str) -> None:
        self._signatures.pop(key, None)
        self._replay_most.pop(key, None)
        if self._replays is not None:
            self._replays.forget(key)
        if self._models.pop(key, None) is not None:
            self._device.shelf.give_back(key)
            self._tell_memory(f"model {key}: unloaded")

    def _probe(self, message: ProbeModel) -> ModelProbed | ModelFailed:
        # Packages are compiled for the processor.
        message = msgspec.structs.replace(message, package="")
        if self._memory is not None:
            # Half of what there is: the model's weights and workspaces come out of it too.
            most_bytes = min(message.max_bytes, self._memory.most_bytes() // 2)
            message = msgspec.structs.replace(message, max_bytes=most_bytes)
        return super()._probe(message)

    def _replay_most_of(self, model: LoadedModel, signature: Signature, site: Site) -> int:
        if self._recorder is None or not isinstance(model, PlacedModel):
            return 0
        return replay_most(model, signature, self._recorder, site)

    def _load_to_try(self, spec: ModelSpec) -> LoadedModel | None:
        """On the processor: a bad index is an error there, and the end of a device's process."""
        return load_model(spec)

    def _load_to_measure(self, spec: ModelSpec, executor: str) -> tuple[LoadedModel, Site]:
        model = load_on(spec, self._device.torch_device, executor)
        placed = PlacedModel.of(model, self._queue)
        if self._memory is None:
            return placed, Processor()
        return placed, ArenaSite(self._queue, self._memory)


def _pin(pool: mmap.mmap, pinned: Pinned, name: str) -> None:
    """Pin the shared pool, where requests lie: it is where copies to the device start."""
    try:
        pinned.register(ctypes.addressof(ctypes.c_char.from_buffer(pool)), len(pool))
    except CudaError as error:
        _log.warning("%s: copies go through pageable memory, several times slower: %s", name, error)


def _gathered(gather: GatherRef) -> tuple[int, ...]:
    """Bytes of each tensor on the device that stands for a part's features, until the run's end."""
    x_bytes = 4 * gather.rows * gather.table.shape[1]
    return x_bytes, gather.ids.size_bytes, gather.at.size_bytes, gather.new.size_bytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
