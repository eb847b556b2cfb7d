"""The place where a lane's models run: its own processor, or a device that several lanes share."""

from dataclasses import dataclass
from typing import Protocol

from serve.ipc.messages import (
    LoadModel,
    MapTable,
    ProbeModel,
    RunTask,
    TableMapped,
    TaskDone,
    TaskError,
)
from serve.lane.cuda.arena import LaneMemory
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.native import Meter


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model that the lane can run."""

    loaded: LoadedModel
    signature: Signature


@dataclass(frozen=True, slots=True)
class Replaying:
    """What replaying captured runs of a model gains."""

    #: See ``Calibration.replay_most``; 0 when it never gains.
    most: int = 0
    #: See ``Calibration.replay_any_size``.
    any_size: bool = False
    #: See ``Calibration.replay_reason``.
    reason: str = ""


class Place(Protocol):
    """A place that runs tasks, keeps models and measures new ones.

    A lane calls its place from one thread.
    """

    @property
    def meter(self) -> Meter | LaneMemory | None:
        """Counts the memory of runs and limits it; None when nothing does."""
        ...

    def wait(self) -> None:
        """Return at the latest when a packet waits that the lane must handle.

        A place may answer others meanwhile.
        """
        ...

    def run(self, task: RunTask, model: HeldModel) -> TaskDone | TaskError:
        """Run the task until it ends, fails or is stopped; a model's errors become the answer."""
        ...

    def tidy(self, answer: TaskDone | TaskError) -> None:
        """Clean up after a run whose answer was sent."""
        ...

    def load(self, message: LoadModel) -> LoadedModel:
        """Load a model and warm it up. Raises whatever is wrong with it."""
        ...

    def settle(self) -> None:
        """Count the memory in use now as that of models."""
        ...

    def unload(self, key: str) -> None:
        """Forget the model, if it is held."""
        ...

    def map_table(self, message: MapTable) -> TableMapped:
        """Map a resident graph's features; the answer says why when that is impossible."""
        ...

    def limited(self, message: ProbeModel) -> ProbeModel:
        """Return the request as far as this place can measure a model."""
        ...

    def load_to_measure(self, spec: ModelSpec, executor: str) -> tuple[LoadedModel, Site]:
        """Load a model on an executor that needs no package; also returns where to measure it."""
        ...

    def load_to_try(self, spec: ModelSpec) -> LoadedModel | None:
        """Load a model where a bad index is only an error.

        Returns None when that is where it is measured.
        """
        ...

    def expect(self, need_bytes: int) -> None:
        """Prepare for a run that needs that much memory."""
        ...

    def replaying(
        self, model: LoadedModel, signature: Signature, site: Site, trial: LoadedModel | None
    ) -> Replaying:
        """Measure what replaying captured runs gains. `trial` is used up: see ``load_to_try``."""
        ...

    def gather_threads(self, signature: Signature) -> int:
        """Return ``Calibration.gather_threads`` of a model."""
        ...
