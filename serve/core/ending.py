"""Ends of tasks: the outcome of one that ran to its end, and giving one up."""

from serve.core.commands import StopTask
from serve.core.lifecycle import Cause
from serve.core.state.device_state import Board
from serve.core.state.record import Record
from serve.core.state.shared_counts import Totals
from serve.core.state.tasks import Tasks
from serve.core.types import Completed, Nanos, Outcome, Placement, Timeline, Usage


def completed(
    record: Record, usage: Usage, board: Board, totals: Totals, now_ns: Nanos
) -> Completed:
    """Return the outcome of a record that finished now and is still on its lane."""
    group, run = record.group, record.run
    assert group is not None
    assert group.group_id is not None
    assert run is not None
    arrived_ns = record.task.arrived_ns
    timeline = Timeline(
        arrived_ns=arrived_ns,
        prepare_started_ns=record.prepare_started_ns,
        prepared_ns=record.prepared_ns,
        launched_ns=run.launched_ns,
        finished_ns=now_ns,
        prepare_exposed_ns=record.prepare_exposed_ns,
        backlog_ns=record.backlog_ns,
        suspended_ns=run.suspended_ns if run.executing else run.stood_ns(now_ns),
        co_run_ns=board.co_run_ns(run, now_ns),
        job_run_ns=board.job_time.beside_ns(run, now_ns),
        overloaded=totals.demand.exceeded(
            record.target_class, record.left_before_ns, arrived_ns, now_ns, totals.slots
        ),
    )
    placement = Placement(
        run.lane_id,
        group.group_id,
        group.size,
        run.co_runners,
        record.attempt,
        len(run.members),
        record.alone,
    )
    return Completed(timeline, placement, usage)


def give_up(tasks: Tasks, record: Record, cause: Cause, outcome: Outcome) -> None:
    """Answer the record without a result, and stop its run when no client waits for it."""
    tasks.step(record, cause, outcome)
    run = record.run
    if run is None or run.stopping or not all(r.state.answered for r in run.members):
        return
    run.stopping = True
    tasks.out.append(StopTask(run.task_id, run.lane_id))
