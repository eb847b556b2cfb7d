"""How a server makes the changes of graphs that are shared out, in the order of ``sequencer``."""

from collections import deque
from dataclasses import dataclass

from serve.core.cluster.sequencer import HEARTBEAT_NS, NO_CHANGES, TimeToLook, chained

#: A follower that hears nothing for so long asks again.
ASK_AGAIN_NS = 2 * HEARTBEAT_NS
#: A sequencer that was not heard of for so long is lost, or makes a large change.
SILENT_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class ChangesCame:
    """The sequencer sent the changes after a number, and how many it has."""

    after: int
    latest: int
    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HistoryRefused:
    """The sequencer does not know the changes of which this server made so many."""

    number: int


@dataclass(frozen=True, slots=True)
class ChangeMade:
    """The change that was to be made is made."""


@dataclass(frozen=True, slots=True)
class ChangeFailed:
    """The change that was to be made cannot be made here."""

    told: str


FollowerEvent = TimeToLook | ChangesCame | HistoryRefused | ChangeMade | ChangeFailed


@dataclass(frozen=True, slots=True)
class AskChanges:
    """Ask the sequencer for the changes after that number."""

    number: int
    digest: bytes
    #: An answer need not come before there is one.
    waits: bool


@dataclass(frozen=True, slots=True)
class MakeChange:
    """Make the change, then tell of it by ``ChangeMade`` or ``ChangeFailed``."""

    record: bytes


FollowerCommand = AskChanges | MakeChange


class Follower:
    """Makes the changes of the sequencer in their order. Driven by `handle` alone."""

    def __init__(self) -> None:
        #: Changes that were made, and their digest.
        self.number = 0
        self._digest = NO_CHANGES
        #: Changes that the sequencer has, as far as is known; None before it said so.
        self.latest: int | None = None
        #: Why it makes no more changes; empty while it does.
        self.stuck = ""
        self._coming: deque[bytes] = deque()
        self._ask_ns = 0
        self._heard_ns: int | None = None

    @property
    def caught_up(self) -> bool:
        """True when it made all changes that it knows of."""
        return not self.stuck and self.latest is not None and self.number >= self.latest

    @property
    def behind(self) -> int:
        """Number of changes that it knows of and has not made."""
        return max(0, (self.latest or 0) - self.number)

    @property
    def wake_ns(self) -> int | None:
        """When to say that time passed, if nothing else happens before."""
        return None if self.stuck else self._ask_ns

    def hears(self, now_ns: int) -> bool:
        """Return True when the sequencer was heard of lately."""
        return self._heard_ns is not None and now_ns < self._heard_ns + SILENT_NS

    def handle(self, event: FollowerEvent, now_ns: int) -> list[FollowerCommand]:
        """Return what to do about the event, in this order."""
        if self.stuck:
            return []
        match event:
            case ChangesCame(after, latest, records):
                self._heard_ns = now_ns
                self.latest = max(latest, self.latest or 0)
                if after != self.number or self._coming:
                    return []
                self._coming.extend(records)
                return self._next(now_ns)
            case ChangeMade():
                self._digest = chained(self._digest, self._coming.popleft())
                self.number += 1
                return self._next(now_ns)
            case ChangeFailed(told):
                self.stuck = f"could not make change {self.number + 1}: {told}"
            case HistoryRefused(number):
                if number == self.number and not self._coming:
                    self.stuck = f"made {number} changes that the sequencer does not know of"
            case TimeToLook():
                if not self._coming and now_ns >= self._ask_ns:
                    return self._next(now_ns)
        return []

    def _next(self, now_ns: int) -> list[FollowerCommand]:
        self._ask_ns = now_ns + ASK_AGAIN_NS
        if self._coming:
            return [MakeChange(self._coming[0])]
        return [AskChanges(self.number, self._digest, self.latest is not None)]
