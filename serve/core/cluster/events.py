"""What a front, or the directory of all machines, is told."""

from dataclasses import dataclass
from enum import Enum

from serve.core.cluster.views import MachineFacts, RoutedRequest


class AttemptFailure(Enum):
    """Kind of failure after which a request may be sent to another machine."""

    #: No answer came, and none will: the connection is gone.
    UNREACHABLE = "unreachable"
    #: The machine did not take it, so nothing was carried out: its queue is full, it stops, …
    REFUSED = "refused"


# -- machines -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineAnnounced:
    """A machine started, or its facts changed."""

    facts: MachineFacts


@dataclass(frozen=True, slots=True)
class ProbePassed:
    """A machine answered that it serves."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ProbeMissed:
    """A machine did not answer in time, or that it does not serve."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ContactLost:
    """A connection to a machine broke; the next probe tells whether it still serves."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class MachineDied:
    """A machine has ended, with everything that was on it."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """A machine is to take no new requests, and to leave when it has answered those it has."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class MachineTold:
    """A machine says what is on it, others' requests included."""

    name: str
    incarnation: int
    count: int
    #: Run times on the reference pool, summed.
    work_ns: int = 0


MachineEvent = MachineAnnounced | ProbePassed | ProbeMissed | ContactLost | MachineDied | DrainAsked


# -- fronts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontJoined:
    """A front can own machines."""

    front: str


@dataclass(frozen=True, slots=True)
class FrontLeft:
    """A front has ended."""

    front: str


# -- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A caller wants an answer."""

    request: RoutedRequest


@dataclass(frozen=True, slots=True)
class RequestGivenUp:
    """The caller wants no answer any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class AttemptAnswered:
    """The machine answered an attempt, with a result or an error that another would give too."""

    request_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt ended without an answer."""

    request_id: int
    attempt: int
    failure: AttemptFailure
    message: str = ""
    #: When the machine that refused it would have it back; None: it did not say.
    retry_after_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but that it is later."""


RequestEvent = RequestArrived | RequestGivenUp | AttemptAnswered | AttemptFailed
