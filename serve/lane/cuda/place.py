"""Run a lane's tasks on a device that it shares with the other lanes of its process.

A GPU runs the kernels of several streams at once, but not those of several processes. A process for
each lane would also cost a context and a copy of the weights.
"""

import gc
import logging
import mmap
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import msgspec
import torch

from serve.core.types import FailReason
from serve.ipc.messages import (
    GatherRef,
    LoadModel,
    MapTable,
    MemoryTaken,
    ProbeModel,
    RunTask,
    TableMapped,
    TaskDone,
    TaskError,
)
from serve.ipc.stop_word import StopWord
from serve.lane import clock
from serve.lane.channel import LaneChannel
from serve.lane.cuda.capturing import replay_most
from serve.lane.cuda.device import CudaDevice
from serve.lane.cuda.gather_threads import find_threads
from serve.lane.cuda.packet_loop import PacketLoop
from serve.lane.cuda.placed_model import ArenaSite, PlacedModel, load_on
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.recurring_runs import RecurringRuns
from serve.lane.cuda.streams import StreamKind
from serve.lane.cuda.task_memory import TaskMemory
from serve.lane.error_text import told
from serve.lane.executors import runs_on_csr, with_executor
from serve.lane.executors.check import needs_exact_sizes
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel, load_model
from serve.lane.models.sizing import sizing_of
from serve.lane.nonfinite import nonfinite_counts, refused
from serve.lane.place import HeldModel, Replaying
from serve.lane.process import leave
from serve.lane.task import PoolTensors, failed, run_model, stopped, wanted_of
from serve.lane.warm_up import warm_up
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.native_cuda import CUDA_LIBRARY, GATHER_THREADS

_log = logging.getLogger(__name__)

#: Exit status of a process whose device failed.
EXIT_FAULT = 70
#: Columns of the smallest product for which libraries keep a workspace.
_SQUARE = 32


