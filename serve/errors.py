"""The errors that the server raises on purpose.

The tree, with each error's `code` in brackets; ``ErrorCode`` maps codes to gRPC statuses:

    ServeError [INTERNAL]
    ├── ConfigError [INVALID]          a mistake in a configuration file or a model's config
    ├── InvalidInput [INVALID]         a request is malformed: names tensor, index and rule
    ├── UnknownName [NOT_FOUND]        no model, version or graph has that name
    ├── NameTaken [EXISTS]             that name is taken
    ├── Mismatch [PRECONDITION]        two existing things do not fit each other: names both
    ├── NotReady [UNAVAILABLE]         loading, draining, or no lane left to run it
    ├── TooBig [EXHAUSTED]             the request needs more memory than the device has
    ├── QueueFull [EXHAUSTED]          try again later: carries `retry_after_ns`
    ├── DeadlineExceeded [DEADLINE]    the request's own time limit passed
    ├── RequestCancelled [CANCELLED]   the client went away
    ├── NotIdentified [UNAUTHENTICATED] no credential that the server accepts
    ├── NotPermitted [FORBIDDEN]       the credential does not allow this
    ├── ModelError [INTERNAL]          the model raised, or could not be loaded
    ├── Unsupported [UNIMPLEMENTED]    the server does not offer this
    └── InvariantViolation [INTERNAL]  a bug in the server: carries the task's story
"""

from enum import Enum


class ErrorCode(Enum):
    """Kind of failure: gnnserve's word, gRPC's name of the status, and the HTTP status.

    This is the one table of codes. Statuses of calls and of the HTTP port, names in the report and
    the client's errors derive from it.
    """

    INVALID = "invalid", "INVALID_ARGUMENT", 400
    NOT_FOUND = "not_found", "NOT_FOUND", 404
    EXISTS = "exists", "ALREADY_EXISTS", 409
    PRECONDITION = "precondition", "FAILED_PRECONDITION", 412
    UNAVAILABLE = "unavailable", "UNAVAILABLE", 503
    EXHAUSTED = "exhausted", "RESOURCE_EXHAUSTED", 429
    DEADLINE = "deadline", "DEADLINE_EXCEEDED", 504
    CANCELLED = "cancelled", "CANCELLED", 503
    UNAUTHENTICATED = "unauthenticated", "UNAUTHENTICATED", 401
    FORBIDDEN = "forbidden", "PERMISSION_DENIED", 403
    UNIMPLEMENTED = "unimplemented", "UNIMPLEMENTED", 501
    INTERNAL = "internal", "INTERNAL", 500

    def __init__(self, word: str, status: str, http_status: int) -> None:
        self.word = word
        self.status = status
        self.http_status = http_status


class ServeError(Exception):
    """Base class of the errors raised on purpose; `str(error)` may be shown to the client."""

    code = ErrorCode.INTERNAL


class ConfigError(ServeError):
    """Mistake in a configuration; the message names the file, the key and the rule."""

    code = ErrorCode.INVALID


class InvalidInput(ServeError):
    """Malformed request; the message names the tensor, the index and the rule."""

    code = ErrorCode.INVALID


class UnknownName(ServeError):
    """Unknown name of a model, version or graph."""

    code = ErrorCode.NOT_FOUND


class NameTaken(ServeError):
    """Name that is already taken."""

    code = ErrorCode.EXISTS


class Mismatch(ServeError):
    """Request for something that exists but has another state or shape; names both."""

    code = ErrorCode.PRECONDITION


class NotReady(ServeError):
    """Request for something that exists but cannot serve now: loading, draining, lanes lost."""

    code = ErrorCode.UNAVAILABLE


class VersionReplaced(NotReady):
    """Version that was chosen for a request and has been unloaded since; another can be chosen."""


class TooBig(ServeError):
    """Request that needs more memory than the device has; retrying is useless."""

    code = ErrorCode.EXHAUSTED


class QueueFull(ServeError):
    """Request beyond the queue's bound; it may be accepted `retry_after_ns` later."""

    code = ErrorCode.EXHAUSTED

    def __init__(self, message: str, retry_after_ns: int) -> None:
        super().__init__(message)
        self.retry_after_ns = retry_after_ns


class DeadlineExceeded(ServeError):
    """Request whose own time limit (gRPC deadline or `timeout`) passed."""

    code = ErrorCode.DEADLINE


class RequestCancelled(ServeError):
    """Request that its client cancelled, or whose client disconnected."""

    code = ErrorCode.CANCELLED


class NotIdentified(ServeError):
    """Call without a credential that the server accepts."""

    code = ErrorCode.UNAUTHENTICATED


class NotPermitted(ServeError):
    """Call that its caller's credential does not allow; names the role or the limit."""

    code = ErrorCode.FORBIDDEN


class ModelError(ServeError):
    """Failure of a model: it raised while running, or could not be loaded."""

    code = ErrorCode.INTERNAL


class Unsupported(ServeError):
    """Request for something that this server does not offer."""

    code = ErrorCode.UNIMPLEMENTED


class InvariantViolation(ServeError):
    """Bug in the server, never a user's mistake; the message has the task's history."""

    code = ErrorCode.INTERNAL
