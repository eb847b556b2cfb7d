"""Random histories of training beside requests, which must not notice it."""

import random
from dataclasses import replace as replaced

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec.structs import replace

from serve.core.commands import AnswerTask
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
    JobFinished,
    JobLost,
    JobOverran,
    JobPrepared,
    JobSlowdownChanged,
    JobsTick,
    JobSubmitted,
    StepsDone,
)
from serve.core.jobs.types import NO_JOBS, Job, JobEnd, JobId, JobNeeds, JobRules
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Completed, Nanos
from tests.builders import MS, US
from tests.core.test_stateful import SLOWDOWNS, History
from tests.core.world import World

MEMORY = 100


def of_requests(commands):
    """Return the commands about requests, without what runs are told of jobs beside them."""
    found = []
    for command in commands:
        if isinstance(command, JobCommand):
            continue
        if isinstance(command, AnswerTask) and isinstance(command.outcome, Completed):
            timeline = replace(command.outcome.timeline, job_run_ns=Nanos(0))
            command = replace(command, outcome=replace(command.outcome, timeline=timeline))
        found.append(command)
    return found


class TrainingWorld(World):
    """Obeys commands about jobs, too, and tells a twin without jobs what else happens."""

    def __init__(self, params):
        super().__init__(params)
        self.twin = Scheduler(replaced(params, jobs=NO_JOBS))
        #: State of each job by its commands, and what those on workers hold.
        self.jobs = {}
        self.job_bytes = {}
        self.ended = {}

    def tell(self, event, at_ns=None):
        commands = super().tell(event, at_ns)
        if not isinstance(event, JobEvent):
            there = self.twin.handle(event, self.now if at_ns is None else at_ns)
            assert of_requests(commands) == of_requests(there), "requests noticed a job"
            assert self.scheduler.next_wakeup() == self.twin.next_wakeup()
        return commands

    def advance(self, duration_ns):
        end = self.now + duration_ns
        while (wake := self.scheduler.jobs_wake_ns) is not None and wake <= end:
            super().advance(max(0, wake - self.now))
            if self.scheduler.jobs_wake_ns == wake:
                self.tell(JobsTick())
                later = self.scheduler.jobs_wake_ns
                assert later is None or later > self.now, "would spin"
        super().advance(end - self.now)

    def _obey(self, command):
        if not isinstance(command, JobCommand):
            super()._obey(command)
            return
        job_id, states = command.job_id, self.jobs
        assert job_id not in self.ended, f"{command} after its end"
        if isinstance(command, PrepareJob):
            assert states[job_id] == "queued"
            assert "preparing" not in states.values(), "two are measured at once"
            states[job_id] = "preparing"
        elif isinstance(command, StartJob):
            assert states[job_id] == "ready"
            states[job_id] = "running"
            self.job_bytes[job_id] = command.reserve_bytes
        elif isinstance(command, PauseJob):
            assert states[job_id] == "running"
            states[job_id] = "paused"
        elif isinstance(command, ResumeJob):
            assert states[job_id] == "paused"
            states[job_id] = "running"
        elif isinstance(command, StopJob):
            self.off(job_id, "ready")
        else:
            assert isinstance(command, EndJob)
            self.job_bytes.pop(job_id, None)
            del states[job_id]
            self.ended[job_id] = command.outcome

    def off(self, job_id, state):
        """The job's process has ended."""
        assert self.jobs[job_id] in ("running", "paused")
        self.jobs[job_id] = state
        del self.job_bytes[job_id]

    def in_state(self, *states):
        return sorted(job_id for job_id, state in self.jobs.items() if state in states)

    def _check(self):
        super()._check()
        rules = self.params.jobs
        assert sum(self.job_bytes.values()) <= rules.memory_bytes
        assert len(self.job_bytes) <= rules.workers
        running = len(self.in_state("running"))
        executing = len(self.on_lane.keys() - self.stopped)
        assert executing + running <= self.params.device.slots, "a job has a request's core"
        if rules.slack == "strict" and running:
            assert not self.on_lane
        for job_id, state in self.jobs.items():
            assert self.scheduler.jobs.state(job_id).value == state

    def finish_everything(self):
        super().finish_everything()
        if self.scheduler.draining:
            return
        for _ in range(10 * len(self.jobs) + 10):
            if not self.jobs:
                break
            if preparing := self.in_state("preparing"):
                job_id = preparing[0]
                self.jobs[job_id] = "ready"
                self.tell(JobPrepared(job_id, needs(1)))
            elif running := self.in_state("running"):
                self.tell(JobFinished(running[0]))
            else:
                wake = self.scheduler.jobs_wake_ns
                assert wake is not None, "jobs are left and nothing will ever happen"
                self.advance(max(0, wake - self.now))
        assert not self.jobs


