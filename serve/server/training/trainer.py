"""Training beside requests: jobs of clients, and the scheduler's commands about them.

Each job that is prepared or trained has a thread, which starts the process, listens to it and tells
the scheduler. Commands are carried out under the driver's lock and never wait: they signal the
process, or leave a word for the thread.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serve.config import TrainingConfig
from serve.core.jobs.commands import (
    EndJob,
    JobCommand,
    PauseJob,
    PrepareJob,
    ResumeJob,
    StartJob,
    StopJob,
)
from serve.core.jobs.events import (
    JobCancelled,
    JobEvent,
    JobFailed,
    JobLost,
    JobSubmitted,
    StepsDone,
)
from serve.errors import Mismatch, NotReady, QueueFull, ServeError, UnknownName
from serve.ipc.messages import JobSteps
from serve.models.repository import ModelSpec, find
from serve.server.catalogue import ModelCatalogue
from serve.server.graphs import GraphStore, check_fit
from serve.server.lanes.trainers import Trainers
from serve.server.training import job_work
from serve.server.training.held_job import HeldJob, JobRun
from serve.server.training.job_facts import JobCall, JobStatus, TrainingEstimate
from serve.server.training.job_folder import JobFolder, KeptJob, highest_number, kept_jobs
from serve.server.training.measuring import StepMeasurer
from serve.server.training.publishing import Publisher
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Jobs that have not ended, and those that have and are still told of.
MOST_JOBS = _MOST_ENDED = 100
#: When to ask again while there are too many jobs.
_RETRY_NS = 60_000_000_000
#: A watcher is answered after so long though nothing has changed.
_WATCH_S = 5.0
#: A version appears within so long once that has begun: a folder is renamed.
_PUBLISH_S = 10.0


class Trainer:
    """All training jobs of one server; a ``JobPort``."""

    def __init__(
        self,
        config: TrainingConfig,
        folder: Path,
        catalogue: ModelCatalogue,
        graphs: GraphStore,
        processes: Trainers,
        lock: threading.Lock,
        tell: Callable[[JobEvent], None],
        load: Callable[[str], object],
    ) -> None:
        """`tell` hands the scheduler an event, under `lock`; `load` serves a model's versions."""
        self._config, self._folder = config, folder
        self._catalogue, self._graphs, self._processes = catalogue, graphs, processes
        self._lock, self._tell, self._load = lock, tell, load
        self._changed = threading.Condition(lock)
        #: The scheduler hears of jobs in order of their ids.
        self._one_at_a_time = threading.Lock()
        self._measurer = StepMeasurer(graphs, processes, config, lock)
        self._jobs: dict[int, HeldJob] = {}
        #: A folder that cannot be read as a job keeps its number, and what is in it.
        self._last_id = highest_number(folder)
        self._publisher = Publisher(self._jobs, self._changed)
        self._stopping = False
        self.running = 0
        #: Since the server started: steps done, and how long jobs stood for requests.
        self.steps, self.paused_ns = 0, 0

    # --- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with the jobs that an earlier life of the server left."""
        if not self._config.workers:
            return
        for folder, file in kept_jobs(self._folder):
            job = _held(file, folder)
            if not job.end:
                try:
                    job.spec = self._spec(file)
                    job.published = folder.published_as(Path(job.spec.folder), file.version)
                except ServeError as error:
                    job.end, job.message = "failed", str(error)
                    self._keep(job)
            with self._lock:
                self._jobs[file.job_id] = job
                if not job.end:
                    self._tell(JobSubmitted(job.submitted()))

    def stop(self) -> None:
        """Tell nothing any more; the pool ends the processes."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # --- clients ----------------------------------------------------------------------------

    def submit(self, call: JobCall) -> JobStatus:
        """Take a job; raises UnknownName, NotReady, InvalidInput, Mismatch or QueueFull."""
        if not self._config.workers:
            raise Mismatch("this server trains nothing: training.workers is 0")
        call.check()
        entry = self._catalogue.get(call.model)
        check_fit(job_work.graph_for(call.graph, entry.spec, self._graphs), entry)
        with self._one_at_a_time:
            return self._take(call, entry.spec.version)

    def _take(self, call: JobCall, version: int) -> JobStatus:
        with self._lock:
            going_on = [one for one in self._jobs.values() if not one.end or one.measuring]
            if len(going_on) >= MOST_JOBS:
                raise QueueFull(f"there are {MOST_JOBS} jobs without an end already", _RETRY_NS)
            self._last_id = job_id = self._last_id + 1
            file = KeptJob(
                job_id=job_id, model=call.model, base_version=version,
                graph=call.graph, epochs=call.epochs, learning_rate=call.learning_rate,
                seed=call.seed, fresh=call.fresh, priority=call.priority,
            )  # fmt: skip
            job = _held(file, JobFolder(self._folder / str(job_id)))
        try:
            job.spec = self._spec(file)
            job.folder.keep(file)
        except OSError as error:
            raise NotReady(f"{job.folder.path}: cannot be written: {error.strerror}") from error
        with self._changed:
            self._jobs[job_id] = job
            self._tell(JobSubmitted(job.submitted()))
            self._changed.notify_all()
            return job.facts()

    def estimate(self, model: str, num_nodes: int, num_edges: int) -> TrainingEstimate:
        """See ``Training``; no worker is needed."""
        found, size = self._catalogue.get(model), (num_nodes, num_edges)
        return job_work.estimate(found, size, self._processes, self._config.executor)

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return all jobs, oldest first, those that ended lately among them."""
        with self._lock:
            return tuple(job.facts() for job in self._jobs.values())

    def watch(self, job_id: int, seen: JobStatus | None = None) -> JobStatus:
        """Return the job once it differs from `seen` in epochs or state, or after a few seconds.

        Raises UnknownName.
        """
        with self._changed:
            job = self._get(job_id)

            def news() -> bool:
                now = job.facts()
                return (
                    seen is None
                    or self._stopping
                    or now.ended
                    or (now.epochs_done, now.state) != (seen.epochs_done, seen.state)
                )

            self._changed.wait_for(news, _WATCH_S)
            return job.facts()

    def cancel(self, job_id: int) -> JobStatus:
        """See ``Training``."""
        with self._changed:
            job = self._get(job_id)
            if not self._changed.wait_for(lambda: not job.publishing, _PUBLISH_S):
                raise NotReady(f"job {job_id} is being published as version {job.version}")
            if job.published and not job.end:
                return job.facts()
            if not job.end:
                self._tell(JobCancelled(job.job_id))
        self._keep(job)
        return job.facts()

    def counts(self) -> dict[str, int]:
        """Return the number of jobs by state. Under the lock."""
        return Counter(job.state for job in self._jobs.values())

    # --- commands, under the lock -----------------------------------------------------------

    def carry_out(self, command: JobCommand) -> JobEvent | None:
        """See ``JobPort``."""
        job = self._jobs[command.job_id]
        match command:
            case PrepareJob():
                job.preparing, job.measuring = True, (run := JobRun())
                failed = JobFailed(job.job_id, "the system has no thread for it")
                return self._begin(job, lambda: self._prepare(job, run), failed)
            case StartJob(reserve_bytes=reserve_bytes):
                job.run = run = JobRun()
                lost = self._begin(
                    job,
                    lambda: self._train(job, run, reserve_bytes),
                    JobLost(job.job_id, job.epochs_kept, "the system has no thread for it"),
                )
                if lost is not None:
                    job.run = None
                    return lost
            case PauseJob():
                assert job.run is not None
                job.run.pause()
            case ResumeJob():
                assert job.run is not None
                self.paused_ns += job.run.resume()
            case StopJob():
                self._leave(job)
            case EndJob(outcome=outcome):
                self._leave(job)
                job.end, job.message = outcome.end.value, outcome.message
                if not job.published:
                    job.version = 0
                _log.info("job %d: %s %s", job.job_id, job.end, job.message)
        self.running = sum(
            one.run is not None and one.run.paused_ns is None for one in self._jobs.values()
        )
        self._changed.notify_all()
        return None

    def keep_off_lanes(self) -> None:
        """See ``JobPort``; where lanes are not pinned, neither are jobs."""
        free = self._processes.free_cores()
        moving = []
        for job in self._jobs.values():
            run = job.run
            if run is None or run.paused_ns is not None:
                continue
            if run.core in free:
                free.remove(run.core)
            else:
                moving.append(run)
        for run, core in zip(moving, free, strict=False):
            run.move_to(core)

    # --- the threads of jobs ----------------------------------------------------------------

    def _begin(self, job: HeldJob, work: Callable[[], None], failed: JobEvent) -> JobEvent | None:
        """Start a thread; returns `failed` where the system has none."""
        name = f"job-{job.job_id}"
        try:
            Thread(target=work, name=name).start()
        except RuntimeError as error:
            _log.error("%s: %s", name, error)
            job.measuring = None
            return failed
        return None

    def _prepare(self, job: HeldJob, run: JobRun) -> None:
        if (found := self._measurer.measure(job, run)) is not None:
            self._tell_of(job, found)

    def _train(self, job: HeldJob, run: JobRun, reserve_bytes: int) -> None:
        """Train the job in a process from its checkpoint on, and publish the weights."""
        spec, needs, disk = job.spec, job.needs, job.disk
        assert spec is not None
        assert needs is not None
        assert disk is not None
        job.counted = job.folder.steps_kept()
        try:
            with (
                self._processes.start(spec.domain, str(job.folder.shared)) as process,
                disk.watched(process),
            ):
                with self._lock:
                    run.began(process)
                    self.keep_off_lanes()
                said = job_work.train(
                    job, process, reserve_bytes - needs.held_bytes, self._config,
                    lambda said: self._take_in(job, run, said),
                )  # fmt: skip
            with self._lock:
                run.process = None
            publish = partial(self._publisher.publish, job, lambda: run.over or self._stopping)
            event = job_work.finish(job, said, publish, self._load)
        except Exception as error:
            # NOTE: a job of which nothing is told keeps its worker for good.
            if not (run.over or self._stopping):
                _log.warning("job %d: its process ended: %s", job.job_id, error)
            event = job_work.lost(job, disk, error)
        if event is not None:
            self._tell_of(job, event, run)

    def _take_in(self, job: HeldJob, run: JobRun, said: JobSteps) -> None:
        with self._changed:
            if run.over or self._stopping:
                return
            self.steps += max(0, said.steps - job.counted)
            job.counted = job.epochs_done = said.steps
            job.loss, job.epoch_ns = said.loss, said.step_ns
            job.epochs_kept = said.kept_steps
            self._tell(StepsDone(job.job_id, said.steps))
            self._changed.notify_all()

    def _tell_of(self, job: HeldJob, event: JobEvent, run: JobRun | None = None) -> None:
        """Tell the scheduler, unless the run was told to end, and keep how the job stands."""
        with self._changed:
            if self._stopping or (run is not None and run.over) or job.end:
                return
            if run is not None:
                job.run = None
            self._tell(event)
            self._changed.notify_all()
        self._keep(job)

    # --- helpers ----------------------------------------------------------------------------

    def _keep(self, job: HeldJob) -> None:
        """Write how the job stands, and forget jobs that ended long ago."""
        try:
            self._publisher.keep(job)
            if job.end:
                job.folder.tidy()
        except OSError as error:
            _log.error("job %d: %s cannot be written: %s", job.job_id, job.folder.path, error)
        with self._lock:
            ended = [one for one in self._jobs.values() if one.end]
            old = ended[: max(0, len(ended) - _MOST_ENDED)]
            for one in old:
                del self._jobs[one.job_id]
        for one in old:
            one.folder.remove()

    def _leave(self, job: HeldJob) -> None:
        if job.measuring is not None:
            job.measuring.end()
        if job.run is not None:
            job.run.end()
            job.run = None

    def _get(self, job_id: int) -> HeldJob:
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownName(f"there is no job {job_id}")
        return job

    def _spec(self, file: KeptJob) -> ModelSpec:
        """Return what processes load; raises a ServeError."""
        return find(self._catalogue.root, file.model, str(file.base_version))


def _held(file: KeptJob, folder: JobFolder) -> HeldJob:
    kept = folder.steps_kept()
    return HeldJob(
        file, folder, epochs_done=kept or file.epochs_done, epochs_kept=kept, loss=file.loss or 0.0,
        accuracy=file.accuracy, version=file.version, end=file.end, message=file.message,
        published=bool(file.end and file.version),
    )  # fmt: skip
