"""Every error the server raises on purpose.

The tree (`code` in brackets; ``ErrorCode`` is the table of codes and what they are on the wire):

    ServeError [INTERNAL]
    ├── ConfigError [INVALID]          a configuration file or a model's config is wrong
    ├── InvalidInput [INVALID]         a request is malformed: names tensor, index and rule
    ├── UnknownName [NOT_FOUND]        no model, version or graph has that name
    ├── NameTaken [EXISTS]             that name is taken
    ├── Mismatch [PRECONDITION]        things that exist do not fit each other: names both
    ├── NotReady [UNAVAILABLE]         loading, draining, or no lane is left to run it
    ├── TooBig [EXHAUSTED]             one request needs more than the device has
    ├── QueueFull [EXHAUSTED]          try again later: carries `retry_after_ns`
    ├── DeadlineExceeded [DEADLINE]    the request's own time limit passed
    ├── RequestCancelled [CANCELLED]   the client went away
    ├── ModelError [INTERNAL]          the model raised, or could not be loaded
    ├── Unsupported [UNIMPLEMENTED]    asked for something this server does not offer
    └── InvariantViolation [INTERNAL]  a bug in the server: carries the task's story
"""

from enum import Enum


class ErrorCode(Enum):
    """What kind of failure this is: our own word, and gRPC's name of its status code.

    The one table of codes. Statuses of calls, names in the report and the client's errors are
    made from it.
    """

    INVALID = "invalid", "INVALID_ARGUMENT"
    NOT_FOUND = "not_found", "NOT_FOUND"
    EXISTS = "exists", "ALREADY_EXISTS"
    PRECONDITION = "precondition", "FAILED_PRECONDITION"
    UNAVAILABLE = "unavailable", "UNAVAILABLE"
    EXHAUSTED = "exhausted", "RESOURCE_EXHAUSTED"
    DEADLINE = "deadline", "DEADLINE_EXCEEDED"
    CANCELLED = "cancelled", "CANCELLED"
    UNIMPLEMENTED = "unimplemented", "UNIMPLEMENTED"
    INTERNAL = "internal", "INTERNAL"

    def __init__(self, word: str, status: str) -> None:
        self.word = word
        self.status = status


class ServeError(Exception):
    """Base of all errors raised on purpose; `str(error)` is fit for the client."""

    code = ErrorCode.INTERNAL


class ConfigError(ServeError):
    """A configuration is wrong; the message names the file, the key and the rule."""

    code = ErrorCode.INVALID


class InvalidInput(ServeError):
    """A request is malformed; the message names the tensor, the index and the rule."""

    code = ErrorCode.INVALID


class UnknownName(ServeError):
    """A model, a version or a graph by that name is not here."""

    code = ErrorCode.NOT_FOUND


class NameTaken(ServeError):
    """Something by that name is here already."""

    code = ErrorCode.EXISTS


class Mismatch(ServeError):
    """What is asked for exists, but not in the state or shape it is asked for."""

    code = ErrorCode.PRECONDITION


class NotReady(ServeError):
    """The thing exists and cannot serve now: loading, draining, or lanes lost."""

    code = ErrorCode.UNAVAILABLE


class TooBig(ServeError):
    """One request needs more memory than the device can ever give; retrying is useless."""

    code = ErrorCode.EXHAUSTED


class QueueFull(ServeError):
    """The queue is at its bound; the same request may be accepted later."""

    code = ErrorCode.EXHAUSTED

    def __init__(self, message: str, retry_after_ns: int) -> None:
        super().__init__(message)
        self.retry_after_ns = retry_after_ns


class DeadlineExceeded(ServeError):
    """The request's own time limit (gRPC deadline or `timeout`) passed."""

    code = ErrorCode.DEADLINE


class RequestCancelled(ServeError):
    """The client cancelled or went away."""

    code = ErrorCode.CANCELLED


class ModelError(ServeError):
    """The model raised while running, or could not be loaded."""

    code = ErrorCode.INTERNAL


class Unsupported(ServeError):
    """The request asks for something this server does not offer."""

    code = ErrorCode.UNIMPLEMENTED


class InvariantViolation(ServeError):
    """A bug in the server, never a user's mistake; the message carries the task's story."""

    code = ErrorCode.INTERNAL
