"""A lane: one resident process, pinned, that runs one task at a time.

Runs in a child of the fork server, which has torch imported already. Whatever a model does,
the lane answers: an error of the model ends that task and nothing else. The lane ends by
itself when the server is gone, also when it was killed or when this process is stopped.
"""

import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from serve.core.types import FailReason
from serve.errors import ModelError, ServeError
from serve.ipc import messages
from serve.ipc.messages import (
    MAX_PACKET_BYTES,
    LaneHolds,
    LaneStarted,
    LoadModel,
    MapTable,
    ModelFailed,
    ModelLoaded,
    ModelProbed,
    Part,
    ProbeModel,
    Progress,
    RunTask,
    Stop,
    TableMapped,
    TaskDone,
    TaskError,
    TensorRef,
    UnloadModel,
)
from serve.ipc.setup import LaneSetup, PassedFile
from serve.ipc.shared_pool import map_pool
from serve.ipc.stop_word import SIGNAL as STOP_SIGNAL
from serve.ipc.stop_word import Stopped, StopWord
from serve.lane.cuda.arena import LaneMemory
from serve.lane.error_text import told, traced
from serve.lane.executors import with_executor
from serve.lane.executors.check import takes_narrow_edges
from serve.lane.executors.choose import Options, choose
from serve.lane.heap import Heap
from serve.lane.measure.calibrate import Allocator, calibrate
from serve.lane.measure.probe_signature import probe_inputs, probe_signature
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel, load_model
from serve.lane.models.union import rows_wanted, run_union
from serve.lane.torch_state import TorchState
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.native import Meter

_log = logging.getLogger(__name__)

_TORCH_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
#: Nodes and edges of the graphs a model is run on before it serves. A large one among them: what
#: libraries keep from their first run of that kind would count against the first request's limit.
_WARM_UP_SIZES = ((16, 48), (256, 1024), (2048, 20_480), (16, 48))
#: Of what runs leave behind, told in steps.
_WORTH_TELLING_BYTES = 16 << 20


def main(setup: LaneSetup, channel: socket.socket, pool_file: PassedFile) -> None:
    """Entry point of the process."""
    pool = enter(setup, pool_file)
    stop_word = StopWord(pool, setup.words_offset_bytes)
    signal.signal(STOP_SIGNAL, stop_word.on_signal)
    Lane(channel, pool, Meter.attach(), setup.keep_bytes, stop_word).serve()
    leave()


def enter(setup: LaneSetup, pool_file: PassedFile) -> mmap.mmap:
    """Make this process one of lanes: what it is told, when it ends; returns the shared pool."""
    _die_with_parent()
    _release_fork_server()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=setup.log_level, format="%(levelname)s %(message)s")
    # What a model starts ends with it.
    os.setpgid(0, 0)
    if setup.niceness:
        os.nice(setup.niceness)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.threads)
    pool_fd = pool_file.detach()
    pool = map_pool(pool_fd, setup.pool_capacity_bytes)
    os.close(pool_fd)
    return pool


def leave(code: int = 0) -> NoReturn:
    """End this process at once."""
    # Tensors over the pool may still exist; the kernel unmaps it, no destructor has to.
    sys.stderr.flush()
    os._exit(code)


