"""Where the nodes of one request are answered, when each had better be where it lives.

A request for several nodes of a graph that is shared out can be split by the parts of its nodes:
each part is answered by a server that holds it, and needs less of others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve.core.cluster.route import choose
from serve.core.cluster.views import MachineView, RoutedRequest

#: Most parts of one request that are sent to others; the nodes of further ones stay.
MOST_SENT = 16


@dataclass(frozen=True, slots=True)
class PartPlaces:
    """Machines of the parts that are sent; the nodes of all others stay here."""

    sent: Mapping[int, MachineView] = field(default_factory=dict)
    #: Nothing stays here: the request is passed on as it is, to the only machine.
    whole: bool = False


def split_by_home(
    counts: Mapping[int, int],
    here: int,
    request: RoutedRequest,
    others: Sequence[MachineView],
    now_ns: int,
) -> PartPlaces:
    """Decide which parts of a request are sent to others.

    Args:
        counts: Nodes of the request by part; those that every machine holds are of `here`.
        here: Part of this machine.
        request: What is known of it.
        others: Machines that it could go to, whose facts tell their parts.
        now_ns: The time now.

    One part always stays, the smallest where none is here, as what puts the answer together runs
    one too. A request for nodes of one part elsewhere goes there as a whole.
    """
    sent: dict[int, MachineView] = {}
    away = sorted((part for part in counts if part != here), key=lambda part: -counts[part])
    for part in away:
        holding = [view for view in others if view.facts.part == part]
        there = choose(request, holding, now_ns)
        if there is not None and len(sent) < MOST_SENT:
            sent[part] = there
    if not counts.get(here) and len(sent) == len(away):
        if len(away) == 1:
            return PartPlaces(sent, whole=True)
        if away:
            del sent[away[-1]]
    return PartPlaces(sent)
