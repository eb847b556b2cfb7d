"""Words for the end of a task: the error a client gets, the reason the report keeps."""

from serve.core.types import (
    Completed,
    Expired,
    Failed,
    FailReason,
    Outcome,
    Rejected,
    RejectReason,
    Withdrawn,
)
from serve.errors import (
    DeadlineExceeded,
    InvalidInput,
    InvariantViolation,
    ModelError,
    NotReady,
    QueueFull,
    RequestCancelled,
    ServeError,
    TooBig,
    UnknownName,
    VersionReplaced,
)

_FAILURES: dict[FailReason, type[ServeError]] = {
    FailReason.INVALID_INPUT: InvalidInput,
    FailReason.MODEL_ERROR: ModelError,
    FailReason.OUT_OF_MEMORY: TooBig,
    FailReason.NONFINITE: ModelError,
    FailReason.LANE_LOST: NotReady,
    FailReason.ROWS_LOST: NotReady,
    FailReason.QUARANTINED: NotReady,
    FailReason.TIME_LIMIT: DeadlineExceeded,
    FailReason.STOPPED: RequestCancelled,
}

#: Reasons of requests refused before they became tasks, where the class says more than the code.
_REFUSALS: dict[type[ServeError], str] = {
    InvalidInput: FailReason.INVALID_INPUT.value,
    UnknownName: "not_found",
    NotReady: "not_ready",
    VersionReplaced: "not_ready",
}


def error_of(outcome: Outcome) -> ServeError:
    """Return the error a client gets for a task that has no result."""
    match outcome:
        case Rejected(RejectReason.TOO_BIG, message):
            return TooBig(message)
        case Rejected(RejectReason.QUEUE_FULL | RejectReason.TENANT_LIMIT, message, retry_after_ns):
            return QueueFull(message, retry_after_ns or 0)
        case Rejected(RejectReason.BUSY, message):
            return QueueFull(message, 0)
        case Rejected(_, message):
            return NotReady(message)
        case Expired(stage):
            return DeadlineExceeded(f"the request's time limit passed while it was {stage}")
        case Withdrawn(stage):
            return RequestCancelled(f"cancelled by the client while {stage}")
        case Failed(reason, message):
            return _FAILURES[reason](message)
        case Completed():
            return InvariantViolation("a completed task has no output")


def reason_of(outcome: Outcome) -> str:
    """Return one word for the report; empty for a task that completed."""
    match outcome:
        case Completed():
            return ""
        case Rejected(reject, _):
            return str(reject.value)
        case Failed(fail, _):
            return str(fail.value)
        case Expired():
            return "deadline"
        case Withdrawn():
            return "cancelled"


def refusal_reason(error: ServeError) -> str:
    """Return one word for the report on a request refused before it became a task."""
    return _REFUSALS.get(type(error), error.code.word)
