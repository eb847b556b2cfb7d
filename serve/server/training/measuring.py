"""The steps of jobs are measured one after the other, each until its job ends."""

import logging
import threading
from contextlib import suppress

from serve.config import TrainingConfig
from serve.core.jobs.events import JobEvent, JobFailed
from serve.server.graphs import GraphStore
from serve.server.lanes.calibrators import Calibrator
from serve.server.lanes.trainers import Trainers
from serve.server.training import job_work
from serve.server.training.held_job import HeldJob, JobRun

_log = logging.getLogger(__name__)


class StepMeasurer:
    """Finds what steps of jobs need. Its method waits for processes and disks."""

    def __init__(
        self, graphs: GraphStore, processes: Trainers, config: TrainingConfig, lock: threading.Lock
    ) -> None:
        """`lock` is the driver's, which guards what is known of jobs."""
        self._graphs, self._processes, self._config = graphs, processes, config
        self._lock = lock
        #: The scheduler has one job measured at a time; one that was cancelled may not have ended.
        self._one_at_a_time = threading.Lock()

    def measure(self, job: HeldJob, run: JobRun) -> JobEvent | None:
        """Return what came of it; None when the job ended before, of which nothing is left."""

        def began(process: Calibrator) -> None:
            with self._lock:
                run.began(process)

        found: JobEvent | None = None
        with self._one_at_a_time:
            try:
                if not run.over:
                    found = job_work.measure(
                        job, self._graphs, self._processes, self._config, began
                    )
            except Exception as error:
                # NOTE: a job of which nothing is told keeps all others from being measured.
                _log.exception("job %d: its step was not measured", job.job_id)
                found = JobFailed(job.job_id, f"its step was not measured: {error!r}")
        with self._lock:
            job.measuring = None
        if not job.end:
            return found
        with suppress(OSError):
            job.folder.tidy()  # of what was written since
        return None
