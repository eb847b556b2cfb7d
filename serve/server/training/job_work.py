"""What the threads of jobs do without the scheduler: they measure, train and publish.

These functions wait for processes and disks, and hold no lock.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from serve.config import TrainingConfig
from serve.core.jobs.events import (
    JobEvent,
    JobFailed,
    JobFinished,
    JobLost,
    JobOverran,
    JobPrepared,
)
from serve.core.jobs.types import JobNeeds
from serve.core.types import Bytes, Nanos
from serve.errors import Mismatch, ModelError, ServeError
from serve.estimate.closed_form import training_bytes
from serve.graphs.resident import ResidentGraph
from serve.graphs.shared_column import SharedColumn
from serve.ipc.messages import (
    EstimateStep,
    JobSteps,
    JobStopped,
    JobTrained,
    MeasureStep,
    StepEstimated,
    StepMeasured,
    TrainJob,
)
from serve.models.repository import ModelSpec, scan_model
from serve.server.catalogue import ModelEntry
from serve.server.graphs import GraphStore
from serve.server.lanes.calibrators import Calibrator
from serve.server.lanes.trainers import Trainers
from serve.server.training.held_job import HeldJob
from serve.server.training.job_disk import JobDisk
from serve.server.training.job_facts import TrainingEstimate

_log = logging.getLogger(__name__)

#: Time for loading a model and measuring a step of it.
_MEASURE_S = 600.0
Said = StepMeasured | StepEstimated | JobSteps | JobTrained | JobStopped


def graph_for(name: str, spec: ModelSpec, graphs: GraphStore) -> ResidentGraph:
    """Return the graph to train the model on; raises UnknownName or Mismatch."""
    graph = graphs.get(name)
    if not isinstance(graph, ResidentGraph):
        raise Mismatch(f"graph '{name}' has several types of nodes: none is trained on")
    if isinstance(graph.snapshot.column, SharedColumn):
        raise Mismatch(f"graph '{name}' is shared out: no server has all features to train on")
    if graph.labels is None:
        raise Mismatch(f"graph '{name}' has no labels 'y' to train on")
    require_trainable(spec)
    return graph


def require_trainable(spec: ModelSpec) -> None:
    """Raise Mismatch for a model that declares what its inputs are."""
    if spec.interface is not None or spec.method != "forward":
        raise Mismatch(
            f"model '{spec.name}' declares its inputs or method; only models of x and edge_index"
            " are trained"
        )


def measure(
    job: HeldJob,
    graphs: GraphStore,
    processes: Trainers,
    config: TrainingConfig,
    began: Callable[[Calibrator], None],
) -> JobEvent:
    """Keep the job's graph, and find what a step on it needs; `began` is told of the process."""
    spec, folder = job.spec, str(job.folder.path)
    assert spec is not None
    try:
        job.folder.keep_graph(graph_for(job.file.graph, spec, graphs), job.file.seed)
        job.disk = JobDisk(job.folder, config.max_files_bytes)
        with (
            processes.start(spec.domain, str(job.folder.shared)) as process,
            job.disk.watched(process),
        ):
            began(process)
            process.send(MeasureStep(spec, folder, config.executor))
            said = _heard(process, _MEASURE_S)
    except (ServeError, OSError, EOFError) as error:
        exceeded = "" if job.disk is None else job.disk.exceeded
        return JobFailed(job.job_id, exceeded or str(error))
    if not isinstance(said, StepMeasured):
        return JobFailed(job.job_id, said.message if isinstance(said, JobStopped) else str(said))
    job.needs = JobNeeds(
        Bytes(said.held_bytes), Bytes(said.step_bytes), Nanos(max(1, said.step_ns))
    )
    return JobPrepared(job.job_id, job.needs)


