"""Training jobs in the scheduler: from submission to their end, and when they give way."""

from dataclasses import replace

import pytest

from serve.core.commands import LaunchTask
from serve.core.events import (
    DrainStarted,
    LaneReady,
    SlowdownChanged,
    TaskArrived,
    TaskFinished,
    Tick,
)
from serve.core.invariants import check_invariants
from serve.core.jobs.commands import (
    EndJob,
    PauseJob,
    PrepareJob,
    ResumeJob,
    StartJob,
    StopJob,
)
from serve.core.jobs.events import (
    JobCancelled,
    JobFailed,
    JobFinished,
    JobLost,
    JobOverran,
    JobPrepared,
    JobsTick,
    JobSubmitted,
    StepsDone,
)
from serve.core.jobs.lifecycle import TRANSITIONS, JobState, mermaid
from serve.core.jobs.types import Job, JobEnd, JobId, JobNeeds, JobOutcome, JobRules
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, LaneId, Nanos, TaskId
from serve.errors import InvariantViolation
from tests.builders import MS, US, params, task, usage

RULES = JobRules(workers=2, memory_bytes=Bytes(100), switch_ns=Nanos(0), slack="governed")


class Told:
    """A scheduler with its lanes up, at a time that only passes when told."""

    def __init__(self, rules=RULES, lanes=2, **choices):
        self.scheduler = Scheduler(params(jobs=rules, lanes=lanes, **choices))
        self.now = Nanos(0)
        for lane in range(lanes):
            self.tell(LaneReady(LaneId(lane)))

    def tell(self, event, after_ns=0):
        self.now = Nanos(self.now + after_ns)
        commands = self.scheduler.handle(event, self.now)
        check_invariants(self.scheduler)
        return commands

    def submit(self, job_id, reserve=40, priority=0, steps=10):
        """Submit and prepare a job; what came of it."""
        job = Job(JobId(job_id), "gcn", "community", steps, priority)
        assert PrepareJob(JobId(job_id)) in self.tell(JobSubmitted(job))
        return self.tell(JobPrepared(JobId(job_id), needs(reserve)))

    def arrive(self, number, run_ns=MS, **fields):
        given = task(number, run_ns=run_ns, prepare_ns=0, arrived_ns=self.now, **fields)
        return self.tell(TaskArrived(given, self.now))

    def finish(self, number, lane=0, after_ns=0):
        return self.tell(TaskFinished(TaskId(number), LaneId(lane), usage()), after_ns)

    def state(self, job_id):
        return self.scheduler.jobs.state(JobId(job_id))