def needs(reserve):
    return JobNeeds(Bytes(reserve // 2), Bytes(reserve - reserve // 2), Nanos(MS))


class TrainingHistory(History):
    """Anything that may happen to requests, and to jobs beside them."""

    def make_world(self, chosen):
        drawn = random.Random(repr(replaced(chosen, unions=None)))
        rules = JobRules(
            workers=drawn.choice([0, 1, 2, 3]),
            memory_bytes=Bytes(MEMORY),
            policy=drawn.choice(sorted(POLICIES)),
            discipline=drawn.choice(["rolling", "barrier"]),
            slack=drawn.choice(["governed", "strict"]),
            slowdown=drawn.choice(SLOWDOWNS),
            switch_ns=Nanos(drawn.choice([0, 30 * US])),
        )
        return TrainingWorld(replaced(chosen, more_devices=(), jobs=rules))

    @rule(steps=st.integers(1, 3), priority=st.sampled_from([0, 1, 3]))
    def job_submitted(self, steps, priority):
        world = self.world
        job_id = JobId(len(world.jobs) + len(world.ended))
        world.jobs[job_id] = "queued"
        world.tell(JobSubmitted(Job(job_id, "gcn", "community", steps, priority)))

    @precondition(lambda self: self.world.in_state("preparing"))
    @rule(reserve=st.integers(0, MEMORY + 1), fails=st.sampled_from([False, False, True]))
    def job_measured(self, reserve, fails):
        (job_id,) = self.world.in_state("preparing")
        if fails:
            self.world.tell(JobFailed(job_id, "no such graph"))
            return
        self.world.jobs[job_id] = "ready"
        self.world.tell(JobPrepared(job_id, needs(reserve)))
        assert (job_id in self.world.ended) == (reserve > MEMORY)

    @precondition(lambda self: self.world.job_bytes)
    @rule(data=st.data(), steps=st.integers(0, 3))
    def job_gets_on(self, data, steps):
        self.world.tell(StepsDone(data.draw(st.sampled_from(sorted(self.world.job_bytes))), steps))

    @precondition(lambda self: self.world.job_bytes)
    @rule(data=st.data(), what=st.sampled_from(["finished", "failed", "overran", "lost"]))
    def job_off_its_worker(self, data, what):
        world = self.world
        job_id = data.draw(st.sampled_from(sorted(world.job_bytes)))
        had_all = world.job_bytes[job_id] == MEMORY
        if what in ("overran", "lost"):
            world.off(job_id, "ready")
        world.tell(
            {
                "finished": JobFinished(job_id),
                "failed": JobFailed(job_id, "raised"),
                "overran": JobOverran(job_id, "asked for more"),
                "lost": JobLost(job_id, 0),
            }[what]
        )
        if what in ("finished", "failed") or (what == "overran" and had_all):
            end = JobEnd.DONE if what == "finished" else JobEnd.FAILED
            assert world.ended[job_id].end is end

    @precondition(lambda self: self.world.jobs or self.world.ended)
    @rule(data=st.data())
    def job_cancelled(self, data):
        world = self.world
        job_id = data.draw(st.sampled_from(sorted({*world.jobs, *world.ended})))
        ended_before = job_id in world.ended
        commands = world.tell(JobCancelled(job_id))
        if not ended_before:
            assert world.ended[job_id].end is JobEnd.CANCELLED
        else:
            assert not any(getattr(command, "job_id", None) == job_id for command in commands)

    @rule(slowdown=st.sampled_from(SLOWDOWNS))
    def job_slowdown_changed(self, slowdown):
        self.world.tell(JobSlowdownChanged(slowdown))


TrainingHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTrainingHistory = TrainingHistory.TestCase
