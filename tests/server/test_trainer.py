"""Jobs without their processes: a cancellation while a version is published."""

import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.config import TrainingConfig
from serve.core.jobs.commands import EndJob, PrepareJob, StartJob
from serve.core.jobs.events import (
    JobCancelled,
    JobFailed,
    JobFinished,
    JobLost,
    JobSubmitted,
)
from serve.core.jobs.types import JobEnd, JobNeeds, JobOutcome
from serve.core.types import Bytes, Nanos
from serve.errors import QueueFull
from serve.ipc.messages import JobTrained
from serve.server.training import job_folder, job_work, trainer
from serve.server.training.job_disk import JobDisk
from serve.server.training.job_facts import JobCall
from serve.server.training.trainer import Trainer

REPOSITORY = Path(__file__).parents[2] / "configs" / "models"


class World:
    """A trainer whose processes have trained at once, and which ends what it is told to end."""

    def __init__(self, path):
        self.models = path / "models"
        shutil.copytree(REPOSITORY / "gcn", self.models / "gcn")
        self.lock, self.told = threading.Lock(), []
        #: Open: the process says that it has trained; a model is loaded.
        self.trained, self.loaded = threading.Event(), threading.Event()
        #: A process was told to end.
        self.killed = threading.Event()
        self.trainer = Trainer(
            TrainingConfig(workers=2),
            path / "jobs",
            SimpleNamespace(root=self.models),
            SimpleNamespace(),
            self,
            self.lock,
            self._tell,
            lambda name: self.loaded.wait(PATIENCE_S),
        )

    def _tell(self, event):
        self.told.append(type(event))
        ends = {JobCancelled: JobEnd.CANCELLED, JobFinished: JobEnd.DONE, JobLost: JobEnd.FAILED}
        if (end := ends.get(type(event))) is not None:
            self.trainer.carry_out(EndJob(event.job_id, JobOutcome(end)))

    @contextmanager
    def start(self, domain, folder):
        def receive(timeout_s):
            self.trained.wait(PATIENCE_S)
            return JobTrained(0.9)

        send, kill = (lambda _: None), self.killed.set
        yield SimpleNamespace(pid=None, send=send, receive=receive, kill=kill)

    def free_cores(self):
        return []

    def prepare(self):
        """Have a job measured; returns its number."""
        job_id = self.trainer._take(JobCall("gcn", "community", 3), 1).job_id
        with self.lock:
            assert self.trainer.carry_out(PrepareJob(job_id)) is None
        return job_id

    def train(self, weights=b"weights"):
        """Start a job; returns its number."""
        job_id = self.trainer._take(JobCall("gcn", "community", 3), 1).job_id
        job = self.trainer._jobs[job_id]
        job.needs = JobNeeds(Bytes(1), Bytes(1), Nanos(1))
        job.disk = JobDisk(job.folder, 1 << 20)
        (job.folder.shared / "weights.safetensors").write_bytes(weights)
        with self.lock:
            self.trainer.carry_out(StartJob(job.job_id, Bytes(2)))
        return job_id

    def facts(self, job_id):
        return next(job for job in self.trainer.jobs() if job.job_id == job_id)

    @property
    def versions(self):
        return sorted(path.name for path in (self.models / "gcn").iterdir() if path.is_dir())


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.trained.set()
    made.loaded.set()
    made.trainer.stop()


def job_threads():
    return [one for one in threading.enumerate() if one.name.startswith("job-")]


def test_a_job_cancelled_before_its_version_appears_publishes_nothing(world, monkeypatch):
    copied = threading.Event()
    copy = job_folder.shutil.copyfileobj

    def slow_copy(*given):
        copy(*given)
        copied.set()
        assert cancelled.wait(PATIENCE_S)

    monkeypatch.setattr(job_folder.shutil, "copyfileobj", slow_copy)
    cancelled = threading.Event()
    world.trained.set()
    job_id = world.train()
    assert copied.wait(PATIENCE_S)
    found = world.trainer.cancel(job_id)
    cancelled.set()
    assert (found.state, found.version) == ("cancelled", 0)
    wait_for(lambda: not job_threads(), "the job's thread to end")
    assert world.versions == ["1"]
    assert not list((world.models / "gcn").glob(".*"))
    assert world.facts(job_id) == found


