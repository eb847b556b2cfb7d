"""A job in the memory of the server, and the process that trains it now."""

import contextlib
import os
import signal
from dataclasses import dataclass

import msgspec

from serve.core.jobs.types import Job, JobId, JobNeeds
from serve.models.repository import ModelSpec
from serve.server import clock
from serve.server.lanes.calibrators import Calibrator
from serve.server.training.job_disk import JobDisk
from serve.server.training.job_facts import JobStatus
from serve.server.training.job_folder import JobFolder, KeptJob


@dataclass(slots=True, eq=False)
class JobRun:
    """Process of a job, from the command to start it on. Belongs to the driver's lock."""

    #: None until it has started.
    process: Calibrator | None = None
    #: Since when it stands, None while it may go on.
    paused_ns: int | None = None
    #: It was told to end: nothing that it says counts.
    over: bool = False
    #: The core it was pinned to last; None for none.
    core: int | None = None

    def began(self, process: Calibrator) -> None:
        """Take in the process, which ends or stands at once if that was asked meanwhile."""
        self.process = process
        if self.over:
            process.kill()
        elif self.paused_ns is not None:
            self._signal(signal.SIGSTOP)

    def pause(self) -> None:
        """Stop the process where it is."""
        self.paused_ns = clock.now_ns()
        self._signal(signal.SIGSTOP)

    def resume(self) -> int:
        """Let the process go on; returns for how long it stood, in ns."""
        since_ns, self.paused_ns = self.paused_ns, None
        self._signal(signal.SIGCONT)
        return 0 if since_ns is None else clock.now_ns() - since_ns

    def end(self) -> None:
        """Kill the process."""
        self.over = True
        if self.process is not None:
            self.process.kill()

    def move_to(self, core: int) -> None:
        """Have the process run on that core alone."""
        if self.process is not None and self.process.pid is not None:
            self.core = core
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self.process.pid, (core,))

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


@dataclass(slots=True, eq=False)
class HeldJob:
    """A job, ended or not."""

    file: KeptJob
    folder: JobFolder
    #: What its processes load; None for one that had ended when the server started.
    spec: ModelSpec | None = None
    needs: JobNeeds | None = None
    run: JobRun | None = None
    #: The process that measures its step, until the thread that waits for it has ended.
    measuring: JobRun | None = None
    #: Watches over what its processes write; None before its graph is kept.
    disk: JobDisk | None = None
    epochs_done: int = 0
    #: Those that its checkpoint holds.
    epochs_kept: int = 0
    loss: float = 0.0
    epoch_ns: int = 0
    accuracy: float = 0.0
    #: Version that it is published as; 0 before one is chosen.
    version: int = 0
    #: Its version is about to appear: too late for a cancellation, unless that fails.
    publishing: bool = False
    #: Its version is there.
    published: bool = False
    #: Empty before its end.
    end: str = ""
    message: str = ""
    #: Its step is measured, or was.
    preparing: bool = False
    #: Steps of its run that are counted already.
    counted: int = 0

    @property
    def job_id(self) -> JobId:
        """The id."""
        return JobId(self.file.job_id)

    def submitted(self) -> Job:
        """Return the job as the scheduler is to know it."""
        file = self.file
        return Job(
            self.job_id, file.model, file.graph, file.epochs, file.priority, self.epochs_kept
        )

    def as_file(self) -> KeptJob:
        """Return the job as it is kept."""
        return msgspec.structs.replace(
            self.file, version=self.version, end=self.end, message=self.message,
            epochs_done=self.epochs_done, loss=self.loss, accuracy=self.accuracy,
        )  # fmt: skip

    def facts(self) -> JobStatus:
        """Return the job as it stands. Under the lock, unless it has ended."""
        file, needs = self.file, self.needs
        return JobStatus(
            job_id=file.job_id, model=file.model, graph=file.graph, epochs=file.epochs,
            epochs_done=self.epochs_done, state=self.state, loss=self.loss,
            epoch_ns=self.epoch_ns, accuracy=self.accuracy,
            version=self.version if self.published else 0,
            message=self.message, reserve_bytes=0 if needs is None else needs.reserve_bytes,
        )  # fmt: skip

    @property
    def state(self) -> str:
        """State, as ``JobStatus`` has it."""
        if self.end:
            return self.end
        if self.run is not None:
            return "running" if self.run.paused_ns is None else "paused"
        if self.needs is not None:
            return "ready"
        return "preparing" if self.preparing else "queued"