class CudaPlace:
    """A device shared by lanes, as one of them uses it; a ``Place``.

    Tasks run in memory that the arena inserts for each of them.
    """

    def __init__(
        self, channel: LaneChannel, pool: mmap.mmap, device: CudaDevice, stop_word: StopWord
    ) -> None:
        self.meter = None if device.arena is None else device.arena.add_lane()
        self._channel = channel
        self._tensors = PoolTensors(pool)
        self._stop_word = stop_word
        self._device = device
        self._queue = device.open_queue()
        self._number = device.urgency.add_lane()
        #: None when the device has no memory for captured runs.
        self._recurring: RecurringRuns | None = None
        #: ``MemoryTaken`` as reported last.
        self._unplanned_bytes: int | None = None if device.arena else 0
        self._models: dict[str, LoadedModel] = {}
        #: ``Calibration.gather_threads`` of each model, or what stands for it.
        self._gather_threads: dict[str, int] = {}
        self._warm_libraries()
        if device.place.replay_bytes:
            held = device.memory_of_captures()
            shared_bytes = 0 if self.meter is None else device.place.slab_bytes
            loop = _packet_loop(channel, pool, device, self._queue, self._number, shared_bytes)
            self._recurring = RecurringRuns(
                self._queue, held, self._tensors, self._models, self._end_or_leave,
                device.capturing, loop,
            )  # fmt: skip

    def wait(self) -> None:
        """See ``Place``."""
        if self._recurring is not None:
            self._recurring.wait()

    def run(self, task: RunTask, model: HeldModel) -> TaskDone | TaskError:
        """See ``Place``."""
        started_ns = clock.now_ns()
        try:
            with ExitStack() as until_end:
                answer = self._run(task, model, until_end)
        finally:
            self._device.urgency.end(self._number)
        # The device has ended the run; only reference cycles can still hold its tensors.
        if self.meter is not None and self.meter.clear():
            gc.collect()
            self._tell_memory(f"model {task.key}: after a run")
        if isinstance(answer, TaskError):
            return answer
        rows, columns = answer.rows, answer.columns
        found = nonfinite_counts(task, rows, columns, model, self._tensors)
        if found and model.loaded.spec.check_output == "finite":
            return refused(task, rows, columns, self._tensors)
        run_ns = clock.now_ns() - started_ns
        return msgspec.structs.replace(answer, run_ns=run_ns, nonfinite=found)

    def _tell_memory(self, when: str) -> None:
        """Report memory that tasks can no longer have, when it has changed."""
        unplanned_bytes = self._device.unplanned_bytes()
        if unplanned_bytes == self._unplanned_bytes:
            return
        if unplanned_bytes > (self._unplanned_bytes or 0):
            _log.warning(
                "%s, %d bytes of the device are held beside what was planned", when, unplanned_bytes
            )
        self._unplanned_bytes = unplanned_bytes
        self._channel.send(MemoryTaken(unplanned_bytes))

    def _run(self, task: RunTask, model: HeldModel, until_end: ExitStack) -> TaskDone | TaskError:
        """Run the task; returns when the device has ended all of it.

        `until_end` holds tables and hot sets, which the device may still read when the run fails.
        """
        memory = self.meter
        try:
            graphs = self._tensors.inputs(task)
            gathers = [part.gather for part in task.parts]
            buffer = TaskMemory(task, graphs, memory, self._device.place.slab_bytes)
            kind = self._stream_for(task)
            # Told by the inputs here: reading those on the device would wait for it.
            wanted = wanted_of(task, graphs, model)
            found = None if self._recurring is None else self._recurring.find(task, wanted, kind)
            if self._recurring is not None and found is not None:
                buffer.insert_less(found.copied_bytes, self._channel.send)
                begin_gather = partial(self._begin_gather, task.key, until_end)
                done = self._recurring.replay(found, task, graphs, wanted, begin_gather)
                if done is not None:
                    return done
                buffer.clear()
                if buffer.gave_back:
                    reason = FailReason.OUT_OF_MEMORY.value
                    return TaskError(task.task_id, reason, "its captured run cannot be replayed")
            buffer.insert(self._stop_word)
            with self._queue.running(kind):
                # Upload all parts before the first launch: later copies would wait for it.
                placed = [
                    self._queue.upload(graph | self._gather_inputs(gather))
                    for graph, gather in zip(graphs, gathers, strict=True)
                ]
                for graph, gather in zip(placed, gathers, strict=True):
                    if gather is not None:
                        graph["x"] = self._gathered(task.key, gather, graph, until_end)
                outputs = run_model(task, placed, model, wanted)
                self._queue.download(self._tensors.places(outputs.parts, task))
        except BaseException as error:
            self._end_or_leave(task, error)
            if self._stop_word.asked(task.task_id):
                return stopped(task)
            return failed(task, error, refused_bytes=memory.refused_bytes() if memory else 0)
        peak = held = None
        if memory is not None:
            peak = memory.peak_bytes() - buffer.inputs_bytes
            held = memory.held_peak_bytes() - buffer.inputs_bytes
        return TaskDone(task.task_id, outputs.rows, outputs.columns, 0, peak, held)

    def _stream_for(self, task: RunTask) -> StreamKind:
        """Return the stream for a task that begins now."""
        urgent = self._device.urgency.begin(self._number, task.run_ns)
        if task.bounded and StreamKind.BOUNDED in self._queue.kinds:
            return StreamKind.BOUNDED
        return StreamKind.URGENT if urgent else StreamKind.ORDINARY

    def _gather_inputs(self, gather: GatherRef | None) -> dict[str, torch.Tensor]:
        """Return the tensors that gathering a part's features needs on the device."""
        if gather is None:
            return {}
        refs = {"ids": gather.ids, "at": gather.at, "new": gather.new}
        return {name: self._tensors.of(ref) for name, ref in refs.items()}

    def _begin_gather(
        self, key: str, until_end: ExitStack, gather: GatherRef
    ) -> Callable[[], torch.Tensor]:
        """See ``recurring_runs.BeginGather``."""
        placed = self._queue.upload(self._gather_inputs(gather))
        return partial(self._gathered, key, gather, placed, until_end)

    def _gathered(
        self,
        key: str,
        gather: GatherRef,
        placed: dict[str, torch.Tensor],
        until_end: ExitStack,
    ) -> torch.Tensor:
        """Gather the features of the part's nodes; table and hot set stay until the run's end."""
        table = until_end.enter_context(self._device.tables.using(gather.table))
        hot = until_end.enter_context(self._device.hot.using(gather.table))
        ids = self._tensors.of(gather.ids)
        threads = self._gather_threads[key]
        x = self._queue.gather(table.rows, ids, hot, placed=placed["ids"], threads=threads).float()
        if placed["at"].numel():
            x.index_copy_(0, placed["at"], placed["new"])
        return x

    def map_table(self, message: MapTable) -> TableMapped:
        """See ``Place``."""
        table = message.table
        if not self._device.place.has_kernels:
            return TableMapped(table.number, f"{CUDA_LIBRARY}, which gathers, is not used")
        try:
            with self._device.tables.using(table):
                self._device.hot.offer(table, message.hot, self._channel.send)
                return TableMapped(table.number)
        except OSError as error:
            return TableMapped(table.number, str(error))

    def _end_or_leave(self, task: RunTask, error: BaseException) -> None:
        """Wait for the kernels of a failed run; end the process when the device is lost."""
        try:
            self._queue.finish()
        except Exception as fault:
            _log.critical("model %s: the device cannot go on: %s", task.key, fault, exc_info=error)
            reason = FailReason.MODEL_ERROR.value
            self._channel.send(TaskError(task.task_id, reason, f"the device failed: {told(error)}"))
            leave(EXIT_FAULT)

    def expect(self, need_bytes: int) -> None:
        """See ``Place``; nothing large is allocated in this process's own memory."""

    def tidy(self, answer: TaskDone | TaskError) -> None:
        """Capture a run that recurs, when no other lane captures one."""
        if isinstance(answer, TaskError):
            gc.collect()
        if self._recurring is not None:
            self._recurring.capture_due(self._channel.is_idle)

    def load(self, message: LoadModel) -> LoadedModel:
        """See ``Place``."""
        if (held := self._models.get(message.key)) is not None:
            return held
        with self._device.capturing:
            model = self._device.models.take(message, self._device.torch_device)
        try:
            self._warm_up(model, message.signature)
        except BaseException:
            self._device.models.give_back(message.key, model)
            raise
        self._models[message.key] = model
        threads = message.gather_threads or GATHER_THREADS
        self._gather_threads[message.key] = threads
        if self._recurring is not None:
            self._recurring.expect(
                message.key, message.replay_most, any_size=message.replay_any_size,
                rows=message.signature.rows, gather_threads=threads,
            )  # fmt: skip
        self._tell_memory(f"model {message.key}: loaded")
        return model

    def settle(self) -> None:
        """See ``Place``; the arena keeps models apart by itself."""

    def _warm_libraries(self) -> None:
        """Have libraries allocate the workspaces that they keep now, outside of any task.

        There is one for each thread and stream, for a product, and one for a product with a bias,
        which another library computes.
        """
        for kind in self._queue.kinds:
            with torch.inference_mode(), self._queue.running(kind):
                square = torch.ones(_SQUARE, _SQUARE, device=self._queue.device)
                torch.addmm(square[0], square, square.mm(square))
                self._queue.finish()

    def _warm_up(self, model: LoadedModel, signature: Signature) -> None:
        """Run small graphs on all streams, in a buffer like a task's.

        Outside of a buffer, tasks could never use that memory again.
        """
        memory = self.meter
        with self._device.warming:
            for kind in self._queue.kinds:
                placed = PlacedModel.of(model, self._queue, kind)
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

    def unload(self, key: str) -> None:
        """See ``Place``."""
        if self._recurring is not None:
            self._recurring.forget(key)
        self._gather_threads.pop(key, None)
        if (model := self._models.pop(key, None)) is not None:
            self._device.models.give_back(key, model)
            self._tell_memory(f"model {key}: unloaded")

    def limited(self, message: ProbeModel) -> ProbeModel:
        """Leave out packages, which run on the processor, and bound the memory of probe graphs."""
        most_bytes = message.max_bytes
        if self.meter is not None:
            # The model's weights and workspaces come out of the same memory.
            most_bytes = min(most_bytes, self.meter.most_bytes() // 2)
        return msgspec.structs.replace(message, package="", max_bytes=most_bytes)

    def replaying(
        self, model: LoadedModel, signature: Signature, site: Site, trial: LoadedModel | None
    ) -> Replaying:
        """See ``Place``."""
        if self._recurring is None or not isinstance(model, PlacedModel):
            return Replaying()
        try:
            sizing_of(model.spec.interface)
        except ValueError as error:
            return Replaying(reason=f"runs are not captured: {error}")
        reason = _why_exact(model.executor, signature, trial)
        any_size = trial is not None and not reason
        recorder = self._recurring.recorder
        most, why_none = replay_most(model, signature, recorder, site, any_size=any_size)
        if not most:
            return Replaying(reason=f"runs are not captured: {why_none}")
        return Replaying(most, any_size, reason)

    def gather_threads(self, signature: Signature) -> int:
        """See ``Place``; a model that declares its inputs has none that the lane gathers."""
        pinned, num_features = self._device.pinned, signature.num_features
        if pinned is None or not num_features or not self._device.place.has_kernels:
            return 0
        return find_threads(self._queue, pinned, self.meter, num_features)

    def load_to_try(self, spec: ModelSpec) -> LoadedModel:
        """Load the model on the processor; on a device a bad index ends the process."""
        return load_model(spec)

    def load_to_measure(self, spec: ModelSpec, executor: str) -> tuple[LoadedModel, Site]:
        """See ``Place``."""
        model = load_on(spec, self._device.torch_device, executor)
        placed = PlacedModel.of(model, self._queue)
        meter = self.meter
        return placed, Processor() if meter is None else ArenaSite(self._queue, meter)


def _packet_loop(
    channel: LaneChannel,
    pool: mmap.mmap,
    device: CudaDevice,
    queue: Queue,
    number: int,
    slab_bytes: int,
) -> PacketLoop:
    """Return the loop of the lane of that number; see ``PacketLoop``."""
    return PacketLoop(
        channel.fileno(), pool, device.urgency.run_times, number, queue.replayer(),
        device.tables.looped if device.place.has_kernels else None, slab_bytes,
    )  # fmt: skip


def _why_exact(executor: str, signature: Signature, trial: LoadedModel | None) -> str:
    """Say why a model's runs are captured for exact sizes only; empty when they are not.

    `trial` is used up.
    """
    why = f"the executor is {executor}"
    if trial is not None and runs_on_csr(executor):
        why = needs_exact_sizes(with_executor(trial, "csr"), signature)
    return f"captured for exact sizes only: {why}" if why else ""
