"""What a look at a machine means for its life."""

from dataclasses import replace
from enum import Enum

from serve.core.cluster.events import (
    ContactLost,
    MachineAnnounced,
    MachineEvent,
    ProbeMissed,
    ProbePassed,
)
from serve.core.cluster.members import MachineState, Members
from serve.core.cluster.views import MachineFacts


class Probe(Enum):
    """What came of asking a machine whether it serves."""

    READY = "ready"
    #: It answered that it does not serve now.
    NOT_READY = "not ready"
    #: It did not answer in time.
    SILENT = "silent"
    #: Nobody was there to be asked.
    UNREACHED = "unreached"


def events_of(
    probe: Probe, name: str, members: Members, graphs: frozenset[str] | None = None
) -> list[MachineEvent]:
    """Return the events that a look at the machine is, when nobody else announces it.

    A machine that is gone and answers again joins anew. One that was not ready and is may have been
    started with other `graphs`: what it holds now; None when not known.
    """
    member = members.get(name)
    incarnation = 0 if member is None else member.view.facts.incarnation
    if probe is Probe.SILENT:
        return [ProbeMissed(name, incarnation)]
    if probe is not Probe.READY:
        return [ContactLost(name, incarnation)]
    if member is not None and member.state is MachineState.READY:
        return [ProbePassed(name, incarnation)]
    if member is not None and member.state is not MachineState.GONE:
        facts = replace(member.view.facts, graphs=graphs)
    else:
        facts = MachineFacts(name, incarnation + 1, graphs=graphs)
    return [MachineAnnounced(facts), ProbePassed(name, facts.incarnation)]
