"""Which front owns which machine.

A front that is alone in sending to its machines knows what is on them by counting. Two fronts that
share a machine each see half of it, so every machine has one owner. Fronts get the same load from
outside, so they own machines of nearly the same weight, and as few as possible change hands.
"""

from collections.abc import Callable
from typing import Any

from serve.core.cluster.commands import ClusterCommand, DisownMachine, OwnMachine
from serve.core.cluster.events import (
    ContactLost,
    DrainAsked,
    FrontJoined,
    FrontLeft,
    MachineAnnounced,
    MachineDied,
    MachineEvent,
    ProbeMissed,
    ProbePassed,
)
from serve.core.cluster.members import MOST_MISSES, MachineState, Members


class Directory:
    """Decides who owns every machine of a cluster; changes only in ``handle``."""

    def __init__(self, most_misses: int = MOST_MISSES) -> None:
        self._members = Members(most_misses)
        #: Of each front, its machines by name, with their weights.
        self._owned: dict[str, dict[str, float]] = {}
        #: Of each machine that is owned, the front that was told.
        self._told: dict[str, tuple[str, int]] = {}
        self._on: dict[type, Callable[[Any], object]] = {
            FrontJoined: self._front_joined,
            FrontLeft: self._front_left,
            MachineAnnounced: self._members.take,
            ProbePassed: self._members.take,
            ProbeMissed: self._members.take,
            ContactLost: self._members.take,
            MachineDied: self._members.take,
            DrainAsked: self._members.take,
        }

    def handle(self, event: MachineEvent | FrontJoined | FrontLeft) -> list[ClusterCommand]:
        """Take in one event and return who owns what from now on, losses of machines first."""
        self._on[type(event)](event)
        self._share_out()
        return self._news()

    @property
    def members(self) -> Members:
        """The machines; to be looked at only."""
        return self._members

    def owner(self, machine: str) -> str | None:
        """Return the front that owns the machine; None while there is no front, or it is gone."""
        told = self._told.get(machine)
        return None if told is None else told[0]

    def _front_joined(self, event: FrontJoined) -> None:
        self._owned.setdefault(event.front, {})

    def _front_left(self, event: FrontLeft) -> None:
        if self._owned.pop(event.front, None) is not None:
            # Nobody is there to be told.
            self._told = {name: who for name, who in self._told.items() if who[0] != event.front}

    def _share_out(self) -> None:
        """Give every machine that is not gone an owner, and even out."""
        owned = self._owned
        if not owned:
            return
        here = {m.name: m.view.weight for m in self._members if m.state is not MachineState.GONE}
        for machines in owned.values():
            for name in [name for name in machines if name not in here]:
                del machines[name]
            for name in machines:
                machines[name] = here[name]
        sums = {front: sum(machines.values()) for front, machines in owned.items()}
        has_owner = {name for machines in owned.values() for name in machines}
        orphans = sorted((-weight, name) for name, weight in here.items() if name not in has_owner)
        for minus_weight, name in orphans:
            front = min(sums, key=lambda one: (sums[one], one))
            owned[front][name] = -minus_weight
            sums[front] -= minus_weight
        while (move := self._evening_move(sums)) is not None:
            name, source, target = move
            weight = owned[target][name] = owned[source].pop(name)
            sums[source] -= weight
            sums[target] += weight

    def _evening_move(self, sums: dict[str, float]) -> tuple[str, str, str] | None:
        """Return the machine that the heaviest front gives the lightest, so that they are closer.

        It weighs at most half of the difference, so the sum of squares falls with every move.
        """
        source = max(sums, key=lambda front: (sums[front], front))
        target = min(sums, key=lambda front: (sums[front], front))
        most = (sums[source] - sums[target]) / 2
        able = [(w, name) for name, w in self._owned[source].items() if w <= most * (1 + 1e-9)]
        return (max(able)[1], source, target) if able and most > 0 else None

    def _news(self) -> list[ClusterCommand]:
        """Return what differs from what the fronts were told last."""
        now: dict[str, tuple[str, int]] = {}
        for front, machines in self._owned.items():
            for name in machines:
                member = self._members.get(name)
                assert member is not None
                now[name] = front, member.view.facts.incarnation
        out: list[ClusterCommand] = [
            DisownMachine(who[0], name)
            for name, who in self._told.items()
            if now.get(name, ("", 0))[0] != who[0]
        ]
        out += [
            OwnMachine(who[0], name) for name, who in now.items() if self._told.get(name) != who
        ]
        self._told = now
        return out
