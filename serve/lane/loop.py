"""A lane: a resident loop that runs one task at a time and answers for every message.

Whatever a model does, the lane answers: an error of the model ends that task and nothing else. The
lane ends by itself when the server is gone, also when the server was killed or stopped.
"""

import gc
import logging
import os

from serve.core.types import FailReason
from serve.ipc import messages, passing
from serve.ipc.messages import (
    EstimateStep,
    LaneStarted,
    LoadModel,
    MapTable,
    MeasureStep,
    ModelFailed,
    ModelLoaded,
    ModelProbed,
    ProbeModel,
    RunTask,
    SettingsRestored,
    Stop,
    TaskDone,
    TaskError,
    TrainJob,
    UnloadModel,
)
from serve.lane.channel import LaneChannel
from serve.lane.error_text import told, traced
from serve.lane.measure.probe_model import probe_model
from serve.lane.output import begin_model, end_model
from serve.lane.place import HeldModel, Place
from serve.lane.shared_state import SharedState
from serve.lane.training.job import estimate_step, measure_step, train
from serve.models.repository import ModelSpec
from serve.native import Meter

_log = logging.getLogger(__name__)


class Lane:
    """The loop: one message in, one answer out."""

    def __init__(self, channel: LaneChannel, place: Place, unconfined: str = "") -> None:
        """`unconfined` is for the server's log, see ``LaneStarted``."""
        self._channel = channel
        self._unconfined = unconfined
        self._place = place
        self._models: dict[str, HeldModel] = {}
        #: Specs that name the copies that came with them, by key.
        self._received: dict[str, ModelSpec] = {}
        #: Settings as every run must find them.
        self._state = SharedState.of_all()

    def serve(self) -> None:
        """Answer messages until told to stop or the server is gone."""
        gc.collect()
        gc.freeze()
        self._state = SharedState.of_all()
        measures = self._place.meter is not None
        try:
            self._channel.send(LaneStarted(os.getpid(), measures, self._unconfined))
            while (message := self._next()) is not None:
                if isinstance(message, Stop):
                    return
                self.handle(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # the server went before it had an answer

    def _next(self) -> messages.ToLane | None:
        """Wait for the next message that the place does not answer by itself."""
        self._place.wait()
        return self._channel.receive()

    def handle(self, message: messages.ToLane) -> None:
        """Do what the message asks and send the answer."""
        if isinstance(message, RunTask):
            self._run(message)
        elif isinstance(message, LoadModel):
            torchs = SharedState.of_torch()
            answer = self._load(message)
            self._tell_restored(message.key, torchs.restore())
            self._state = SharedState.of_all()
            self._channel.send(answer)
        elif isinstance(message, UnloadModel):
            self._unload(message.key)
        elif isinstance(message, ProbeModel):
            self._channel.send(self._probe(message))
        elif isinstance(message, MeasureStep):
            self._channel.send(measure_step(message, Meter.attach()))
        elif isinstance(message, EstimateStep):
            self._channel.send(estimate_step(message, Meter.attach()))
        elif isinstance(message, TrainJob):
            self._channel.send(train(message, Meter.attach(), self._channel.send))
        elif isinstance(message, MapTable):
            self._channel.send(self._place.map_table(message))

    def _run(self, task: RunTask) -> None:
        answer: TaskDone | TaskError
        model = self._models.get(task.key)
        if model is None:
            reason = f"model {task.key} is not loaded on this lane"
            answer = TaskError(task.task_id, FailReason.MODEL_ERROR.value, reason)
        else:
            begin_model(task.key)
            answer = self._place.run(task, model)
            end_model()
        self._channel.send(answer)
        self._tell_restored(task.key, self._state.restore())
        self._place.tidy(answer)

    def _tell_restored(self, key: str, changed: str) -> None:
        if changed:
            self._channel.send(SettingsRestored(key, changed))

    def _load(self, message: LoadModel) -> ModelLoaded | ModelFailed:
        begin_model(message.key, at_once=True)
        try:
            loaded = self._place.load(message)
        except BaseException as error:
            _log.error("model %s does not load\n%s", message.key, traced(error))
            passing.close_copies(message.spec)
            return ModelFailed(message.key, told(error))
        finally:
            end_model()
        self._models[message.key] = HeldModel(loaded, message.signature)
        self._received[message.key] = message.spec
        gc.collect()
        gc.freeze()
        self._place.settle()
        return ModelLoaded(message.key)

    def _unload(self, key: str) -> None:
        self._models.pop(key, None)
        self._place.unload(key)
        # What is mapped stays mapped until it is collected.
        if (spec := self._received.pop(key, None)) is not None:
            passing.close_copies(spec)

    def _probe(self, message: ProbeModel) -> ModelProbed | ModelFailed:
        begin_model(message.spec.key, at_once=True)
        try:
            return probe_model(message, self._place, self._channel.send)
        except BaseException as error:
            _log.error("model %s cannot be calibrated\n%s", message.spec.name, traced(error))
            return ModelFailed(message.spec.name, told(error))
        finally:
            end_model()