def needs(reserve):
    return JobNeeds(Bytes(reserve // 2), Bytes(reserve - reserve // 2), Nanos(MS))


def kinds(commands):
    return [type(command) for command in commands]


def test_from_submission_to_the_end():
    told = Told()
    assert told.submit(0) == [StartJob(JobId(0), Bytes(40))]
    assert told.tell(StepsDone(JobId(0), 9)) == []
    assert told.scheduler.jobs.records[0].steps_done == 9
    assert told.tell(JobFinished(JobId(0))) == [EndJob(JobId(0), JobOutcome(JobEnd.DONE))]
    assert told.state(0) is JobState.ENDED
    assert told.state(1) is None
    assert told.tell(JobCancelled(JobId(0))) == []
    with pytest.raises(InvariantViolation, match="never submitted"):
        told.tell(StepsDone(JobId(1), 1))


def test_the_core_that_a_request_needs_is_given_back_before_its_launch():
    told = Told()
    told.submit(0)
    told.submit(1)
    assert told.scheduler.jobs.running_count == 2
    # The job that started last gives way; the second request takes the other core.
    assert kinds(told.arrive(0)) == [PauseJob, LaunchTask]
    assert told.state(1) is JobState.PAUSED
    assert kinds(told.arrive(1)) == [PauseJob, LaunchTask]
    assert told.scheduler.jobs.running_count == 0
    # What a paused job said just before it stopped is taken in.
    assert told.tell(StepsDone(JobId(0), 3)) == []
    assert ResumeJob not in kinds(told.finish(0)), "the answer comes first"
    assert told.scheduler.jobs_wake_ns == told.now
    assert told.tell(JobsTick()) == [ResumeJob(JobId(0))]
    told.finish(1, lane=1)
    assert told.tell(JobsTick()) == [ResumeJob(JobId(1))]


def test_a_request_that_comes_before_the_tick_keeps_the_job_where_it_is():
    told = Told(lanes=1)
    told.submit(0)
    told.arrive(0)
    told.finish(0)
    told.arrive(1)
    assert told.tell(JobsTick()) == []
    assert told.state(0) is JobState.PAUSED


def test_workers_and_memory_bound_what_runs():
    told = Told(lanes=3)
    told.submit(0, reserve=60)
    assert told.submit(1, reserve=60) == [], "no memory is left"
    assert told.submit(2, reserve=30) == [StartJob(JobId(2), Bytes(30))]
    assert told.submit(3, reserve=5) == [], "no worker is left"
    assert kinds(told.tell(JobFinished(JobId(2)))) == [EndJob, StartJob]
    assert told.state(3) is JobState.RUNNING
    told.tell(JobFinished(JobId(3)))
    assert told.tell(JobFinished(JobId(0))) == [
        EndJob(JobId(0), JobOutcome(JobEnd.DONE)),
        StartJob(JobId(1), Bytes(60)),
    ]


def test_none_passes_another_that_waits_for_memory():
    told = Told(replace(RULES, policy="fifo"), lanes=3)
    told.submit(0, reserve=60)
    assert told.submit(1, reserve=60) == []
    assert told.submit(2, reserve=10) == []


def test_behind_a_barrier_the_next_group_waits_for_all_of_the_one_before():
    told = Told(replace(RULES, policy="fifo", discipline="barrier"), lanes=3)
    assert told.submit(0, reserve=30) == [StartJob(JobId(0), Bytes(30))]
    assert told.submit(1, reserve=30) == []
    assert told.submit(2, reserve=30) == []
    told.tell(JobFinished(JobId(0)))
    assert told.scheduler.jobs.running_count == 2
    assert told.submit(3, reserve=10) == []
    told.tell(JobFinished(JobId(2)))
    assert told.state(3) is JobState.READY
    assert StartJob(JobId(3), Bytes(10)) in told.tell(JobFinished(JobId(1)))


def test_more_than_there_is_for_all_jobs_fails():
    told = Told()
    (end,) = told.submit(0, reserve=101)
    assert end.outcome.end is JobEnd.FAILED
    assert end.outcome.message == "needs 101 bytes, there are 100 for training"
    none = Told(JobRules())
    (end,) = none.tell(JobSubmitted(Job(JobId(0), "gcn", "community", 1)))
    assert end.outcome == JobOutcome(JobEnd.FAILED, "there are no workers for training")


def test_a_lost_process_starts_again_from_its_checkpoint():
    told = Told()
    told.submit(0)
    told.tell(StepsDone(JobId(0), 7))
    assert told.tell(JobLost(JobId(0), 5)) == [StartJob(JobId(0), Bytes(40))]
    assert told.scheduler.jobs.records[0].steps_done == 5
    told.tell(JobLost(JobId(0), 5))
    # A step that was never done before says that it gets on.
    told.tell(StepsDone(JobId(0), 8))
    told.tell(JobLost(JobId(0), 5))
    told.tell(JobLost(JobId(0), 5))
    (end,) = told.tell(JobLost(JobId(0), 5, "the disk is full"))
    assert end.outcome.end is JobEnd.FAILED
    assert end.outcome.message == (
        "it was lost 3 times without a further step in between: the disk is full"
    )


def test_a_job_that_is_always_lost_at_the_same_step_ends():
    told = Told()
    told.submit(0, steps=100)
    for _ in range(2):
        told.tell(StepsDone(JobId(0), 7))
        assert told.tell(JobLost(JobId(0), 5)) == [StartJob(JobId(0), Bytes(40))]
    told.tell(StepsDone(JobId(0), 8))  # one more than ever
    for _ in range(2):
        told.tell(JobLost(JobId(0), 5))
        told.tell(StepsDone(JobId(0), 8))
    (end,) = told.tell(JobLost(JobId(0), 5))
    assert end == EndJob(
        JobId(0),
        JobOutcome(JobEnd.FAILED, "it was lost 3 times without a further step in between"),
    )


def test_an_overrun_step_is_tried_again_with_all_memory_once():
    told = Told()
    told.submit(0)
    told.submit(1)
    assert told.tell(JobOverran(JobId(0), "asked for 50")) == [], "the other holds some of it"
    told.tell(JobFinished(JobId(1)))
    assert told.scheduler.jobs.records[0].reserve_bytes == 100
    assert told.state(0) is JobState.RUNNING
    (end,) = told.tell(JobOverran(JobId(0), "asked for 120"))
    assert end.outcome.message == "asked for 120; there are 100 bytes for training"


@pytest.mark.parametrize("moment", ["queued", "preparing", "ready", "running", "paused"])
def test_a_job_can_be_cancelled_at_any_time(moment):
    told = Told()
    if moment == "ready":
        told.arrive(0)
        told.arrive(1)
    if moment in ("queued", "preparing"):
        told.tell(JobSubmitted(Job(JobId(0), "gcn", "community", 1)))
    cancelled = JobId(0)
    if moment == "queued":
        cancelled = JobId(1)
        told.tell(JobSubmitted(Job(cancelled, "gcn", "community", 1)))
    if moment in ("ready", "running", "paused"):
        told.submit(0)
    if moment == "paused":
        told.arrive(0)
        told.arrive(1)
    assert told.state(cancelled).value == moment
    end = EndJob(cancelled, JobOutcome(JobEnd.CANCELLED))
    stops = moment in ("running", "paused")
    assert told.tell(JobCancelled(cancelled)) == [StopJob(cancelled)] * stops + [end]
    assert told.tell(JobPrepared(cancelled, needs(10))) == []
    assert told.tell(JobFailed(cancelled, "late")) == []


def test_a_drain_ends_processes_and_starts_none():
    told = Told()
    told.submit(0)
    told.arrive(0)
    assert told.tell(DrainStarted()) == [StopJob(JobId(0))]
    assert told.state(0) is JobState.READY
    assert StartJob not in kinds(told.finish(0))
    assert told.scheduler.drained


def test_urgent_jobs_start_first():
    told = Told(replace(RULES, workers=1))
    told.submit(0)
    told.submit(1)
    told.submit(2, priority=1)
    told.tell(JobFinished(JobId(0)))
    assert told.state(2) is JobState.RUNNING


def test_a_job_goes_on_once_no_request_is_expected_for_some_switches():
    told = Told(replace(RULES, switch_ns=Nanos(100 * US)), lanes=1)
    told.submit(0)
    for number in range(100):
        told.arrive(number, run_ns=50 * US)
        assert ResumeJob not in kinds(told.finish(number, after_ns=60 * US)) or number < 50
    # Requests come every 60 µs; four switches take 400.
    assert told.state(0) is JobState.PAUSED
    wake_ns = told.scheduler.jobs.wake_ns
    assert wake_ns - told.now == 340 * US
    assert told.tell(JobsTick(), 339 * US) == []
    assert told.tell(JobsTick(), 1 * US) == [ResumeJob(JobId(0))]
    assert told.scheduler.jobs.wake_ns is None


def test_a_request_that_waits_has_jobs_stop_when_its_time_runs_short():
    """Memory keeps it waiting, so a core is left; beside a job it would take twice as long."""
    told = Told(replace(RULES, slowdown=(1.0, 2.0)), budget=10, policy="fifo")
    told.arrive(0, run_ns=100 * MS, reserve=8, target_ns=1000 * MS)
    told.submit(0)
    assert told.state(0) is JobState.RUNNING
    assert told.arrive(1, run_ns=10 * MS, reserve=8, target_ns=50 * MS) == []
    wake_ns = told.scheduler.jobs.wake_ns
    assert wake_ns == 50 * MS - 22 * MS + 1
    assert told.tell(JobsTick(), wake_ns - 1) == []
    assert told.tell(JobsTick(), 1) == [PauseJob(JobId(0))]
    # Late whatever happens, it is no reason any more.
    told.tell(Tick(), 40 * MS)
    assert told.tell(JobsTick()) == [ResumeJob(JobId(0))]


def test_a_job_counts_as_one_more_run_where_runs_slow_one_another():
    told = Told(slowdown=(1.0, 1.5))
    told.submit(0)
    told.arrive(0, run_ns=10 * MS, target_ns=40 * MS)
    assert told.state(0) is JobState.RUNNING
    told.finish(0, after_ns=10 * MS)
    assert PauseJob in kinds(told.arrive(1, run_ns=10 * MS, target_ns=16 * MS))
    told.finish(1, after_ns=10 * MS)
    assert told.tell(JobsTick()) == [ResumeJob(JobId(0))]
    told.tell(SlowdownChanged((1.0, 1.1)))
    assert PauseJob not in kinds(told.arrive(2, run_ns=10 * MS, target_ns=16 * MS))


def test_every_state_is_reached_and_leads_to_the_end():
    steps = {(state, target) for (state, _), target in TRANSITIONS.items()}
    reached, ending = {JobState.QUEUED}, {JobState.ENDED}
    for _ in JobState:
        reached |= {target for state, target in steps if state in reached}
        ending |= {state for state, target in steps if target in ending}
    assert reached == ending == set(JobState)
    assert "running --> paused: PauseJob" in mermaid()
