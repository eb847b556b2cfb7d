"""The life of a machine in a cluster: its states and every move between them.

The table is complete: every event has a row in every state, so no order of events can fail. News of
an earlier incarnation changes nothing.
"""

from collections.abc import Iterator
from enum import Enum

from serve.core.cluster.events import (
    ContactLost,
    DrainAsked,
    MachineAnnounced,
    MachineDied,
    MachineEvent,
    ProbeMissed,
    ProbePassed,
)
from serve.core.cluster.views import MachineView

#: Probes missed in a row after which a machine is gone.
MOST_MISSES = 2


class MachineState(Enum):
    """State of a machine."""

    #: Announced, and has not answered a probe yet.
    JOINING = "joining"
    #: Takes requests.
    READY = "ready"
    #: Missed a probe or lost a connection: keeps what it has and gets no more.
    SUSPECT = "suspect"
    #: Is to leave: keeps what it has and gets no more.
    DRAINING = "draining"
    #: Has ended, or does not answer; what was on it is lost.
    GONE = "gone"


class MissedTooMany:
    """The machine missed as many probes in a row as none may."""


MachineCause = type[object]

_JOINING, _READY, _SUSPECT = MachineState.JOINING, MachineState.READY, MachineState.SUSPECT
_DRAINING, _GONE = MachineState.DRAINING, MachineState.GONE

TRANSITIONS: dict[tuple[MachineState, MachineCause], MachineState] = {
    (_JOINING, ProbePassed): _READY,
    (_JOINING, ProbeMissed): _JOINING,
    (_JOINING, ContactLost): _JOINING,
    (_JOINING, MissedTooMany): _GONE,
    (_JOINING, MachineDied): _GONE,
    (_JOINING, DrainAsked): _DRAINING,
    (_READY, ProbePassed): _READY,
    (_READY, ProbeMissed): _SUSPECT,
    (_READY, ContactLost): _SUSPECT,
    (_READY, MissedTooMany): _GONE,
    (_READY, MachineDied): _GONE,
    (_READY, DrainAsked): _DRAINING,
    (_SUSPECT, ProbePassed): _READY,
    (_SUSPECT, ProbeMissed): _SUSPECT,
    (_SUSPECT, ContactLost): _SUSPECT,
    (_SUSPECT, MissedTooMany): _GONE,
    (_SUSPECT, MachineDied): _GONE,
    (_SUSPECT, DrainAsked): _DRAINING,
    (_DRAINING, ProbePassed): _DRAINING,
    (_DRAINING, ProbeMissed): _DRAINING,
    (_DRAINING, ContactLost): _DRAINING,
    (_DRAINING, MissedTooMany): _GONE,
    (_DRAINING, MachineDied): _GONE,
    (_DRAINING, DrainAsked): _DRAINING,
    (_GONE, ProbePassed): _GONE,  # it has to announce itself again
    (_GONE, ProbeMissed): _GONE,
    (_GONE, ContactLost): _GONE,
    (_GONE, MissedTooMany): _GONE,
    (_GONE, MachineDied): _GONE,
    (_GONE, DrainAsked): _GONE,
}


class Member:
    """Machine with its state."""

    __slots__ = ("misses", "state", "view")

    def __init__(self, view: MachineView) -> None:
        self.view = view
        self.state = MachineState.JOINING
        #: Probes missed since the last that passed.
        self.misses = 0

    @property
    def name(self) -> str:
        """The machine's name."""
        return self.view.facts.name


class Members:
    """All machines that were announced, by name; changes only in ``take``."""

    def __init__(self, most_misses: int = MOST_MISSES) -> None:
        if most_misses < 1:
            raise ValueError(f"at least 1 missed probe, got {most_misses}")
        self._most_misses = most_misses
        self._of: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._of.values())

    def __len__(self) -> int:
        return len(self._of)

    def get(self, name: str, incarnation: int | None = None) -> Member | None:
        """Return the machine of that name; None unless it is that incarnation, if one is given."""
        member = self._of.get(name)
        if member is None or incarnation in (None, member.view.facts.incarnation):
            return member
        return None

    def forget(self, member: Member) -> None:
        """Forget a machine that is gone for good."""
        if self._of.get(member.name) is member:
            del self._of[member.name]

    def take(self, event: MachineEvent) -> list[tuple[Member, MachineState]]:
        """Take in one event; returns each machine that changed its state, with the one before.

        A machine that is announced as a new incarnation while an earlier one is here is two: the
        earlier, which is gone, and the new.
        """
        if isinstance(event, MachineAnnounced):
            return self._announced(event)
        member = self.get(event.name, event.incarnation)
        if member is None:
            return []
        cause: MachineCause = type(event)
        if cause is ProbePassed:
            member.misses = 0
        elif cause is ProbeMissed:
            member.misses += 1
            if member.misses >= self._most_misses:
                cause = MissedTooMany
        return self._move(member, TRANSITIONS[member.state, cause])

    def _announced(self, event: MachineAnnounced) -> list[tuple[Member, MachineState]]:
        facts = event.facts
        known = self._of.get(facts.name)
        changed: list[tuple[Member, MachineState]] = []
        if known is not None:
            if facts.incarnation < known.view.facts.incarnation:
                return []
            if facts.incarnation == known.view.facts.incarnation:
                known.view.know(facts)
                return []
            changed = self._move(known, MachineState.GONE)
        member = self._of[facts.name] = Member(MachineView(facts))
        # To whoever listens it came from nowhere, as a machine that is gone does.
        changed.append((member, MachineState.GONE))
        return changed

    def _move(self, member: Member, after: MachineState) -> list[tuple[Member, MachineState]]:
        before, member.state = member.state, after
        return [(member, before)] if before is not after else []
