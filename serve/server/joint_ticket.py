"""A joint request on its way: the tasks of its models, which one thread serves."""

from collections.abc import Sequence
from queue import SimpleQueue

from serve.core.types import Outcome
from serve.server.api import InferResult
from serve.server.ticket import Order, WaitingTicket


class WaitingTickets:
    """Implements ``api.JointTicket``; its members are accepted together."""

    def __init__(
        self, members: Sequence[WaitingTicket], orders: "SimpleQueue[Order]", joint_uid: str
    ) -> None:
        """All `members` get their orders through `orders`."""
        self.members = tuple(members)
        self.joint_uid = joint_uid
        self._orders = orders

    def results(self) -> list[InferResult | Exception]:
        """See ``api.JointTicket``."""
        found: dict[WaitingTicket, InferResult | Exception] = {}
        while len(found) < len(self.members):
            ticket, outcome = self._orders.get()
            if ticket in found:
                continue  # it ended by a bug, of which the scheduler has heard
            try:
                if (result := _obeyed(ticket, outcome)) is not None:
                    found[ticket] = result
            except Exception as error:
                found[ticket] = error
        return [found[ticket] for ticket in self.members]

    def cancel(self) -> None:
        """See ``api.JointTicket``."""
        for ticket in self.members:
            ticket.cancel()


def _obeyed(ticket: WaitingTicket, outcome: Outcome | None) -> InferResult | None:
    """Prepare, or take the outcome and return the result; raises ServeError for one without."""
    if outcome is None:
        ticket.prepare()
        return None
    return ticket.end(outcome)
