"""May this task enter? Everything here is decided before the task is accepted."""

from serve.core.types import Bytes, Nanos, Rejected, RejectReason, Task

#: A client told to try again waits at least this long.
MIN_RETRY_NS = Nanos(1_000_000)


def admit(
    task: Task,
    *,
    budget_bytes: Bytes,
    unanswered: int,
    max_queue: int,
    has_share: bool,
    urgent_ns: Nanos | None,
    backlog_ns: Nanos,
    draining: bool,
) -> Rejected | None:
    """Return None when the task may enter, else the rejection.

    `unanswered` counts accepted tasks without an answer; with `has_share` a full queue still takes
    the task, as its tenant has less than its share of it. `urgent_ns`, None for not now, is the
    work per lane of targets no longer than the task's: behind more than its slack it is shed.
    `backlog_ns` is all work per lane, and so about when the queue will have emptied.
    """
    if draining:
        return Rejected(RejectReason.DRAINING, "the server is stopping and takes no new requests")
    if message := task.lacks(budget_bytes):
        return Rejected(RejectReason.TOO_BIG, message)
    if unanswered >= max_queue and not has_share:
        message = f"{unanswered} requests are waiting or running, at most {max_queue} may be"
        retry_ns = Nanos(max(MIN_RETRY_NS, backlog_ns))
        return Rejected(RejectReason.QUEUE_FULL, message, retry_ns)
    slack_ns = task.qos.target_ns - task.estimate.solo_ns
    if urgent_ns is not None and urgent_ns > slack_ns:
        message = (
            f"overloaded: {urgent_ns} ns of work as urgent are waiting for each lane, "
            f"the target leaves {slack_ns} ns"
        )
        return Rejected(RejectReason.QUEUE_FULL, message, Nanos(max(MIN_RETRY_NS, urgent_ns)))
    return None
