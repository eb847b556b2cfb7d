"""A request in flight, as far as cancelling goes."""

from serve.server.api import Ticket


class Flight:
    """Passes a cancellation on to the ticket, whichever comes first, until it has landed."""

    def __init__(self) -> None:
        self._ticket: Ticket | None = None
        self._cancelled = False

    def take_off(self, ticket: Ticket) -> None:
        """The request was submitted."""
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def land(self) -> None:
        """The request is answered; cancelling it means nothing any more."""
        self._ticket = None

    def cancel(self) -> None:
        """The client went away. Any thread, any number of times."""
        # NOTE: set before reading, as `take_off` does it the other way round: in any order of
        # the two threads one of them sees both, and cancelling twice is harmless.
        self._cancelled = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