class Lane:
    """The loop: one packet in, one answer out."""

    def __init__(
        self,
        channel: socket.socket,
        pool: mmap.mmap,
        meter: Meter | LaneMemory | None,
        keep_bytes: int,
        stop_word: StopWord,
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._meter = meter
        self._keep_bytes = keep_bytes
        self._stop_word = stop_word
        self._heap = Heap(keep_bytes)
        #: What it held when it told the server last.
        self._told_bytes = 0
        self._models: dict[str, LoadedModel] = {}
        self._signatures: dict[str, Signature] = {}
        #: Torch's own settings as runs find them, and models that were seen to change them.
        self._state = TorchState.now()
        self._meddlers: set[str] = set()

    def serve(self) -> None:
        """Answer until told to stop or the server is gone."""
        gc.collect()
        gc.freeze()
        self._state = TorchState.now()
        self._send(LaneStarted(os.getpid(), self._meter is not None))
        while True:
            packet = self._channel.recv(MAX_PACKET_BYTES)
            if not packet:
                return
            message = messages.decode_to_lane(packet)
            if isinstance(message, RunTask):
                answer = self._run(message)
                self._send(answer)
                self._restore(message.key)
                self._tidy(answer)
            elif isinstance(message, LoadModel):
                self._send(self._load(message))
                self._state = TorchState.now()
            elif isinstance(message, UnloadModel):
                self._unload(message.key)
            elif isinstance(message, ProbeModel):
                self._send(self._probe(message))
            elif isinstance(message, MapTable):
                self._send(self._map_table(message))
            elif isinstance(message, Stop):
                return

    def _send(self, message: messages.FromLane) -> None:
        self._channel.send(messages.encode(message))

    def _run(self, task: RunTask) -> TaskDone | TaskError:
        """Run the task until it ends or is stopped."""
        try:
            return self._run_on(task)
        except Stopped:
            # It may come anywhere, also in the middle of cleaning up.
            if self._meter is not None:
                self._meter.clear()
            return _stopped(task)

    def _run_on(self, task: RunTask) -> TaskDone | TaskError:
        started_ns = time.monotonic_ns()
        meter = self._meter
        peak = held = None
        self._use_pages_for(task.limit_bytes)
        if meter is not None:
            base_bytes = meter.live_bytes()
            meter.insert(task.limit_bytes)
            meter.stop_when(self._stop_word.address, task.task_id)
        try:
            self._stop_word.begin(task.task_id)
            graphs = [{ref.name: self._tensor(ref) for ref in part.inputs} for part in task.parts]
            wanted = self._shapes_wanted(task, graphs)
            outputs = run_union(self._models[task.key], graphs, self._signatures[task.key].rows)
            self._check_shapes(task, outputs, wanted)
            if meter is not None:
                peak, held = meter.peak_bytes() - base_bytes, meter.held_peak_bytes()
            for output, part in zip(outputs, task.parts, strict=True):
                self._store(output, part)
        except Stopped:
            raise
        except BaseException as error:
            # The user's code may raise anything; it must not cost the lane.
            return self._failed(task, error)
        finally:
            self._stop_word.end()
            if meter is not None:
                meter.clear()
        run_ns = time.monotonic_ns() - started_ns
        rows = tuple(output.shape[0] for output in outputs)
        return TaskDone(task.task_id, rows, outputs[0].shape[1], run_ns, peak, held)

    def _restore(self, key: str) -> None:
        """Bring back what a run of the model changed of torch itself; said once for each model."""
        changed = self._state.restore()
        if changed and key not in self._meddlers:
            self._meddlers.add(key)
            _log.warning("model %s changed torch's settings, which are restored: %s", key, changed)

    def _use_pages_for(self, need_bytes: int) -> None:
        """Get ready for a run that needs so much."""
        self._heap.use_pages_for(need_bytes)

    def _tidy(self, answer: TaskDone | TaskError) -> None:
        """Give back what a run left that is more than a lane may keep."""
        if isinstance(answer, TaskError):
            # The error's own cycles may hold the tensors of the run.
            gc.collect()
            self._heap.give_back()
        elif answer.held_bytes is None or answer.held_bytes > self._keep_bytes:
            self._heap.give_back()
        self._tell_what_stays()

    def _tell_what_stays(self) -> None:
        """Say what runs left behind, whenever it is clearly more than what was told before."""
        if self._heap.held_bytes() < self._told_bytes + _WORTH_TELLING_BYTES:
            return
        self._heap.give_back()
        held_bytes = self._heap.held_bytes()
        if held_bytes >= self._told_bytes + _WORTH_TELLING_BYTES:
            self._told_bytes = held_bytes
            self._send(LaneHolds(held_bytes))

    def _shapes_wanted(
        self, task: RunTask, graphs: list[dict[str, torch.Tensor]]
    ) -> list[tuple[int, int]]:
        """Shape of each part's output by the signature; asked before the model gets the graphs."""
        signature = self._signatures[task.key]
        return [
            (
                rows_wanted(graph, signature.rows) if part.gather is None else part.gather.rows,
                signature.num_outputs,
            )
            for graph, part in zip(graphs, task.parts, strict=True)
        ]

    def _check_shapes(
        self, task: RunTask, outputs: Sequence[torch.Tensor], wanted: list[tuple[int, int]]
    ) -> None:
        """Raise ModelError unless every output has the shape that it should have."""
        for output, shape in zip(outputs, wanted, strict=True):
            if tuple(output.shape) != shape:
                model, rows = self._models[task.key].spec.key, self._signatures[task.key].rows
                raise ModelError(
                    f"model {model}: the output has {_size(output.shape)}; it must have "
                    f"{_size(shape)}, one row for each {rows}"
                )

    def _failed(self, task: RunTask, error: BaseException) -> TaskError:
        if self._stop_word.asked(task.task_id):
            return _stopped(task)
        refused_bytes = 0 if self._meter is None else self._meter.refused_bytes()
        if refused_bytes:
            # Whatever the model made of it, this is why.
            text = f"a tensor of {refused_bytes} bytes would pass its limit of "
            text += f"{task.limit_bytes} bytes"
            return TaskError(task.task_id, FailReason.OUT_OF_MEMORY.value, text)
        text = told(error)
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
            text = "the system has no memory left" if text == "MemoryError" else text
            return TaskError(task.task_id, FailReason.OUT_OF_MEMORY.value, text)
        if not isinstance(error, ServeError):
            _log.error("model %s raised\n%s", task.key, traced(error))
        return TaskError(task.task_id, FailReason.MODEL_ERROR.value, text)

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        dtype = _TORCH_DTYPES[ref.dtype]
        count = 1
        for size in ref.shape:
            count *= size
        if count == 0:
            return torch.empty(ref.shape, dtype=dtype)
        flat = torch.frombuffer(self._pool, dtype=dtype, count=count, offset=ref.offset_bytes)
        return flat.view(ref.shape)

    def _store(self, output: torch.Tensor, part: Part) -> None:
        size_bytes = output.numel() * output.element_size()
        if size_bytes > part.output_capacity_bytes:
            raise ServeError(
                f"the output has shape {tuple(output.shape)}, {size_bytes} bytes; "
                f"{part.output_capacity_bytes} were expected for a graph of this size"
            )
        if size_bytes:
            place = TensorRef("output", "float32", tuple(output.shape), part.output_offset_bytes)
            self._copy_out(output, self._tensor(place))

    def _copy_out(self, output: torch.Tensor, place: torch.Tensor) -> None:
        place.copy_(output)

    def _load(self, message: LoadModel) -> ModelLoaded | ModelFailed:
        try:
            model = self._load_model(message)
        except BaseException as error:
            _log.error("model %s does not load\n%s", message.key, traced(error))
            return ModelFailed(message.key, told(error))
        self._models[message.key] = model
        self._signatures[message.key] = message.signature
        gc.collect()
        gc.freeze()
        self._heap.settle()
        self._told_bytes = 0
        return ModelLoaded(message.key)

    def _load_model(self, message: LoadModel) -> LoadedModel:
        model = with_executor(
            load_model(message.spec), message.executor, message.signature, message.package
        )
        warm_up(model, message.signature)
        return model

    def _unload(self, key: str) -> None:
        self._models.pop(key, None)
        self._signatures.pop(key, None)

    def _map_table(self, message: MapTable) -> TableMapped:
        """A lane of its own gets its features gathered."""
        return TableMapped(message.table.number, "its lanes share no device")

    def _probe(self, message: ProbeModel) -> ModelProbed | ModelFailed:
        try:
            model, site = self._load_to_measure(message.spec, "eager")
            trial = self._load_to_try(message.spec)
            signature = probe_signature(trial or model)
            if message.tries_only:
                return ModelProbed(signature, b"")
            options = Options(
                message.executor,
                message.max_bytes,
                Path(message.package) if message.package else None,
                message.compile_timeout_s,
                lambda: self._send(Progress("compile", 0.0)),
                site,
                trial,
                lambda spec, executor: self._load_to_measure(spec, executor)[0],
            )
            chosen = choose(model, signature, options)
            warm_up(chosen.loaded, signature)
            if chosen.loaded.executor == "csr" and isinstance(site, Processor):
                narrow = takes_narrow_edges(chosen.loaded, signature)
                signature = msgspec.structs.replace(signature, narrow_edges=narrow)
            found = calibrate(
                chosen.loaded,
                signature,
                budget_s=message.budget_s,
                max_bytes=message.max_bytes,
                allocator=Allocator(
                    held_by=None if self._meter is None else self._meter.held_by,
                    expect=self._use_pages_for,
                ),
                progress=lambda step, fraction: self._send(Progress(step, fraction)),
                executor_reason=chosen.reason,
                site=site,
                trial=trial,
            )
            most = self._replay_most_of(chosen.loaded, signature, site)
            found = msgspec.structs.replace(found, replay_most=most)
        except BaseException as error:
            _log.error("model %s cannot be calibrated\n%s", message.spec.name, traced(error))
            return ModelFailed(message.spec.name, told(error))
        return ModelProbed(signature, msgspec.msgpack.encode(found))

    def _replay_most_of(self, model: LoadedModel, signature: Signature, site: Site) -> int:
        """See ``Calibration.replay_most``; on a processor nothing is launched."""
        return 0

    def _load_to_try(self, spec: ModelSpec) -> LoadedModel | None:
        """The model where an error is nothing more; None: that is where it is measured."""
        return None

    def _load_to_measure(self, spec: ModelSpec, executor: str) -> tuple[LoadedModel, Site]:
        """The model on an executor that needs no package, and where it is measured."""
        return with_executor(load_model(spec), executor), Processor()


def warm_up(model: LoadedModel, signature: Signature) -> None:
    """Run small graphs, so that no request pays for a first call."""
    for num_nodes, num_edges in _WARM_UP_SIZES:
        model.run(probe_inputs(num_nodes, num_edges, 1, signature.num_features, signature.edge_dim))


def _stopped(task: RunTask) -> TaskError:
    return TaskError(task.task_id, FailReason.STOPPED.value, "nobody waits for it any more")


def _size(shape: Sequence[int]) -> str:
    rows, columns = shape
    return f"{rows} rows of {columns}"


def _die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends; it ends with the server."""
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _release_fork_server() -> None:
    """Close our copy of the pipe whose end tells the fork server that the server is gone.

    multiprocessing gives every child one, so that it could start others. A lane that is busy or
    stopped would keep the fork server waiting, and so itself alive.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