def test_a_job_cancelled_after_its_version_appeared_is_served_and_the_answer_says_so(world):
    world.trained.set()
    job_id = world.train()
    wait_for(lambda: world.facts(job_id).version == 2, "the version")
    found = world.trainer.cancel(job_id)
    assert (found.state, found.version) == ("running", 2)
    assert JobCancelled not in world.told
    world.loaded.set()
    wait_for(lambda: world.facts(job_id).ended, "the end")
    assert (world.facts(job_id).state, world.facts(job_id).version) == ("done", 2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancellation_waits_for_a_version_that_is_about_to_appear(world, monkeypatch, fails):
    world.loaded.set()
    world.trained.set()
    answers = []
    rename = os.replace

    def replace(source, target):
        if Path(target).name != "2":
            return rename(source, target)
        asking = threading.Thread(target=lambda: answers.append(world.trainer.cancel(1)))
        asking.start()
        if fails:
            raise OSError("the disk is full")
        return rename(source, target)

    monkeypatch.setattr(job_folder.os, "replace", replace)
    job_id = world.train()
    wait_for(lambda: answers and world.facts(job_id).ended, "an answer and the end")
    assert answers[0].version == world.facts(job_id).version == (0 if fails else 2)
    assert world.versions == (["1"] if fails else ["1", "2"])
    assert (world.facts(job_id).state == "done") != fails


def test_a_job_that_is_cancelled_while_it_is_measured_leaves_nothing(world, monkeypatch):
    begun, cancelled = threading.Event(), threading.Event()

    def keep_graph(folder, graph, seed):
        begun.set()
        assert cancelled.wait(PATIENCE_S)
        (folder.path / "graph.safetensors").write_bytes(b"graph")

    monkeypatch.setattr(job_work, "graph_for", lambda *given: None)
    monkeypatch.setattr(job_folder.JobFolder, "keep_graph", keep_graph)
    monkeypatch.setattr(trainer, "MOST_JOBS", 2)
    first = world.prepare()
    assert begun.wait(PATIENCE_S)
    assert world.trainer.cancel(first).state == "cancelled"
    second = world.prepare()
    assert world.trainer.cancel(second).state == "cancelled"
    # What is still done for them counts as they do.
    with pytest.raises(QueueFull):
        world.prepare()
    cancelled.set()
    assert world.killed.wait(PATIENCE_S)
    world.trained.set()
    wait_for(lambda: not job_threads(), "the threads of the jobs to end")
    for number in (first, second):
        kept = world.trainer._folder / str(number)
        assert [path.name for path in kept.iterdir()] == ["job.json"]
    world.prepare()


def test_a_job_whose_step_cannot_be_measured_fails_whatever_the_reason(world, monkeypatch):
    def measure(*given):
        raise MemoryError("no room for the graph")

    monkeypatch.setattr(job_work, "measure", measure)
    world.prepare()
    wait_for(lambda: JobFailed in world.told, "the failure")


def test_jobs_of_one_model_publish_versions_of_their_own(world):
    world.loaded.set()
    jobs = [world.train(b"first"), world.train(b"second")]
    world.trained.set()
    wait_for(lambda: all(world.facts(one).ended for one in jobs), "their ends")
    assert sorted(world.facts(one).version for one in jobs) == [2, 3]
    for number, weights in zip(jobs, (b"first", b"second"), strict=True):
        folder = world.models / "gcn" / str(world.facts(number).version)
        assert (folder / "weights.safetensors").read_bytes() == weights


def test_a_job_whose_loss_was_no_number_is_read_again(world):
    world.trainer.stop()
    folder = job_folder.JobFolder(world.trainer._folder / "1")
    folder.keep(job_folder.KeptJob(
        job_id=1, model="gcn", base_version=1, graph="community", epochs=3, learning_rate=0.1,
        seed=0, fresh=False, priority=0, end="failed", loss=float("nan"),
    ))  # fmt: skip
    world.trainer.start()
    assert world.facts(1).loss == 0.0


def test_a_new_job_takes_nothing_of_a_folder_that_cannot_be_read(tmp_path):
    kept = tmp_path / "jobs" / "7"
    kept.mkdir(parents=True)
    (kept / "job.json").write_text("{")
    trainer = World(tmp_path).trainer
    trainer.start()
    assert trainer._take(JobCall("gcn", "community", 3), 1).job_id == 8
    assert [path.name for path in kept.iterdir()] == ["job.json"]


@pytest.mark.parametrize("steps", ["-1", "9" * 30, "1e3"])
def test_a_checkpoint_of_impossible_steps_counts_as_none(tmp_path, steps):
    folder = job_folder.JobFolder(tmp_path)
    folder.shared.mkdir()
    path = folder.shared / "checkpoint.safetensors"
    save_file({"x": np.zeros(1)}, path, {"steps": steps})
    assert folder.steps_kept() == 0


def test_a_job_is_there_once_the_scheduler_knows_it(world, monkeypatch):
    keep = job_folder.JobFolder.keep
    seen = []

    def keep_and_look(folder, file):
        keep(folder, file)
        seen.append(world.trainer.jobs())

    monkeypatch.setattr(job_folder.JobFolder, "keep", keep_and_look)
    job_id = world.trainer._take(JobCall("gcn", "community", 3), 1).job_id
    assert seen == [()]
    assert world.trainer.cancel(job_id).state == "cancelled"
    assert world.told == [JobSubmitted, JobCancelled]