def estimate(
    model: ModelEntry, size: tuple[int, int], processes: Trainers, executor: str
) -> TrainingEstimate:
    """Estimate a training step of the model on a graph of so many nodes and edges.

    Raises Mismatch or ModelError when the model cannot be trained, NotReady when the process ends.
    """
    spec, (num_nodes, num_edges) = model.spec, size
    features, classes = model.signature.num_features, model.signature.num_outputs
    require_trainable(spec)
    with (
        tempfile.TemporaryDirectory(prefix="gnnserve-step-") as folder,
        processes.start(spec.domain, folder) as process,
    ):
        process.send(EstimateStep(spec, *size, features, classes, executor))
        said = _heard(process, _MEASURE_S)
    if not isinstance(said, StepEstimated):
        raise ModelError(said.message if isinstance(said, JobStopped) else str(said))
    held_bytes, closed = said.graph_bytes + said.persistent_bytes, None
    if said.kind:
        closed = training_bytes(said.kind, said.widths, *size)
    return TrainingEstimate(
        model=spec.name, version=str(spec.version), executor=executor, num_nodes=num_nodes,
        num_edges=num_edges, num_features=features, graph_bytes=said.graph_bytes,
        persistent_bytes=said.persistent_bytes, peak_bytes=held_bytes + said.peak_bytes,
        reserve_bytes=held_bytes + said.step_bytes, closed_form_bytes=closed,
        warning=said.problem,
    )  # fmt: skip


def train(
    job: HeldJob,
    process: Calibrator,
    step_bytes: int,
    config: TrainingConfig,
    take_in: Callable[[JobSteps], None],
) -> Said:
    """Train in the process from the checkpoint on; returns its last word.

    Raises NotReady when it dies.
    """
    spec, file = job.spec, job.file
    assert spec is not None
    _log.info("job %d: process %s trains", job.job_id, process.pid)
    process.send(
        TrainJob(
            spec, str(job.folder.path), file.epochs, file.learning_rate, file.seed, file.fresh,
            step_bytes, config.checkpoint_s, config.executor,
        )
    )  # fmt: skip
    while isinstance(said := _heard(process, None), JobSteps):
        take_in(said)
    return said


def finish(
    job: HeldJob,
    said: Said,
    publish: Callable[[Path], bool],
    load: Callable[[str], object],
) -> JobEvent | None:
    """Return what comes of the process's last word: trained weights are published.

    `publish` writes the job's version to the model's folder; it returns False for a run that was
    told to end before, and then nothing comes of it. Raises OSError when that cannot be written.
    """
    spec = job.spec
    assert spec is not None
    if isinstance(said, JobStopped):
        overran = said.reason == "out_of_memory"
        return (JobOverran if overran else JobFailed)(job.job_id, said.message)
    assert isinstance(said, JobTrained)
    job.accuracy = said.accuracy
    if not publish(Path(spec.folder)):
        return None
    try:
        load(spec.name)
    except ServeError as error:
        where = f"written as version {job.version} of model '{spec.name}'"
        return JobFailed(job.job_id, f"trained and {where}, which does not load: {error}")
    return JobFinished(job.job_id)


def lost(job: HeldJob, disk: JobDisk, error: Exception) -> JobEvent:
    """Return what it means for the job that its process ended, or could not be published."""
    job.epochs_kept = job.folder.steps_kept()
    if disk.exceeded:
        return JobFailed(job.job_id, disk.exceeded)
    if isinstance(error, (ServeError, OSError, EOFError)):
        return JobLost(job.job_id, job.epochs_kept, str(error))
    _log.error("job %d: it was not trained", job.job_id, exc_info=error)
    return JobFailed(job.job_id, f"it was not trained: {error!r}")


def next_version(spec: ModelSpec, others: Iterable[HeldJob]) -> int:
    """Return a version above all that the model has, or that other jobs will publish."""
    found = [one.version or 0 for one in scan_model(Path(spec.folder).parent, spec.name)]
    to_come = [one.version for one in others if one.file.model == spec.name]
    return 1 + max([*found, *to_come], default=0)


def _heard(process: Calibrator, timeout_s: float | None) -> Said:
    """Return the next word about a job; raises NotReady when the process ended."""
    while True:
        said = process.receive(timeout_s)
        if isinstance(said, StepMeasured | StepEstimated | JobSteps | JobTrained | JobStopped):
            return said
