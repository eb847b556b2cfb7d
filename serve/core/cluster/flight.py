"""A request on its way through machines, and what its caller is told when none takes it."""

from collections.abc import Sequence

from serve.core.cluster.commands import NoAnswer
from serve.core.cluster.events import AttemptFailed
from serve.core.cluster.members import Member
from serve.core.cluster.views import MachineFacts, MachineView, RoutedRequest


class Flight:
    """Request of a front that has no answer yet."""

    __slots__ = (
        "attempt", "avoid", "full_until_ns", "member", "refusal", "refused_by", "request",
        "spared", "until_ns",
    )  # fmt: skip

    def __init__(self, request: RoutedRequest) -> None:
        self.request = request
        #: Attempts so far.
        self.attempt = 0
        #: Where it is; None while it waits for a machine.
        self.member: Member | None = None
        #: Machines that failed it.
        self.avoid: set[MachineView] = set()
        #: The refusal that asks for the shortest wait, if machines refused it.
        self.refusal: AttemptFailed | None = None
        #: Machines that refused it and have had no place for it since.
        self.refused_by: set[MachineView] = set()
        #: Attempts that do not count: machines that refused them may be tried again.
        self.spared = 0
        #: When it waits no longer for a machine; and for one that refused it to have a place.
        self.until_ns = 0
        self.full_until_ns: int | None = None

    def ask_again(self, view: MachineView) -> None:
        """Let it go once more to a machine that refused it."""
        if view in self.refused_by:
            self.refused_by.remove(view)
            self.avoid.discard(view)
            self.spared += 1

    def waited_long_enough(self, now_ns: int) -> bool:
        """Return True unless it may wait on for a machine that refused it."""
        return self.full_until_ns is None or self.full_until_ns <= now_ns


def never(request: RoutedRequest, facts: Sequence[MachineFacts]) -> tuple[NoAnswer, str] | None:
    """Return why no machine that is known could ever serve it; None when one could."""
    if not facts or any(one.can_hold(request) for one in facts):
        return None
    having = [one for one in facts if one.has_model(request.model)]
    if not having:
        message = f"model '{request.model}' is on none of {len(facts)} machines"
        return NoAnswer.NO_MODEL, message
    if not any(one.has_graph(request.graph) for one in having):
        message = f"graph '{request.graph}' is on none of {len(having)} machines"
        return NoAnswer.NO_GRAPH, message
    most_bytes = max(one.budget_bytes or 0 for one in having)
    message = (
        f"needs {request.need_bytes} bytes, the largest of {len(having)} machines that have "
        f"'{request.model}' has {most_bytes} for tasks"
    )
    return NoAnswer.TOO_BIG, message


def unrouted(flight: Flight, machine_count: int) -> tuple[NoAnswer, str, int | None]:
    """Return why no machine took the request, and when to try again if machines said so."""
    refusal = flight.refusal
    if refusal is not None:
        message = f"{len(flight.avoid)} machines did not take it: {refusal.message}"
        return NoAnswer.REFUSED, message, refusal.retry_after_ns
    reached = f"{len(flight.avoid)} were lost with it" if flight.avoid else "none is ready"
    return NoAnswer.UNAVAILABLE, f"of {machine_count} machines {reached}", None


def sooner(refusal: AttemptFailed, known: AttemptFailed | None) -> bool:
    """Return True when a refusal asks for a shorter wait than the one that is known."""
    if known is None:
        return True
    asked_ns, known_ns = refusal.retry_after_ns, known.retry_after_ns
    return asked_ns is not None and (known_ns is None or asked_ns < known_ns)
