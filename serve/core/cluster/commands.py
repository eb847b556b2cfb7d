"""What a front, or the directory of all machines, decides."""

from dataclasses import dataclass
from enum import Enum


class NoAnswer(Enum):
    """Why a request ends without an answer of a machine."""

    #: No machine has its model.
    NO_MODEL = "no_model"
    #: No machine that has its model holds its graph.
    NO_GRAPH = "no_graph"
    #: No machine that has its model has the memory.
    TOO_BIG = "too_big"
    #: As many requests are with this front as may be.
    FRONT_FULL = "front_full"
    #: Every machine that could serve it refused it.
    REFUSED = "refused"
    #: No machine could be reached, or one was lost that may have carried it out.
    UNAVAILABLE = "unavailable"
    #: The caller's time passed.
    EXPIRED = "expired"


# -- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """Send the request to a machine."""

    request_id: int
    attempt: int
    machine: str


@dataclass(frozen=True, slots=True)
class WithdrawAttempt:
    """Wait no longer for an attempt; what still comes of it is dropped."""

    request_id: int
    attempt: int
    machine: str


@dataclass(frozen=True, slots=True)
class PassAnswer:
    """Give the caller what the machine answered to this attempt."""

    request_id: int
    attempt: int
    machine: str


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Tell the caller that there is no answer, and why."""

    request_id: int
    reason: NoAnswer
    message: str
    #: When trying again makes sense; None: nobody said.
    retry_after_ns: int | None = None


# -- machines -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineDrained:
    """A draining machine has answered everything; it may end."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """The front routes to this machine from now on, and no other front does."""

    front: str
    machine: str


@dataclass(frozen=True, slots=True)
class DisownMachine:
    """The front sends this machine no new requests."""

    front: str
    machine: str


RequestCommand = SendAttempt | WithdrawAttempt | PassAnswer | EndRequest
ClusterCommand = RequestCommand | MachineDrained | OwnMachine | DisownMachine
