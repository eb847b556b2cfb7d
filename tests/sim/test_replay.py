"""Journals: what is written is read back, parity holds, and recordings tell what the device did."""

from dataclasses import replace

import pytest

from serve.core.commands import PrepareTask
from serve.core.events import LaneReady, TaskArrived, TaskFinished, TaskOverran, TaskPrepared
from serve.core.policies import POLICIES
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, LaneId, Nanos, TaskEstimate, TaskId
from serve.errors import ConfigError
from serve.journal import (
    Step,
    commands_of,
    decode,
    encode_commands,
    encode_header,
    encode_left,
    encode_step,
)
from serve.obs.journal import JournalWriter
from serve.sim.device import DeviceModel
from serve.sim.engine import Simulation, simulate
from serve.sim.replay import first_difference, recorded
from tests.builders import MS, US, params, task, usage
from tests.sim.test_engine import mixed, offered


class Journaling(Scheduler):
    """Keeps the journal a live server would write."""

    def __init__(self, chosen):
        super().__init__(chosen)
        self.lines = [encode_header(chosen)]

    def handle(self, event, now_ns):
        commands = super().handle(event, now_ns)
        self.lines.append(encode_step(now_ns, event, commands))
        return commands


def chosen(policy="slack", discipline="preemptive", **others):
    return params(
        policy=policy, discipline=discipline, lanes=6, parallelism=2, can_suspend=True,
        budget=1 << 40, **others,
    )  # fmt: skip


def lines_of(requests, model=None, **choices):
    """The lines of a simulated run's journal."""
    scheduler = Journaling(chosen(**choices))
    simulation = Simulation(scheduler, model or DeviceModel())
    simulation.run(requests)
    left = [encode_left(row.answered_ns, row.task.task_id) for row in simulation.answered]
    return [*scheduler.lines, *left]


def journal_of(requests, model=None, **choices):
    return decode(lines_of(requests, model, **choices))


@pytest.mark.parametrize("discipline", ["barrier", "rolling", "preemptive"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_events_bring_the_same_commands(policy, discipline):
    journal = journal_of(mixed(0.9, 300, 2, seed=3), policy=policy, discipline=discipline)
    assert sum(step.commands != b"[]" for step in journal.steps) > 300
    assert first_difference(journal) is None


def test_what_was_estimated_of_unions_is_replayed_too(tmp_path):
    def unions(model, sizes):
        if len(sizes) == 1:
            return None
        run_ns = Nanos(len(sizes) * MS // 2)
        return TaskEstimate(Bytes(512), Bytes(512 * len(sizes)), run_ns, run_ns)

    writer = JournalWriter(tmp_path / "journal.jsonl")

    class Watched(Scheduler):
        def handle(self, event, now_ns):
            commands = super().handle(event, now_ns)
            writer.step(now_ns, event, commands)
            return commands

    simulation = Simulation(Watched(writer.begin(chosen(unions=unions))), DeviceModel())
    simulation.run([offered(number, 2, number / 100) for number in range(60)])
    for row in simulation.answered:
        writer.left(row.answered_ns, row.task.task_id)
    writer.close()
    with writer.path.open("rb") as lines:
        journal = decode(lines)
    merged = [
        fields["companions"]
        for step in journal.steps
        for name, fields in commands_of(step)
        if name == "LaunchTask" and fields["companions"]
    ]
    assert merged
    assert first_difference(journal) is None
    assert first_difference(replace(journal, merges=False)) is not None
    assert len(recorded(journal).requests) == 60


def test_another_scheduler_is_found_out_at_its_first_other_command():
    journal = journal_of(mixed(0.9, 300, 2, seed=3))
    found = first_difference(replace(journal, params=replace(journal.params, policy="fifo")))
    assert found is not None
    steps = list(journal.steps)
    assert steps[found.index].event == found.event
    assert found.recorded == steps[found.index].commands != found.replayed


def test_a_journal_is_read_back_and_a_cut_last_line_is_left_out():
    commands = [PrepareTask(TaskId(1))]
    lines = [
        encode_header(chosen()),
        encode_step(5, LaneReady(LaneId(0)), commands),
        encode_step(6, TaskPrepared(TaskId(1)), [])[:-9],
    ]
    journal = decode(lines)
    assert journal.params == chosen()
    assert journal.rows == (Step(Nanos(5), LaneReady(LaneId(0)), encode_commands(commands)),)


@pytest.mark.parametrize(
    ("line", "told"),
    [(b'{"at_ns":1,"event":"Nonsense"}\n', "line 2: unknown event 'Nonsense'"),
     (b"no json\n", "line 2"),
     (b'{"at_ns":1,"event":"LaneReady","fields":{}}\n', "line 2: .*lane_id")],
)  # fmt: skip
def test_a_line_that_is_wrong_is_named(line, told):
    with pytest.raises(ConfigError, match=told):
        decode([encode_header(chosen()), line])


def test_something_else_is_no_journal():
    with pytest.raises(ConfigError, match="line 1"):
        decode([])
    with pytest.raises(ConfigError, match="'gnnserve-journal-9'"):
        decode([encode_header(chosen()).replace(b"journal-1", b"journal-9")])


def test_a_recording_finds_what_the_device_did():
    model = DeviceModel(slowdown=(1.0, 1.5), launch_ns=Nanos(200 * US))
    asked = mixed(0.5, 1500, 2, seed=1)
    found = recorded(journal_of(asked, model))
    assert len(found.requests) == 1500
    assert found.device.slowdown == pytest.approx((1.0, 1.5), rel=0.05)
    ratios = [was.run_ns / truth.run_ns for was, truth in zip(found.requests, asked, strict=True)]
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, rel=0.05)


def test_a_recording_simulated_again_misses_what_the_run_missed():
    model = DeviceModel(slowdown=(1.0, 1.4))
    asked = mixed(0.7, 1500, 2, seed=2)
    found = recorded(journal_of(asked, model))
    live = simulate(asked, chosen(), model).violation_rate
    again = simulate(found.requests, chosen(), found.device).violation_rate
    assert live > 0.02
    assert again == pytest.approx(live, abs=0.03)


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_needed_too_much_is_beside_others_while_it_runs_only(again):
    scheduler = Journaling(params(lanes=2))
    for lane in (0, 1):
        scheduler.handle(LaneReady(LaneId(lane)), Nanos(0))

    def tell(event, at_ms):
        return scheduler.handle(event, Nanos(int(at_ms * MS)))

    def finish(number, lane, run_ms, at_ms):
        tell(TaskFinished(TaskId(number), LaneId(lane), usage(run_ms * MS)), at_ms)
        scheduler.lines.append(encode_left(Nanos(at_ms * MS), TaskId(number)))

    tell(TaskArrived(task(0), Nanos(MS)), 1)
    tell(TaskOverran(TaskId(0), LaneId(0), "asked for more"), 2)
    if again:
        tell(TaskPrepared(TaskId(0)), 3)
        finish(0, 0, 1, 4)
    tell(TaskArrived(task(1, run_ns=10 * MS, arrived_ns=5 * MS), Nanos(5 * MS)), 5)
    finish(1, 0, 10, 15)
    found = recorded(decode(scheduler.lines))
    assert [one.task.task_id for one in found.requests] == [1]
    assert found.run_ratios == (1.0,), "alone"


def test_a_journal_without_a_run_has_no_recording():
    with pytest.raises(ConfigError, match="no request"):
        recorded(journal_of([]))
