"""Trained weights become versions of their model, each whole or not at all."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from serve.server.training.held_job import HeldJob
from serve.server.training.job_work import next_version


class Publisher:
    """Chooses the versions of jobs, and has them appear. Its methods wait for disks."""

    def __init__(self, jobs: Mapping[int, HeldJob], changed: threading.Condition) -> None:
        """`changed` holds the driver's lock, and is told when it is known what became of a job."""
        self._jobs, self._changed = jobs, changed
        self._choosing = threading.Lock()
        #: A job's file is written as the job stands then.
        self._keeping = threading.Lock()

    def keep(self, job: HeldJob) -> None:
        """Write how the job stands; raises OSError."""
        with self._keeping:
            job.folder.keep(job.as_file())

    def publish(self, job: HeldJob, is_over: Callable[[], bool], models: Path) -> bool:
        """Publish the job's weights in the model's folder, unless it is over before.

        `is_over` is asked under the lock, just before the version appears. Raises OSError.
        """

        def begin() -> bool:
            with self._changed:
                job.publishing = not is_over()
                return job.publishing

        published = job.folder.published_as(models, job.version)
        if not published and (models / str(job.version)).exists():
            job.version = 0  # somebody else's came first
        try:
            if not job.version:
                self._choose_version(job)
            published = published or job.folder.publish(models, job.version, begin)
        finally:
            with self._changed:
                job.publishing, job.published = False, published
                self._changed.notify_all()
        return published

    def _choose_version(self, job: HeldJob) -> None:
        """Choose a version that no other job chooses, and keep it; raises OSError."""
        assert job.spec is not None
        with self._choosing:
            with self._changed:
                others = [*self._jobs.values()]
            job.version = next_version(job.spec, others)
            # Known before it is there: a server that starts again publishes it once.
            self.keep(job)
