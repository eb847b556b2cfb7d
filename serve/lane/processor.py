"""A lane on processor cores: one process, pinned, with torch's threads and the C heap."""

import gc
import logging
import signal
import socket

from serve.ipc.messages import (
    LaneHolds,
    LoadModel,
    MapTable,
    ProbeModel,
    RunTask,
    TableMapped,
    TaskDone,
    TaskError,
)
from serve.ipc.setup import LaneSetup, PassedFile
from serve.ipc.stop_word import SIGNAL as STOP_SIGNAL
from serve.ipc.stop_word import Stopped, StopWord
from serve.lane import clock
from serve.lane.channel import LaneChannel
from serve.lane.executors import with_executor
from serve.lane.loop import Lane
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.memory_bound import MemoryBound
from serve.lane.models.loader import LoadedModel, load_model
from serve.lane.nonfinite import nonfinite_counts, refused
from serve.lane.place import HeldModel, Replaying
from serve.lane.process import enter, leave, short_of_descriptors
from serve.lane.process_heap import ProcessHeap
from serve.lane.task import PoolTensors, failed, run_model, stopped, wanted_of
from serve.lane.warm_up import limited_warm_up
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.native import Meter

_log = logging.getLogger(__name__)

#: Exit code of a lane without descriptors.
_EXIT_SHORT = 3
#: Memory that runs leave behind is reported in steps of this size.
_REPORTED_STEP_BYTES = 16 << 20


def main(setup: LaneSetup, channel: socket.socket, pool_file: PassedFile) -> None:
    """Serve as the lane of this process; the entry point."""
    process = enter(setup, pool_file)
    stop_word = StopWord(process.pool, setup.words_offset_bytes)
    signal.signal(STOP_SIGNAL, stop_word.on_signal)
    lane_channel = LaneChannel(channel)
    tensors = PoolTensors(process.pool, process.pool_fd)
    place = ProcessorPlace(lane_channel, tensors, Meter.attach(), setup.keep_bytes, stop_word)
    Lane(lane_channel, place, process.unconfined).serve()
    leave()


class ProcessorPlace:
    """This process's processor cores; a ``Place``."""

    def __init__(
        self,
        channel: LaneChannel,
        tensors: PoolTensors,
        meter: Meter | None,
        keep_bytes: int,
        stop_word: StopWord,
    ) -> None:
        """`keep_bytes` is the freed memory that the process may keep from run to run."""
        self.meter = meter
        self._channel = channel
        self._tensors = tensors
        self._keep_bytes = keep_bytes
        self._stop_word = stop_word
        self._heap = ProcessHeap(keep_bytes)
        self._bound = MemoryBound()
        #: Memory left behind as reported last.
        self._reported_bytes = 0

    def wait(self) -> None:
        """See ``Place``; all packets are the lane's."""

    def run(self, task: RunTask, model: HeldModel) -> TaskDone | TaskError:
        """See ``Place``. The stop word and its signal may end the run at any instruction."""
        try:
            return self._run(task, model)
        except Stopped:
            # The signal may arrive anywhere, also in the middle of cleaning up.
            if self.meter is not None:
                self.meter.clear()
            return stopped(task)

    def _run(self, task: RunTask, model: HeldModel) -> TaskDone | TaskError:
        started_ns = clock.now_ns()
        meter = self.meter
        peak = held = None
        self.expect(task.limit_bytes)
        self._bound.expect(task.limit_bytes)
        if meter is not None:
            base_bytes = meter.live_bytes()
            meter.insert(task.limit_bytes)
            meter.stop_when(self._stop_word.address, task.task_id)
        try:
            self._stop_word.begin(task.task_id)
            graphs = self._tensors.inputs(task)
            outputs = run_model(task, graphs, model, wanted_of(task, graphs, model))
            if meter is not None:
                peak, held = meter.peak_bytes() - base_bytes, meter.held_peak_bytes()
            for output, place in self._tensors.places(outputs.parts, task):
                place.copy_(output)
        except Stopped:
            raise
        except BaseException as error:
            # The user's code may raise anything; it must not cost the lane.
            if self._stop_word.asked(task.task_id):
                return stopped(task)
            return failed(task, error, refused_bytes=0 if meter is None else meter.refused_bytes())
        finally:
            self._stop_word.end()
            if meter is not None:
                meter.clear()
        rows, columns = outputs.rows, outputs.columns
        found = nonfinite_counts(task, rows, columns, model, self._tensors)
        if found and model.loaded.spec.check_output == "finite":
            return refused(task, rows, columns, self._tensors)
        run_ns = clock.now_ns() - started_ns
        return TaskDone(task.task_id, rows, columns, run_ns, peak, held, started_ns, found)

    def expect(self, need_bytes: int) -> None:
        """See ``Place``."""
        self._heap.use_pages_for(need_bytes)

    def tidy(self, answer: TaskDone | TaskError) -> None:
        """Give back memory beyond what a lane may keep, and report what stays."""
        if isinstance(answer, TaskError):
            # The error's own cycles may hold the tensors of the run.
            gc.collect()
            self._heap.give_back()
            if short_of_descriptors():
                _log.error("models left too many files open; the lane ends, to be restarted")
                leave(_EXIT_SHORT)
        elif answer.held_bytes is None or answer.held_bytes > self._keep_bytes:
            self._heap.give_back()
        self._bound.note()
        self._report_held()

    def _report_held(self) -> None:
        """Report memory left behind, whenever it is clearly more than reported before."""
        if self._heap.held_bytes() < self._reported_bytes + _REPORTED_STEP_BYTES:
            return
        self._heap.give_back()
        held_bytes = self._heap.held_bytes()
        if held_bytes >= self._reported_bytes + _REPORTED_STEP_BYTES:
            self._reported_bytes = held_bytes
            self._channel.send(LaneHolds(held_bytes))

    def load(self, message: LoadModel) -> LoadedModel:
        """See ``Place``."""
        self._bound.lift()
        loaded = load_model(message.spec)
        model = with_executor(loaded, message.executor, message.signature, message.package)
        limited_warm_up(model, message.signature, self.meter)
        return model

    def settle(self) -> None:
        """See ``Place``."""
        self._heap.settle()
        self._bound.note()
        self._reported_bytes = 0

    def unload(self, key: str) -> None:
        """See ``Place``; the lane holds the only reference to the model."""

    def map_table(self, message: MapTable) -> TableMapped:
        """Refuse: the server gathers features for lanes on processors."""
        return TableMapped(message.table.number, "its lanes share no device")

    def limited(self, message: ProbeModel) -> ProbeModel:
        """See ``Place``; nothing is limited here."""
        return message

    def load_to_measure(self, spec: ModelSpec, executor: str) -> tuple[LoadedModel, Site]:
        """See ``Place``."""
        return with_executor(load_model(spec), executor), Processor()

    def load_to_try(self, spec: ModelSpec) -> None:
        """See ``Place``; a bad index is only an error here."""

    def replaying(
        self, model: LoadedModel, signature: Signature, site: Site, trial: LoadedModel | None
    ) -> Replaying:
        """See ``Place``; a processor launches nothing that could be replayed."""
        return Replaying()

    def gather_threads(self, signature: Signature) -> int:
        """See ``Place``; a processor gathers with the lane's own threads."""
        return 0
